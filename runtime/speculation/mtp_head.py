"""Draft with a model's own multi-token prediction (MTP) head, whose KV rows are in the model's pages.

`forward` computes the head's row of each token together with the model's, so that it is shared, stored and released
with its page. Drafting continues from such rows. Rows of draft tokens are written after the sequence's: on the last
page if that is private, and on free pages. No other request reads them, and the next step overwrites them. Knows pages
and token ids.

Most of the head's time is the output matrix of a large vocabulary. Its first tokens are the most frequent ones, because
tokenizers are made by merging frequent pairs first. So text that consists of them is drafted among them only (cf.
FR-Spec, 2025). Another token is then never drafted, and costs one rejected draft.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from ..artifact.manifest import PAGE_SIZE
from ..cache import sequence as cached
from ..cache.page_pool import PagePool, num_pages_for
from ..model.batch import Batch, Drafting, Float32Array, PageCopy, TopLogits
from .draft import StepCost
from .draft_levels import DraftRequest, DraftRows, DraftSource
from .draft_worth import MAX_DEPTH

_LAST = 64  # tokens of a sequence that predict what the next ones are like
_FREQUENT_SHARE = 0.85  # at least this share of them must be frequent


class MTPHead(DraftSource):
    """The MTP head of the model that generates the replies.

    Args:
        model: computes the head.
        pool: the pages of the model's sequences.
    """

    def __init__(self, model: Drafting, pool: PagePool, *, vocab_size: int, clock: Callable[[], float]) -> None:
        self._model, self._pool, self._runner = model, pool, _HeadRunner(model)
        super().__init__("the MTP head", self._runner, vocab_size=vocab_size, clock=clock)
        self._costs = {False: StepCost(), True: StepCost()}  # by `is_frequent`
        self.worth.cost = self._least_cost

    def _draft_tokens(
        self, requests: Sequence[DraftRequest], cost: StepCost, num_rows: int, num_expected: float
    ) -> None:
        """Append draft tokens to the requests, in free pages that are released afterwards.

        Requests for which there are too few pages get none.
        """
        taken: list[int] = []
        try:
            rooms = [
                (request, self._reserve_rows(request.sequence, min(request.most, MAX_DEPTH), taken))
                for request in requests
            ]
            rows = [(request, room) for request, room in rooms if room is not None]
            if rows:
                self._runner.is_frequent = self._are_frequent([request.sequence for request, _ in rows])
                self.worth.cost = self._costs[self._runner.is_frequent]
                self._draft_together(rows, cost, num_rows, num_expected)
        finally:
            self.worth.cost = self._least_cost  # if drafts among all tokens do not pay, others can
            self._pool.release(taken)

    @property
    def _least_cost(self) -> StepCost:
        """The cost of a draft among the fewest tokens, which decides whether requests are drafted at all."""
        return self._costs[self._model.num_frequent is not None]

    def _are_frequent(self, sequences: Sequence[cached.Sequence]) -> bool:
        """Return whether each sequence's last tokens are among the first of the vocabulary, with few exceptions."""
        most = self._model.num_frequent
        if most is None:
            return False
        ends = [sequence.token_ids[-_LAST:] for sequence in sequences]
        return all(sum(token < most for token in end) >= _FREQUENT_SHARE * len(end) for end in ends)

    def _reserve_rows(self, sequence: cached.Sequence, num_tokens: int, taken: list[int]) -> DraftRows | None:
        """Return rows for `num_tokens` tokens after the computed ones; the pages taken for them are added to `taken`.

        None if too few pages are free, or a row before them is missing.
        """
        page_ids, num_recomputed = sequence.page_ids, sequence.num_recomputed
        first = sequence.num_rows + num_recomputed
        if not sequence.decodes or sequence.sparse is not None or not first or num_pages_for(first) > len(page_ids):
            return None
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
        return DraftRows(
            sequence.num_computed + num_recomputed, sequence.token_ids[-1:], rows, page_ids + array("i", new)
        )


class _HeadRunner:
    """Computes steps of the head instead of the model.

    Attributes:
        is_frequent: drafts are among the first tokens of the vocabulary only.
    """

    def __init__(self, model: Drafting) -> None:
        self._model, self.is_frequent = model, False

    def forward(self, batch: Batch) -> Float32Array:
        """Return the logits of the head's draft tokens."""
        return self._model.draft(batch, is_frequent=self.is_frequent)

    def top_logits(self, num_rows: int, vocab_size: int) -> TopLogits:
        """Return the largest logits of the last `forward`."""
        return self._model.top_logits(num_rows, vocab_size)
