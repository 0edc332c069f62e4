"""The measured prefixes and their questions: KV computed once, and read by questions, with all rows or chosen ones.

A question asks for a fact that was put into the text and that no other question asks for, or for the continuation of
the text. Its KV follows the prefix; the next question overwrites it. Knows texts, a runner and the pages of its pool.
`text.txt` is from Shakespeare's histories, which are free for any use.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from ....artifact.manifest import PAGE_SIZE, KVLayout
from ....errors import InvalidParameter
from ....model.batch import Batch, Float32Array
from ....model.kv_rows import KVRows
from ..attention_scores import PASS_RUN_UP, STRIDE, ScoringRunner
from ..row_selection import Scores, Tokens, always, scores_to_store, stored_rows, stored_shares

FACTS: Final = (
    ("colour of the miller's boat", "pale green"),
    ("name of the baker's daughter", "Rosalind Hart"),
    ("price of the silver bell", "forty crowns"),
    ("password of the east gate", "winter barley"),
)
DEPTHS: Final = (0.2, 0.45, 0.75)  # positions of a fact, as shares of the prefix
NUM_STRETCHES: Final = 3
_PREFIX, _MIN_PREFIX = 900, 160  # tokens
_QUERY, _CONTINUATION, _NUM_QUERIES = 16, 32, 5
_TEXT: Final = Path(__file__).resolve().parent / "text.txt"


@dataclass(frozen=True)
class Question:
    """The token ids of a question, and of its true continuation."""

    ids: list[int]
    continuation: list[int]

    @property
    def fed(self) -> list[int]:
        """The token ids that the model gets to predict the continuation."""
        return [*self.ids, *self.continuation[:-1]]


@dataclass(frozen=True)
class Case:
    """A prefix and its questions: the first asks for a fact, the others continue the text."""

    prefix: list[int]
    questions: list[Question]


def shipped_text() -> str:
    """Return the text that comes with the package."""
    return _TEXT.read_text(encoding="utf-8")


def cases(
    text: str, encode: Callable[[str], Sequence[int]], *, first_ids: Sequence[int], context_length: int
) -> list[Case]:
    """Return cases with every fact at every depth, in several sections of the text.

    Args:
        encode: returns the ids of a text inside another.
        first_ids: ids that every prompt begins with.

    Raises:
        InvalidParameter: the text or the context is too short.
    """
    behind = _NUM_QUERIES * (_QUERY + _CONTINUATION)
    facts = [_Fact.of(thing, answer, encode) for thing, answer in FACTS]
    longest = max(len(fact.sentence) + len(fact.question.fed) for fact in facts)
    others = len(first_ids) + max(longest, _QUERY + _CONTINUATION)
    size = min(_PREFIX, context_length - others)
    if size < _MIN_PREFIX:
        raise InvalidParameter(
            f"a context of {context_length} tokens is too short to calibrate in; it takes {_MIN_PREFIX + others}"
        )
    ids = list(encode(text))
    least = size + behind
    if len(ids) < least:
        raise InvalidParameter(f"the text has {len(ids)} tokens, and one prefix takes {least}; give a longer one")
    starts = [at * (len(ids) - least) // (NUM_STRETCHES - 1) for at in range(NUM_STRETCHES)]
    placed = enumerate(itertools.product(facts, DEPTHS))
    return [
        _case(ids[start : start + least], size, fact, depth, first_ids)
        for number, (fact, depth) in placed
        for start in [starts[number % NUM_STRETCHES]]
    ]


@dataclass(frozen=True)
class _Fact:
    """A sentence, and a question that it answers."""

    sentence: list[int]
    question: Question

    @classmethod
    def of(cls, thing: str, answer: str, encode: Callable[[str], Sequence[int]]) -> _Fact:
        """Make the fact that `thing` is `answer`: a sentence that says so, and a question for it, as token ids."""
        asked = encode(f"\n\nQuestion: What is the {thing}?\nAnswer: The {thing} is")
        sentence = encode(f"\n\nThe {thing} is {answer}.\n\n")
        return cls(list(sentence), Question(list(asked), list(encode(f" {answer}"))))


def _case(ids: Sequence[int], size: int, fact: _Fact, depth: float, first_ids: Sequence[int]) -> Case:
    """Return a case: a section of the text as prefix, with a fact inserted, and questions about both.

    Args:
        ids: the section; its first `size` tokens are the prefix, the others are the continuations to predict.
        depth: share of the prefix that comes before the fact.
        first_ids: ids that every prompt begins with.
    """
    place, later, step = int(depth * size), ids[size:], _QUERY + _CONTINUATION
    goes_on = [
        Question(list(later[at : at + _QUERY]), list(later[at + _QUERY : at + step]))
        for at in range(0, _NUM_QUERIES * step, step)
    ]
    return Case([*first_ids, *ids[:place], *fact.sentence, *ids[place:size]], [fact.question, *goes_on])


@dataclass(frozen=True)
class MeasuredModel:
    """A runner whose pool has two regions of `num_pages` pages: one for a prefix, one for chosen rows of it."""

    runner: ScoringRunner
    layout: KVLayout
    group_size: int  # query heads that share a KV head
    max_num_tokens: int  # per forward
    num_pages: int

    def run(
        self,
        token_ids: Sequence[int],
        *,
        position: int,
        num_rows: int,
        first_page: int,
        num_logits: int,
        stride: int = 1,
    ) -> Float32Array:
        """Compute tokens from `position` on, after `num_rows` KV rows; return a copy of their last `num_logits` logits.

        The rows begin at page `first_page`. One in `stride` tokens adds to the attention sums.
        """
        count = len(token_ids)
        offsets = np.arange(count, dtype=np.int32)
        rows = offsets + np.int32(num_rows)
        width = -(-(num_rows + count) // PAGE_SIZE)
        assert width <= self.num_pages and count <= self.max_num_tokens
        batch = Batch(
            token_ids=np.array(token_ids, np.int32),
            positions=offsets + np.int32(position),
            slots=rows + np.int32(first_page * PAGE_SIZE),
            row_of_token=np.zeros(count, np.int32),
            page_table=np.arange(first_page, first_page + width, dtype=np.int32)[None],
            kv_lengths=rows + np.int32(1),
            logit_rows=offsets[count - num_logits :],
        )
        return self.runner.forward_scored(batch, stride=stride).copy()

    def attention(self, num_tokens: int, run_up: int = 0) -> Scores:
        """Return the mean attention that the prefix's rows got since it was cleared, `[layers, kv_heads, num_tokens]`.

        Args:
            run_up: number of tokens to count as well, as if they had attended to none of these rows.
        """
        assert self.runner.attention_sums is not None and self.runner.attention_counts is not None
        sums = self.runner.attention_sums[:, :, : self.num_pages]
        counts = self.runner.attention_counts[: self.num_pages].reshape(-1)[:num_tokens]
        return np.asarray(sums.reshape(*sums.shape[:2], -1)[..., :num_tokens] / np.maximum(counts + run_up, 1))

    def clear_attention(self) -> None:
        """Clear all attention."""
        assert self.runner.attention_sums is not None and self.runner.attention_counts is not None
        self.runner.attention_sums[...] = 0
        self.runner.attention_counts[...] = 0


class MeasuredPrefix:
    """A computed prefix; making a new one overwrites it."""

    def __init__(self, model: MeasuredModel, token_ids: Sequence[int]) -> None:
        self._model, self.num_tokens = model, len(token_ids)
        model.clear_attention()
        for start in range(0, self.num_tokens, model.max_num_tokens):
            part = token_ids[start : start + model.max_num_tokens]
            model.run(part, position=start, num_rows=start, first_page=0, num_logits=0, stride=STRIDE)
        self._pass = model.attention(self.num_tokens, PASS_RUN_UP)
        pages = np.zeros((-(-self.num_tokens // PAGE_SIZE), model.layout.page_bytes), np.uint8)
        model.runner.read_pages(range(len(pages)), pages)
        self.rows = KVRows.of_pages(model.layout, pages, self.num_tokens)

    def whole(self, token_ids: Sequence[int], num_logits: int) -> tuple[Float32Array, Scores]:
        """Return logits with all rows, and the mean attention to each row, `[layers, kv_heads, tokens]`."""
        model, count = self._model, self.num_tokens
        model.clear_attention()
        logits = model.run(token_ids, position=count, num_rows=count, first_page=0, num_logits=num_logits)
        return logits, model.attention(count)

    def order(self, history: Scores) -> Tokens:
        """Return the order of rows after questions with this attention, most important first."""
        return np.argsort(-scores_to_store(history + self._pass, is_start=True), axis=-1, kind="stable")

    def stored(self, order: Tokens, count: int) -> Tokens:
        """Return the rows that are read by that order, among `count` rows."""
        fixed = always(self.num_tokens)
        [share] = stored_shares([self.num_tokens], [len(fixed)], count)
        return stored_rows(order, fixed, share, self.num_tokens)

    def logits_of_rows(self, chosen: Tokens, token_ids: Sequence[int], num_logits: int) -> Float32Array:
        """Return the last `num_logits` logits of tokens after the prefix that see only the prefix's `chosen` rows."""
        model = self._model
        pages = self.rows.take(chosen).to_pages()
        model.runner.write_pages(range(model.num_pages, model.num_pages + len(pages)), pages)
        return model.run(
            token_ids,
            position=self.num_tokens,
            num_rows=chosen.shape[-1],
            first_page=model.num_pages,
            num_logits=num_logits,
        )

    def queries(self, num_tokens: int, head: int) -> Float32Array:
        """Return the queries of the last run's tokens, in the heads that share KV head `head`."""
        model = self._model
        assert model.runner.queries is not None
        heads = slice(head * model.group_size, (head + 1) * model.group_size)
        return model.runner.queries[:, :num_tokens, heads].copy()
