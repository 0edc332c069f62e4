"""Decide whether a waiting request is let in: whether there are pages for it beside those that running ones may need.

Knows requests, pages and the step that is planned; not whose turn it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ..artifact.manifest import PAGE_SIZE
from ..cache.prefix_cache import PrefixCache
from ..cache.prefix_match import PrefixMatch
from ..cache.sequence import num_pages_for
from ..cache.sparse_span import SparseSpan
from .request import Request
from .step_plan import StepPlan

AdmissionPolicy = Literal["optimistic", "conservative"]
"""What of a reply has pages reserved when its request is let in.

`optimistic`: one token, so that more requests run, and the newest gives its pages back when they become too few;
`conservative`: `max_tokens`, or what the context leaves, so that none ever does.
"""


@dataclass(frozen=True)
class Admission:
    """Lets requests into the pool of `cache`, whose sequences have at most `context_length` tokens."""

    cache: PrefixCache
    policy: AdmissionPolicy
    context_length: int

    def fits(
        self,
        request: Request,
        match: PrefixMatch,
        sparse: SparseSpan | None,
        plan: StepPlan,
        running: Iterable[Request],
    ) -> bool:
        """Whether there are pages for a request that begins with this match, or with the rows of a sparse span.

        Let in earlier, it would only be preempted again. A request that is alone is always let in.
        """
        running = list(running)
        if not running:
            return True
        pool, shared, num_missing = self.cache.pool, match.pages, 0
        if sparse is not None:
            shared, num_missing = shared[: sparse.start // PAGE_SIZE], sparse.num_missing
        num_needed = self._num_pages(request, len(match.prompt_ids), num_missing, has_prompt=False) - len(shared)
        num_evictable = pool.num_cached - sum(pool.num_users(page) == 0 for page in shared)
        num_promised = sum(max(0, self._num_needed_pages(each) - plan.num_held_pages(each)) for each in running)
        return num_needed <= pool.num_free + num_evictable - num_promised

    def _num_needed_pages(self, request: Request) -> int:
        """All that a running request may come to need, those that it holds included."""
        sequence = request.admitted
        num_missing = sequence.num_computed - sequence.num_rows
        return self._num_pages(request, len(sequence), num_missing, has_prompt=sequence.num_uncomputed == 1)

    def _num_pages(self, request: Request, num_tokens: int, num_missing: int, *, has_prompt: bool) -> int:
        """Pages for a sequence of `num_tokens`, of which `num_missing` have no rows, and for the reply.

        The last token of a reply is never computed. Until the prompt is, the rows of a page that is reused in part may
        lie there twice for a moment.
        """
        if self.policy == "optimistic":
            return num_pages_for(num_tokens + 1 - num_missing)
        max_length = request.max_length_of(num_tokens, self.context_length)
        return num_pages_for(max_length - 1 - num_missing) + (not has_prompt)
