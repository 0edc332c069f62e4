"""Add drafts to steps that decode: choose the requests, the sources, and how many draft tokens pay.

Knows requests, pages and the cost of steps; not how drafts are made or verified.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from ...artifact.manifest import PAGE_SIZE
from ...cache.prefix_cache import PrefixCache
from ...errors import ConstraintFailed
from ...model.batch import Float32Array, TopLogits
from ...speculation.draft import NO_DRAFT, Draft, StepCost
from ...speculation.draft_levels import Choose, DraftRequest, DraftSource
from ...speculation.draft_worth import MAX_DEPTH
from ...speculation.drafter import Drafter
from ..request import Request
from .plan import ScheduledRequest, SchedulerPolicy, StepPlan
from .sampler import SampledToken, sample

_LOGGER = logging.getLogger(__name__)
_PLAIN_EVERY = 48  # steps: one is without drafts, to measure the cost of a plain step


@dataclass
class DraftPlanner:
    """Makes drafts, from step to step.

    Args:
        cache: the cache of the model that they are made for.
        is_on: whether any are made.
        max_num_rows: tokens with logits that a step can have.
        looks_up: whether n-grams of the sequence and the cache are looked up.
        model: a draft model or MTP head.
    """

    cache: PrefixCache
    max_num_rows: int
    is_on: bool = True
    looks_up: bool = True
    model: DraftSource | None = None
    cost: StepCost = field(default_factory=StepCost)
    _num_begun: int = 0

    @classmethod
    def of(cls, policy: SchedulerPolicy, cache: PrefixCache, model: DraftSource | None) -> DraftPlanner:
        """Make the planner that a policy allows."""
        max_num_rows = min(policy.max_num_logits, policy.max_num_batched_tokens)
        cost = StepCost(recomputes=cache.tree.states is not None)
        return cls(cache, max_num_rows, policy.speculates, policy.looks_up, model, cost)

    def begin(self, decoding: Sequence[Request]) -> StepDrafts | None:
        """Start the drafts of a step in which these requests decode and no prompt is computed; None without drafts."""
        if not self.is_on:
            return None
        self._num_begun += 1
        if self._num_begun % _PLAIN_EVERY == 0:
            return None
        drafts = StepDrafts(self, decoding)
        if self.model is not None and self.model.worth.may_draft():
            drafts.ask(self.model, decoding)
        return drafts

    def observe(self, scheduled: Sequence[ScheduledRequest], seconds: float) -> None:
        """Record how long a step took."""
        if self.is_on and all(item.reservation.decodes for item in scheduled):
            self.cost.observe(sum(item.reservation.num_tokens for item in scheduled), seconds)

    def end(self, request_id: str) -> None:
        """Stop drafting for a request that was preempted or ended."""
        if self.model is not None:
            self.model.end(request_id)

    def check(self, running: Sequence[str]) -> None:
        """Raise AssertionError unless only running requests have drafts; between steps."""
        if self.model is not None:
            assert self.model.names <= set(running), "there are drafts for a request that ended"

    def drafter(self, request: Request) -> Drafter:
        """Return the drafter of a request, the same each time."""
        if request.drafter is None:
            sequence, model = request.admitted, self.model
            looks = self.looks_up and sequence.namespace is not None
            request.drafter = Drafter(
                sequence.token_ids,
                partial(self.cache.ahead, sequence) if looks else None,
                request.reply.foresight,
                on_verified=None if model is None else partial(model.observe, request.request_id),
            )
        return request.drafter


class StepDrafts:
    """The drafts of one step.

    They take free pages only, evict nothing, and leave each request its own row and page.
    """

    def __init__(self, planner: DraftPlanner, decoding: Sequence[Request]) -> None:
        self._planner, self._cost = planner, planner.cost
        self._num_rows = sum(1 + request.admitted.num_recomputed for request in decoding)
        self._num_expected = float(len(decoding))
        self._num_rows_left = planner.max_num_rows - self._num_rows
        self._num_pages_left = planner.cache.pool.num_free - len(decoding)
        self._made: dict[str, Draft] = {}  # by the draft model or MTP head, by request id

    def ask(self, model: DraftSource, decoding: Sequence[Request]) -> None:
        """Draft tokens with the model, for requests for which it promises more than n-gram lookup."""
        may = [request for request in decoding if request.may_draft]
        most = min(MAX_DEPTH, self._num_rows_left // max(1, len(may)))
        rows, expected = self._num_rows, self._num_expected
        promised = model.worth.promise(
            self._cost, num_requests=len(may), num_rows=rows, num_expected=expected, most=most
        )
        asks: list[DraftRequest] = []
        for request in may:
            known = self._propose(request, min(self._room(request), self._num_rows_left))
            room = min(most, self._room(request))
            # the draft model's own cache would keep tokens that are taken back
            if room > 0 and request.num_certain is None and promised > sum(known.chances):
                try:
                    asks.append(_ask(request, room))
                except Exception:
                    _give_up(request)
            self._made[request.request_id] = known
        self._made |= model.draft_tokens(asks, self._cost, num_rows=rows, num_expected=expected)

    def reserve(self, request: Request, plan: StepPlan) -> bool:
        """Add a request with a draft to a plan; return False, with nothing changed, if it has no draft that pays."""
        most = min(self._room(request), self._num_rows_left)
        if most <= 0 or not request.may_draft:
            return False
        made = self._made.get(request.request_id)
        draft = self._propose(request, most) if made is None else made.first(most)
        number = len(draft.token_ids)
        if not number or not plan.reserve_draft(request, draft):
            return False
        self._num_rows, self._num_rows_left = self._num_rows + number, self._num_rows_left - number
        self._num_expected += sum(draft.chances)
        self._num_pages_left -= -(-number // PAGE_SIZE)
        return True

    def _propose(self, request: Request, most: int) -> Draft:
        """Draft tokens by n-gram lookup. If that fails, none: no reply depends on it."""
        try:
            drafter = self._planner.drafter(request)
            if not self._planner.looks_up:
                return NO_DRAFT
            return drafter.propose(most, self._cost, num_rows=self._num_rows, num_expected=self._num_expected)
        except Exception:
            _give_up(request)
            return NO_DRAFT

    def _room(self, request: Request) -> int:
        """Return how many draft tokens fit the reply's length, the sequence's last page and free pages."""
        sequence = request.admitted
        on_page = -(sequence.num_rows + sequence.num_uncomputed) % PAGE_SIZE
        states = self._planner.cache.states
        if states is not None and states.is_stored:  # a step ends with each page, and leaves the state to be stored
            return min(request.num_left - 1, on_page)
        return min(request.num_left - 1, on_page + max(0, self._num_pages_left) * PAGE_SIZE)


def _give_up(request: Request) -> None:
    """Log the exception that is handled, and draft no more for a request."""
    _LOGGER.exception("drafting for request %s failed, and is not tried again", request.request_id)
    request.cannot_draft = True


def _ask(request: Request, most: int) -> DraftRequest:
    """Return the input of the draft source, which chooses tokens like the reply does, with the same random numbers."""
    return DraftRequest(
        request.request_id,
        request.admitted,
        most,
        request.num_generated,
        request.num_left,
        _choose_as(request),
    )


def _choose_as(request: Request) -> Choose:
    """Return a function that samples draft tokens as the reply would be sampled, from a copy of its sampler's state.

    It takes one row of logits, and returns the token and its likelihood; None if no token is allowed.
    """
    state = request.reply.sampler.ahead()

    def choose(logits: Float32Array, top: TopLogits) -> tuple[int, float] | None:
        try:
            sampled = sample(logits, top, [state])[0]
            if not isinstance(sampled, SampledToken):
                return None
            state.record(sampled.token_id)
            return sampled.token_id, state.likelihood(sampled.token_id, top)
        except ConstraintFailed:
            return None
        except Exception:
            _give_up(request)
            return None

    return choose
