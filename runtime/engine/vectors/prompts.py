"""The prompts of embedding models and rerankers: texts with their prefixes, and pairs of a query and a document.

Knows one model's tokenizer and the prompts in its artifact; not requests.
"""

from __future__ import annotations

from functools import partial

from radixlm.tokenizer_fix import PreparedPrompt, Tokenizer

from ...artifact.manifest import Manifest
from ...artifact.text_vectors import EmbeddingInfo
from ...chat.artifact_tokenizer import checked_ids, refusing
from ...errors import ContextLengthExceeded, EmptyPrompt, InvalidParameter, InvalidRequest
from ..request_options import Prompt
from .rerankers import CrossEncoder, PromptedReranker, Reranker


class VectorPrompts:
    """Makes the prompts of one model, in any thread.

    Args:
        max_tokens: the most tokens of a prompt.
    """

    def __init__(self, tokenizer: Tokenizer, manifest: Manifest, *, max_tokens: int) -> None:
        self._tokenizer, self._manifest, self._max_tokens = tokenizer, manifest, max_tokens
        self._suffix = tokenizer.profile.template_suffix_ids
        self._reranker: Reranker | None = None
        if manifest.pairs is not None:
            self._reranker = CrossEncoder(manifest.pairs)
        elif manifest.reranking is not None:
            self._reranker = PromptedReranker(manifest.reranking, tokenizer.profile)

    @property
    def embedding(self) -> EmbeddingInfo:
        """The settings by which the model makes embeddings.

        Raises:
            InvalidRequest: it makes none.
        """
        if self._manifest.embedding is None:
            raise InvalidRequest(
                f"model {self._manifest.name} makes no embeddings; ask an embedding model, such as Qwen3-Embedding"
            )
        return self._manifest.embedding

    @property
    def reranker(self) -> Reranker:
        """The way the model scores documents.

        Raises:
            InvalidRequest: it is no reranker.
        """
        if self._reranker is None:
            raise InvalidRequest(f"model {self._manifest.name} is no reranker; ask one, such as Qwen3-Reranker")
        return self._reranker

    def text(self, text: Prompt, prompt_name: str | None = None) -> PreparedPrompt:
        """Prepare a text to embed: the model's instruction of this name, the text, and the tokenizer's own tokens.

        Token ids are taken as they are.

        Args:
            prompt_name: name of a prompt of the model's; None: its default, if it has one.

        Raises:
            EmptyPrompt: there are no tokens.
            ContextLengthExceeded: it has more than `max_tokens` tokens.
            InvalidParameter: there is no such prompt.
            InvalidRequest: the text cannot be encoded, ids are unknown, or the model makes no embeddings.
        """
        info = self.embedding
        name = info.default_prompt if prompt_name is None else prompt_name
        if name is not None and name not in info.prompts:
            known = ", ".join(map(repr, info.prompts)) or "none"
            raise InvalidParameter(f"prompt_name is {name!r:.60}; this model has {known}", param="prompt_name")
        if not isinstance(text, str):
            return self._prompt_of(checked_ids(text, self._max_tokens, has_reply=False))
        before = "" if name is None else info.prompts[name]
        with refusing(has_reply=False):
            ids = self._tokenizer.encode(before + text, parse_special=True, max_tokens=self._max_tokens)
        return self._prompt_of([*ids, *self._suffix])

    def pair(self, query: str, document: str, instruction: str | None = None) -> PreparedPrompt:
        """Prepare a query and a document for the reranker. Control tokens in them are text.

        Raises:
            ContextLengthExceeded: it has more than `max_tokens` tokens.
            InvalidParameter: the reranker takes no instruction.
            InvalidRequest: a text cannot be encoded, or the model is no reranker.
        """
        encode = partial(self._tokenizer.encode, max_tokens=self._max_tokens)
        with refusing(has_reply=False):
            ids = self.reranker.ids(encode, query, document, instruction)
        return self._prompt_of(ids)

    def _prompt_of(self, ids: list[int]) -> PreparedPrompt:
        """Return token ids as a prepared prompt.

        Raises:
            EmptyPrompt: there are none.
            ContextLengthExceeded: there are more than `max_tokens`.
        """
        if not ids:
            raise EmptyPrompt("the text has no tokens; send some text")
        if len(ids) > self._max_tokens:
            raise ContextLengthExceeded.of_prompt(len(ids), self._max_tokens, has_reply=False)
        return PreparedPrompt(tuple(ids), len(ids), swallow_leading_space=False, text=None)
