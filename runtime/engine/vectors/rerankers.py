"""The two kinds of rerankers: language models that are asked in a prompt, and encoders with a head (cross-encoders).

Knows the ids that a query and a document become, and what reads the score; not the tokenizer or requests.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Protocol

from radixlm.tokenizer_fix import TokenizerProfile

from ...artifact.text_vectors import PairTemplate, RerankingInfo
from ...errors import InvalidParameter
from ..step.readers import Reader
from .score_readers import HeadScoreReader, TokenScoreReader

_PLACEHOLDER = re.compile(r"\{(instruction|query|document)\}")


class Encode(Protocol):
    """Returns the ids of a text, in which control tokens are text; `add_bos` None: as the model's tokenizer does."""

    def __call__(self, text: str, *, add_bos: bool | None) -> list[int]: ...


class Reranker(Protocol):
    """Makes the ids of a query and a document, and the reader of their score."""

    def ids(self, encode: Encode, query: str, document: str, instruction: str | None) -> list[int]:
        """Return the ids of the model's input. Raises InvalidParameter for an instruction that it does not take."""

    def reader(self, num_tokens: int) -> Reader:
        """Return the reader of an input of this many tokens."""


class PromptedReranker:
    """A language model whose prompt has a template; the score is that of one token compared with another."""

    def __init__(self, info: RerankingInfo, profile: TokenizerProfile) -> None:
        self._info = info
        special = {token.text: token.id for token in profile.added_tokens if token.special and token.text}
        self._sections = [*_sections(info.template, special)]

    def ids(self, encode: Encode, query: str, document: str, instruction: str | None) -> list[int]:
        values = {"instruction": self._info.instruction if instruction is None else instruction}
        values |= {"query": query, "document": document}
        ids: list[int] = []
        for part in self._sections:
            if isinstance(part, int):
                ids.append(part)
            else:
                text = _PLACEHOLDER.sub(lambda found: values[found[1]], part)
                ids += encode(text, add_bos=None if not ids else False)
        return ids

    def reader(self, num_tokens: int) -> Reader:
        return TokenScoreReader(self._info.true_id, self._info.false_id, num_tokens)


class CrossEncoder:
    """An encoder whose head makes one number of a query and a document between the tokens of `template`."""

    def __init__(self, template: PairTemplate) -> None:
        self._template = template

    def ids(self, encode: Encode, query: str, document: str, instruction: str | None) -> list[int]:
        if instruction is not None:
            raise InvalidParameter(
                "this reranker takes no instruction, only a query and documents; leave it out", param="instruction"
            )
        around = self._template
        query_ids, document_ids = (encode(text, add_bos=False) for text in (query, document))
        return [*around.before, *query_ids, *around.between, *document_ids, *around.after]

    def reader(self, num_tokens: int) -> Reader:
        return HeadScoreReader()


def _sections(template: str, special_ids: Mapping[str, int]) -> Iterator[str | int]:
    """Yield the texts between a template's own control tokens, and these tokens' ids."""
    texts = "|".join(map(re.escape, sorted(special_ids, key=len, reverse=True)))
    for part in re.split(f"({texts})", template) if texts else [template]:
        if part in special_ids:
            yield special_ids[part]
        elif part:
            yield part
