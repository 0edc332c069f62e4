"""How much each KV row of the pool was looked at: a history of attention, use by use, from which pages on disk get an
order.

A use is what one prompt's new tokens put on the rows before them and on their own. Of each it is the mean over the
tokens that came after the row, so that a long prompt counts as much as a short one and an early row as much as a late
one. A use weighs `DECAY` times as much as the next: 0.8 still knows five, and forgets what nobody asks for.

The pass that computed a row is added to that and never forgotten, as if `PASS_RUN_UP` tokens more had come after it, or
the last rows were first: it knows less of what is asked again than other queries do, and more of what nobody asked. By
both, a quarter of the rows loses less than half of what the first and recent ones lose, on all texts of bench/LOG.md.

Replies that are decoded while nobody's prompt is computed are not counted, nor are sequences over a pruned prefix: what
they miss would be held against it. Knows pages and batches, not requests, trees or disks. The engine's thread owns it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from ..artifact.manifest import PAGE_SIZE
from ..model.batch import BatchArrays, Float32Array, Int32Array, PageCopy

DECAY = 0.8
PASS_RUN_UP = 512
_NO_PAGES: Int32Array = np.zeros(0, np.int32)


class Importance:
    """Scores of the rows of a pool.

    >>> mass = np.zeros((1, 1, 2, 16), np.float32)
    >>> importance = Importance(mass)
    >>> with importance.looking(batch.arrays):  # doctest: +SKIP
    ...     runner.forward_scored(batch)  # adds to `mass`
    >>> importance.fold([0], num_reused=0)
    >>> importance.scores([0]).shape
    (1, 1, 16)

    Args:
        mass: float32 `[layers, kv_heads, num_pages, PAGE_SIZE]`, to which a forward adds the attention of its tokens;
            emptied here.
    """

    def __init__(self, mass: Float32Array) -> None:
        self._mass = mass
        num_pages = mass.shape[2]
        self._history = np.zeros_like(mass)
        self._weight = np.zeros((num_pages, PAGE_SIZE), np.float32)  # of what is in the history
        self._pass = np.zeros_like(mass)  # of the prompt that computed the row
        self._num_looks = np.zeros((num_pages, PAGE_SIZE), np.int32)  # tokens whose attention is in `mass`

    def forget_rows(self, slots: Int32Array) -> None:
        """Rows that are about to be written start anew."""
        pages, rows = np.divmod(slots, PAGE_SIZE)
        for scores in (self._mass, self._history, self._pass):
            scores[:, :, pages, rows] = 0
        self._weight[pages, rows] = self._num_looks[pages, rows] = 0

    def forget_pages(self, page_ids: Sequence[int]) -> None:
        """Pages that come from elsewhere start anew."""
        pages = np.array(page_ids, np.int64)
        for scores in (self._mass, self._history, self._pass):
            scores[:, :, pages] = 0
        self._weight[pages] = self._num_looks[pages] = 0

    def copy_rows(self, copies: Sequence[PageCopy]) -> None:
        """Rows that are copied to another page take their history along; what is not folded yet stays."""
        for copy in copies:
            self.forget_pages([copy.dst_page])
            for array in (self._history, self._pass, self._weight):
                array[..., copy.dst_page, : copy.num_rows] = array[..., copy.src_page, : copy.num_rows]

    @contextmanager
    def looking(self, arrays: BatchArrays) -> Iterator[None]:
        """Around a forward that adds to `mass`: notes which tokens look at which rows. What a sequence over a pruned
        prefix looks at stays as it was, and so does what others of its batch see of the same pages.
        """
        spans = _spans(arrays)
        hidden = np.unique(np.concatenate([span.page_ids for span in spans if span.is_pruned] or [_NO_PAGES]))
        mass, num_looks = self._mass[:, :, hidden], self._num_looks[hidden]
        yield
        for span in spans:
            span.count(self._num_looks)
        if hidden.size:
            self._mass[:, :, hidden] = mass
            self._num_looks[hidden] = num_looks

    def fold(self, page_ids: Sequence[int], *, num_reused: int) -> None:
        """Take what was looked at since the last time into the history, as one use, because a prompt is done.

        Args:
            page_ids: pages of the prompt, from its first token on.
            num_reused: of its tokens, from the first on, as many were there before.
        """
        pages = np.array(page_ids, np.int64)
        mass, num_looks = self._mass[:, :, pages], self._num_looks[pages]
        self._mass[:, :, pages] = self._num_looks[pages] = 0
        if not np.isfinite(mass).all():  # numbers went wrong, and are dropped with all that came of them
            return
        is_reused = (np.arange(pages.size * PAGE_SIZE) < num_reused).reshape(-1, PAGE_SIZE)
        is_use = is_reused & (num_looks > 0)
        decay = np.where(is_use, np.float32(DECAY), np.float32(1))
        self._history[:, :, pages] *= decay
        self._history[:, :, pages] += np.where(is_use, mass / np.maximum(num_looks, 1), np.float32(0))
        self._weight[pages] = decay * self._weight[pages] + is_use
        self._pass[:, :, pages] += np.where(is_reused, np.float32(0), mass / (num_looks + PASS_RUN_UP))

    def scores(self, page_ids: Sequence[int]) -> Float32Array:
        """Of each row of pages, `[layers, kv_heads, PAGE_SIZE * len(page_ids)]`: the share of a later token's attention
        that its KV head's queries put there, summed over them, and something for its own pass; 0 of what nobody looked
        at. A copy.
        """
        pages = np.array(page_ids, np.int64)
        weight = self._weight[pages]
        scores = self._history[:, :, pages] / np.where(weight > 0, weight, 1) + self._pass[:, :, pages]
        return np.asarray(scores.reshape(*scores.shape[:2], -1))


@dataclass(frozen=True)
class _Span:
    """The tokens of one sequence in a batch."""

    page_ids: Int32Array  # of all rows that they see
    slots: Int32Array  # where their own are written
    num_before: int  # rows of the sequence before theirs
    is_pruned: bool

    def count(self, num_looks: Int32Array) -> None:
        """Add to each row, `[num_pages, PAGE_SIZE]`, how many of them see it."""
        num_full, num_rest = divmod(self.num_before, PAGE_SIZE)
        num_looks[self.page_ids[:num_full]] += self.slots.size
        if num_rest:
            num_looks[self.page_ids[num_full], :num_rest] += self.slots.size
        num_looks.reshape(-1)[self.slots] += np.arange(self.slots.size, 0, -1, dtype=np.int32)


def _spans(arrays: BatchArrays) -> list[_Span]:
    """The sequences of a batch; a token of a pruned prefix sees fewer rows than are before it in the text."""
    spans, first = [], 0
    for sequence, num_tokens in enumerate(np.bincount(arrays.row_of_token, minlength=len(arrays.page_table)).tolist()):
        if num_tokens:
            stop, length = first + num_tokens, int(arrays.kv_lengths[first + num_tokens - 1])
            page_ids = arrays.page_table[sequence, : -(-length // PAGE_SIZE)]
            is_pruned = length != int(arrays.positions[stop - 1]) + 1
            spans.append(_Span(page_ids, arrays.slots[first:stop], length - num_tokens, is_pruned))
            first = stop
    return spans
