"""Prefixes, what is asked of them, and one whose KV is computed once and read by questions: all rows, or chosen ones.

A question is a fact that was put into the text and that no other question asks for, or how the text goes on. What it
leaves lies behind the prefix; the next writes over it. Knows texts, a runner and the pages of its pool. `text.txt` is
of Shakespeare's histories, which are free for any use.
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
DEPTHS: Final = (0.2, 0.45, 0.75)  # of a fact, in shares of the prefix
NUM_STRETCHES: Final = 3
_PREFIX, _MIN_PREFIX = 900, 160  # tokens
_QUERY, _CONTINUATION, _NUM_QUERIES = 16, 32, 5
_TEXT: Final = Path(__file__).resolve().parent / "text.txt"


@dataclass(frozen=True)
class Question:
    """Token ids of what is asked, and of what truly follows."""

    ids: list[int]
    continuation: list[int]

    @property
    def fed(self) -> list[int]:
        """What the model is given to say the continuation."""
        return [*self.ids, *self.continuation[:-1]]


@dataclass(frozen=True)
class Case:
    """A prefix and its questions: the first asks for a fact of it, the others are how the text goes on."""

    prefix: list[int]
    questions: list[Question]


def shipped_text() -> str:
    """The text that comes with the package."""
    return _TEXT.read_text(encoding="utf-8")


def cases(
    text: str, encode: Callable[[str], Sequence[int]], *, first_ids: Sequence[int], context_length: int
) -> list[Case]:
    """Every fact at every depth, in several stretches of the text.

    Args:
        encode: the ids of a text that goes on inside another.
        first_ids: that every prompt begins with.

    Raises:
        InvalidParameter: the text is too short, or the context is.
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
        """That a thing is this."""
        asked = encode(f"\n\nQuestion: What is the {thing}?\nAnswer: The {thing} is")
        sentence = encode(f"\n\nThe {thing} is {answer}.\n\n")
        return cls(list(sentence), Question(list(asked), list(encode(f" {answer}"))))


def _case(ids: Sequence[int], size: int, fact: _Fact, depth: float, first_ids: Sequence[int]) -> Case:
    """A stretch of the text whose first `size` tokens are the prefix, with a fact in it."""
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
    max_num_tokens: int  # of a forward
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
        """The last `num_logits` rows of logits, a copy, of tokens from `position` on behind `num_rows` rows; one of
        `stride` tokens is scored."""
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
        """The attention to each of the first rows since it was cleared, `[layers, kv_heads, num_tokens]`: the mean over
        the tokens that were scored, as if `run_up` more had looked elsewhere."""
        assert self.runner.attention_sums is not None and self.runner.attention_counts is not None
        sums = self.runner.attention_sums[:, :, : self.num_pages]
        counts = self.runner.attention_counts[: self.num_pages].reshape(-1)[:num_tokens]
        return np.asarray(sums.reshape(*sums.shape[:2], -1)[..., :num_tokens] / np.maximum(counts + run_up, 1))

    def clear_attention(self) -> None:
        """Forget all attention."""
        assert self.runner.attention_sums is not None and self.runner.attention_counts is not None
        self.runner.attention_sums[...] = 0
        self.runner.attention_counts[...] = 0


class MeasuredPrefix:
    """`token_ids`, computed; a new prefix ends those before."""

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
        """Logits over all rows, and the attention to each, `[layers, kv_heads, tokens]`, as a mean over the tokens."""
        model, count = self._model, self.num_tokens
        model.clear_attention()
        logits = model.run(token_ids, position=count, num_rows=count, first_page=0, num_logits=num_logits)
        return logits, model.attention(count)

    def order(self, history: Scores) -> Tokens:
        """As the rows are ranked after questions that looked there: what matters most first."""
        return np.argsort(-scores_to_store(history + self._pass, is_start=True), axis=-1, kind="stable")

    def stored(self, order: Tokens, count: int) -> Tokens:
        """Of `count` rows, those that are read by that order."""
        fixed = always(self.num_tokens)
        [share] = stored_shares([self.num_tokens], [len(fixed)], count)
        return stored_rows(order, fixed, share, self.num_tokens)

    def over(self, chosen: Tokens, token_ids: Sequence[int], num_logits: int) -> Float32Array:
        """Logits over the chosen rows alone."""
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
        """Of the last run's tokens, in the heads that share KV head `head`."""
        model = self._model
        assert model.runner.queries is not None
        heads = slice(head * model.group_size, (head + 1) * model.group_size)
        return model.runner.queries[:, :num_tokens, heads].copy()
