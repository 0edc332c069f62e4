"""Add guesses to a step that decodes: to which requests, and how many of them pay.

Knows requests, pages and what steps cost; not how guesses are made, nor how they are checked.
"""

from __future__ import annotations

from functools import partial

from ...artifact.manifest import PAGE_SIZE
from ...cache.prefix_cache import PrefixCache
from ...speculation.draft_length import StepCost
from ...speculation.drafter import Drafter
from ..request import Request
from .plan import StepPlan


class StepDrafts:
    """The guesses of one step.

    They take free pages only, evict nothing, and leave each request its own row and page.

    Args:
        num_decoding: requests that decode in the step.
        max_num_rows: tokens with logits that the step may have.
    """

    def __init__(self, cache: PrefixCache, cost: StepCost, num_decoding: int, *, max_num_rows: int) -> None:
        self._cache, self._cost = cache, cost
        self._num_rows, self._num_expected = num_decoding, float(num_decoding)
        self._num_rows_left = max_num_rows - num_decoding
        self._num_pages_left = cache.pool.num_free - num_decoding

    def reserve(self, request: Request, plan: StepPlan) -> bool:
        """Add a request with a draft to a plan; False, with nothing changed, if it has none that pays."""
        most = min(self._room(request), self._num_rows_left)
        if most <= 0 or not request.may_draft:
            return False
        sequence = request.admitted
        if request.drafter is None:
            ahead = partial(self._cache.tree.ahead, sequence.namespace)
            foresight = request.reply.foresight
            request.drafter = Drafter(sequence.token_ids, None if sequence.namespace is None else ahead, foresight)
        cost, rows, expected = self._cost, self._num_rows, self._num_expected
        draft = request.drafter.propose(most, cost, num_rows=rows, num_expected=expected)
        number = len(draft.token_ids)
        if not number or not plan.reserve_draft(request, draft):
            return False
        self._num_rows, self._num_rows_left = rows + number, self._num_rows_left - number
        self._num_expected += sum(draft.chances)
        self._num_pages_left -= -(-number // PAGE_SIZE)
        return True

    def _room(self, request: Request) -> int:
        """Tokens behind the next one that the reply may have, on the sequence's last page and on free ones."""
        sequence = request.admitted
        on_page = -(sequence.num_rows + 1) % PAGE_SIZE
        return min(request.num_left - 1, on_page + max(0, self._num_pages_left) * PAGE_SIZE)
