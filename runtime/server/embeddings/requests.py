"""Types of the requests to `/v1/embeddings`, `/v1/rerank` and `/v1/score`.

The first is OpenAI's, with the prompt names of sentence-transformers, the second Jina's and Cohere's, the third vLLM's.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar, cast

import msgspec
from starlette.requests import Request

from ...cache.why_not_more import MatchPolicy
from ...engine.request_options import Prompt, RequestOptions
from ...errors import InvalidParameter
from ..http.api_keys import client_of
from ..openai.requests import CacheText, TokenId
from ..request_log import record_of
from ..served import Served

T = TypeVar("T")
MAX_TEXTS = 2048  # per request, as in OpenAI's API


class VectorRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields of all three: the model, and the namespace and match policy of the prefix cache."""

    model: str | None = None
    cache_salt: CacheText | None = None
    prompt_cache_key: CacheText | None = None
    cache_match: MatchPolicy | None = None

    def options(self, served: Served, request: Request) -> RequestOptions:
        """Return the request's options for the engine.

        Raises:
            InvalidParameter: the salt or the cache key is too long.
        """
        return RequestOptions(
            namespace=served.namespace(request, self.cache_salt, self.prompt_cache_key),
            lora=served.lora,
            client=client_of(request),
            cache_match=self.cache_match,
            request_id=record_of(request).request_id or None,
        )


class EmbeddingsRequest(VectorRequest, kw_only=True):
    """Body of `POST /v1/embeddings`: one text or several, each as text or as token ids."""

    input: str | list[str | TokenId | list[TokenId]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, msgspec.Meta(ge=1)] | None = None
    prompt_name: str | None = None  # TEI's: which of the model's own prompts to put before each text

    @property
    def texts(self) -> list[Prompt]:
        """The list of texts; a list of token ids is one text.

        Raises:
            InvalidParameter: the list is empty, mixes texts and ids, or has too many.
        """
        if isinstance(self.input, str):
            return [self.input]
        kinds = set(map(type, self.input))
        if not kinds:
            raise InvalidParameter("input is an empty list; send at least one text", param="input")
        if kinds == {int}:
            return [cast("list[int]", self.input)]
        if len(kinds) > 1:
            message = "input mixes texts and token ids; send texts, or token ids, or lists of token ids"
            raise InvalidParameter(message, param="input")
        return require_few(cast("list[Prompt]", self.input), "input")


class DocumentText(msgspec.Struct, kw_only=True):
    """A document as an object; its other fields are ignored."""

    text: str


class RerankRequest(VectorRequest, kw_only=True):
    """Body of `POST /v1/rerank` and `/v2/rerank`."""

    query: str
    documents: list[str | DocumentText]
    top_n: Annotated[int, msgspec.Meta(ge=1)] | None = None
    return_documents: bool | None = None
    instruction: str | None = None  # radixlm's: description of a relevant document, for the model

    @property
    def texts(self) -> list[str]:
        """The documents.

        Raises:
            InvalidParameter: there are none, or too many.
        """
        if not self.documents:
            raise InvalidParameter("documents is an empty list; send at least one document", param="documents")
        documents = [each if isinstance(each, str) else each.text for each in self.documents]
        return require_few(documents, "documents")


class ScoreRequest(VectorRequest, kw_only=True):
    """Body of `POST /v1/score`: one query for all documents, or one for each."""

    text_1: str | list[str]
    text_2: str | list[str]
    instruction: str | None = None  # radixlm's, as in `RerankRequest`

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The pairs of a query and a document.

        Raises:
            InvalidParameter: there are none, too many, or different numbers of queries and documents.
        """
        queries = [self.text_1] if isinstance(self.text_1, str) else self.text_1
        documents = [self.text_2] if isinstance(self.text_2, str) else self.text_2
        if len(queries) == 1:
            queries = queries * len(documents)
        if not documents or len(queries) != len(documents):
            raise InvalidParameter(
                f"text_1 has {len(queries)} texts and text_2 {len(documents)}; send one for all, or as many",
                param="text_1",
            )
        return list(zip(queries, require_few(documents, "text_2"), strict=True))


def require_few(texts: list[T], name: str) -> list[T]:
    """Return `texts` if there are at most `MAX_TEXTS`.

    Raises:
        InvalidParameter: there are more.
    """
    if len(texts) > MAX_TEXTS:
        raise InvalidParameter(
            f"{name} has {len(texts)} texts; one request may have {MAX_TEXTS}: send several", param=name
        )
    return texts
