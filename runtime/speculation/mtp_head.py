"""Guess with a model's own multi-token prediction head, whose rows are in the model's pages.

`forward` computes the head's row of each token beside the model's, so that it is shared, stored and given back with its
page. A guess goes on from such rows. Its own are written behind the sequence's, on the last page if that is private and
on pages that are free: nobody else sees them, and the next step writes over them. Knows pages and token ids.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from ..artifact.manifest import PAGE_SIZE
from ..cache import sequence as cached
from ..cache.page_pool import PagePool, num_pages_for
from ..model.batch import Batch, Drafting, Float32Array, PageCopy, TopLogits
from .draft import StepCost
from .draft_levels import Ask, DraftRows, DraftSource
from .draft_worth import MAX_DEPTH


class MTPHead(DraftSource):
    """The head of the model that the replies are of.

    Args:
        model: computes the head.
        pool: the pages of the model's sequences.
    """

    def __init__(self, model: Drafting, pool: PagePool, *, vocab_size: int, clock: Callable[[], float]) -> None:
        super().__init__("the MTP head", _Runs(model), vocab_size=vocab_size, clock=clock)
        self._model, self._pool = model, pool

    def _guess(self, asks: Sequence[Ask], cost: StepCost, num_rows: int, num_expected: float) -> None:
        taken: list[int] = []
        try:
            rooms = [(ask, self._room(ask.sequence, min(ask.most, MAX_DEPTH), taken)) for ask in asks]
            rows = [(ask, room) for ask, room in rooms if room is not None]
            if rows:
                self._levels(rows, cost, num_rows, num_expected)
        finally:
            self._pool.release(taken)

    def _room(self, sequence: cached.Sequence, num_tokens: int, taken: list[int]) -> DraftRows | None:
        """Rows for so many tokens behind the computed ones; pages for them are added to `taken`. None: too few are
        free, or a row before is missing.
        """
        first = sequence.num_rows
        if sequence.num_uncomputed != 1 or sequence.sparse is not None or not first:
            return None
        page_ids = sequence.page_ids
        copies = first % PAGE_SIZE > 0 and not self._pool.is_private(page_ids[-1])
        num_new = num_pages_for(first + num_tokens) - len(page_ids) + copies
        if num_new > self._pool.num_free:
            return None
        new = self._pool.allocate(num_new)
        taken += new
        if copies:
            self._model.copy_rows([PageCopy(page_ids[-1], new[0], first % PAGE_SIZE)])
            page_ids = page_ids[:-1]
        rows = range(first, first + num_tokens)
        return DraftRows(sequence.num_computed, sequence.token_ids[-1:], rows, page_ids + array("i", new))


class _Runs:
    """A head's steps in place of a model's."""

    def __init__(self, model: Drafting) -> None:
        self._model = model

    def forward(self, batch: Batch) -> Float32Array:
        """The logits of the head's drafts."""
        return self._model.draft(batch)

    def top_logits(self, num_rows: int, vocab_size: int) -> TopLogits:
        """Of what `forward` returned."""
        return self._model.top_logits(num_rows, vocab_size)
