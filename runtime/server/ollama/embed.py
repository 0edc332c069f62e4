"""`POST /api/embed` and `POST /api/embeddings`: embeddings in Ollama's format."""

from __future__ import annotations

import time
from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...engine.vectors.results import Embedding
from ..embeddings.requests import MAX_TEXTS, EmbeddingsRequest
from ..embeddings.vectors import encoded, vectors_of
from ..lenient.shapes import relaxing
from ..models import ModelEndpoint
from ..served import Served, json_response
from .keep_alive import keep_alive_s
from .replies import nanoseconds


class OllamaVectorRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields of both embedding requests."""

    model: str | None = None
    keep_alive: float | str | None = None
    options: dict[str, Any] | None = None  # ignored: none changes an embedding

    def __post_init__(self) -> None:
        if self.keep_alive is not None:
            keep_alive_s(self.keep_alive)


class OllamaEmbedRequest(OllamaVectorRequest, kw_only=True):
    """Body of `POST /api/embed`."""

    input: str | Annotated[list[str], msgspec.Meta(max_length=MAX_TEXTS)]
    truncate: bool | None = None  # ignored: a text that does not fit is an error
    dimensions: Annotated[int, msgspec.Meta(ge=1)] | None = None

    @property
    def texts(self) -> list[str]:
        """The list of texts."""
        return [self.input] if isinstance(self.input, str) else self.input


class OllamaEmbeddingsRequest(OllamaVectorRequest, kw_only=True):
    """Body of `POST /api/embeddings`, Ollama's older endpoint."""

    prompt: str


class OllamaEmbedReply(msgspec.Struct, kw_only=True):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbeddingsReply(msgspec.Struct):
    embedding: list[float]


async def _vectors_of(
    served: Served, request: Request, texts: list[str], *, dimensions: int | None = None
) -> list[Embedding]:
    """Return the embedding of each text, in order. Raises as `embeddings.vectors.vectors_of` does."""
    body = EmbeddingsRequest(input=[*texts], dimensions=dimensions)
    return await vectors_of(served, request, body.texts, body.options(served, request), dimensions=dimensions)


async def embed(served: Served, request: Request, body: OllamaEmbedRequest) -> Response:
    """`POST /api/embed`: return the embeddings of texts."""
    begun_at = time.monotonic()
    vectors = await _vectors_of(served, request, body.texts, dimensions=body.dimensions)

    def reply() -> Response:
        return json_response(
            OllamaEmbedReply(
                model=served.called(body.model),
                embeddings=[each.vector.tolist() for each in vectors],
                total_duration=nanoseconds(time.monotonic() - begun_at),
                load_duration=0,
                prompt_eval_count=sum(each.prompt_tokens for each in vectors),
            )
        )

    return await encoded(vectors, reply)


async def embeddings(served: Served, request: Request, body: OllamaEmbeddingsRequest) -> Response:
    """`POST /api/embeddings`: return the embedding of one text."""
    [vector] = await _vectors_of(served, request, [body.prompt])
    return json_response(OllamaEmbeddingsReply(vector.vector.tolist()))


OLLAMA_EMBED = ModelEndpoint(
    OllamaEmbedRequest, lambda served, request, body: body, embed, leave_out=relaxing((), OllamaEmbedRequest)
)
OLLAMA_EMBEDDINGS = ModelEndpoint(
    OllamaEmbeddingsRequest,
    lambda served, request, body: body,
    embeddings,
    leave_out=relaxing((), OllamaEmbeddingsRequest),
)
