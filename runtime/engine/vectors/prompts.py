"""The prompts of embedding models and rerankers: texts with their prefixes, and pairs of a query and a document.

Knows one model's tokenizer and the prompts in its artifact; not requests.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from radixlm.tokenizer_fix import PreparedPrompt, Tokenizer

from ...artifact.manifest import Manifest
from ...artifact.text_vectors import EmbeddingInfo, RerankingInfo
from ...chat.artifact_tokenizer import checked_ids, refusing
from ...errors import ContextLengthExceeded, EmptyPrompt, InvalidParameter, InvalidRequest
from ..request_options import Prompt

_PLACEHOLDER = re.compile(r"\{(instruction|query|document)\}")


class VectorPrompts:
    """Makes the prompts of one model, in any thread.

    Args:
        max_tokens: the most tokens of a prompt.
    """

    def __init__(self, tokenizer: Tokenizer, manifest: Manifest, *, max_tokens: int) -> None:
        self._tokenizer, self._manifest, self._max_tokens = tokenizer, manifest, max_tokens
        self._suffix = tokenizer.profile.template_suffix_ids
        special = {token.text: token.id for token in tokenizer.profile.added_tokens if token.special and token.text}
        self._special_ids: Mapping[str, int] = special
        texts = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
        self._special = re.compile(f"({texts})") if texts else None

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
    def reranking(self) -> RerankingInfo:
        """The settings by which the model scores documents.

        Raises:
            InvalidRequest: it is no reranker.
        """
        if self._manifest.reranking is None:
            raise InvalidRequest(f"model {self._manifest.name} is no reranker; ask one, such as Qwen3-Reranker")
        return self._manifest.reranking

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
        """Prepare a query and a document in the model's template. Control tokens in them are text.

        Raises:
            ContextLengthExceeded: it has more than `max_tokens` tokens.
            InvalidRequest: a text cannot be encoded, or the model is no reranker.
        """
        info = self.reranking
        values = {"instruction": info.instruction if instruction is None else instruction}
        values |= {"query": query, "document": document}
        ids: list[int] = []
        with refusing(has_reply=False):
            for part in self._sections(info.template, values):
                if isinstance(part, int):
                    ids.append(part)
                else:
                    ids += self._tokenizer.encode(part, add_bos=None if not ids else False, max_tokens=self._max_tokens)
        return self._prompt_of(ids)

    def _sections(self, template: str, values: Mapping[str, str]) -> Iterator[str | int]:
        """Yield the texts between the template's own control tokens, with `values` filled in, and the tokens' ids."""
        for part in [template] if self._special is None else self._special.split(template):
            if part in self._special_ids:
                yield self._special_ids[part]
            elif part:
                yield _PLACEHOLDER.sub(lambda found: values[found[1]], part)

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
