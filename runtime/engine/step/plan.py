"""Plan what one step computes, within its tokens and its time, then compute it.

Knows requests, pages, reservations and the model. The scheduler chooses the order, and readers use the
logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

from ...cache.kv_transaction import KVTransaction, Reservation
from ...errors import EngineError, OutOfPages
from ...model.batch import Forward, make_batch
from ...speculation.draft import NO_DRAFT, Draft
from ..request import Request
from .pace import PromptTime
from .readers import DAMAGED, LogitRows, Outcome
from .sampler import StepLogits

AdmissionPolicy = Literal["optimistic", "conservative"]
"""The part of a reply that has pages reserved when its request is admitted.

`optimistic`: one token, so that more requests run, and the newest is preempted when pages run out;
`conservative`: `max_tokens`, or what the context leaves, so that none is ever preempted.
"""


@dataclass(frozen=True)
class SchedulerPolicy:
    """Limits of a step, and the weight of cached prefixes against waiting time.

    Waiting requests are ordered by `cached tokens + ageing_tokens_per_s * seconds waited`: a cached prefix
    lets a request overtake others, for a bounded time. Only the `num_candidates` oldest are considered, so that a
    long queue costs nothing.

    Parts of prompts take at most about `prompts_s` seconds of a step while other requests wait or decode; the oldest
    gets half of that, and the others share the rest, the shortest first. Prompts that end in the step have a quarter of
    a second. None: only the number of tokens limits a step.

    A step has `max_num_logits` rows of logits, at least one for each sequence. A prompt whose logprobs are requested
    takes one for each token, and so is computed in shorter parts.

    If it `speculates`, steps without prompts verify draft tokens, as many as pay: of a draft model or MTP head if there
    is one, and if it `looks_up`, of n-gram lookup.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_num_logits: int = 64
    ageing_tokens_per_s: float = 256.0
    num_candidates: int = 32
    admission: AdmissionPolicy = "optimistic"
    prompts_s: float | None = None
    speculates: bool = False
    looks_up: bool = True
    whole_prompts: bool = False  # a prompt is computed in one step or not at all: its tokens attend to later ones


class ScheduledRequest(NamedTuple):
    """The share of one request in a step.

    The logits of its last `num_logits` tokens are read: of the last one if it samples, of a prompt's tokens if their
    logprobs are requested, and of a draft and the token before it.
    """

    request: Request
    reservation: Reservation
    num_logits: int
    samples: bool
    draft: Draft = NO_DRAFT

    def read(self, step: StepLogits, end: int) -> Outcome | None:
        """Pass the request's readers their rows, which end before row `end` of the step.

        Return the outcome of a failure, if some rows are not finite or a reader raises; None if the request continues.
        """
        request, reserved = self.request, self.reservation
        start, stop, length = reserved.start, reserved.stop, len(request.admitted)
        for reader in request.readers:
            positions = reader.wanted(start, stop, length)
            if positions:
                rows = LogitRows(step, end - (stop - positions.start), positions, self.draft.token_ids)
                try:
                    if not reader.read(rows):
                        return DAMAGED
                except Exception as error:
                    return Outcome(error=error)
        return None


class StepPlan:
    """The requests of a step, in order, and the tokens that can still be added.

    `unservable` is a request that was found not to fit the pool even alone: it can only fail.
    """

    def __init__(
        self,
        step: KVTransaction,
        max_num_tokens: int,
        stops: Mapping[str, int] | None = None,
        time: PromptTime | None = None,
        *,
        max_num_logits: int = 64,
        whole_prompts: bool = False,
    ) -> None:
        """Make an empty plan.

        Args:
            stops: by request id, positions that a request does not compute beyond.
            time: the time for prompts; None: no limit.
            max_num_logits: the most rows of logits.
            whole_prompts: whether prompts must not be split.
        """
        self._whole_prompts = whole_prompts
        self.budget = self.max_num_tokens = max_num_tokens
        self._time, self._aside = time, 0
        self._num_logits_left, self._logits_aside = max_num_logits, 0
        self.unservable: Request | None = None
        self._step = step
        self._stops = stops or {}
        self._scheduled: dict[str, ScheduledRequest] = {}

    @property
    def scheduled(self) -> list[ScheduledRequest]:
        """The requests of the step, in order."""
        return list(self._scheduled.values())

    @property
    def has_room(self) -> bool:
        """Return whether tokens of prompts can still be added."""
        return self.budget > 0 and (self._time is None or self._time.has_room)

    def has_room_for(self, request: Request) -> bool:
        """Return whether tokens of a running request's prompt can still be added."""
        sequence = request.admitted
        return self.has_room and (
            self._time is None or self._time.has_room_for(sequence.num_computed, sequence.num_uncomputed)
        )

    def reserve(self, request: Request, share: float = 1.0) -> bool:
        """Add as many of the request's tokens as the budget allows; none if the step has no row of logits left.

        Return False, with nothing changed, if there are no pages.

        Args:
            share: share of the time that is left for prompts.
        """
        sequence = request.admitted
        num_tokens = min(sequence.num_uncomputed, self.budget)
        time = None if sequence.decodes else self._time
        if time is not None and num_tokens > 1:
            num_tokens = min(num_tokens, time.num_tokens(sequence.num_computed, sequence.num_uncomputed, share))
        if self._stops and (stop := self._stops.get(request.request_id, 0)) > sequence.num_computed:
            num_tokens = min(num_tokens, stop - sequence.num_computed)
        if (state_stop := sequence.state.next_stop(sequence.num_computed)) is not None:
            num_tokens = min(num_tokens, state_stop - sequence.num_computed)
        num_logits = request.num_logits(num_tokens)
        if num_logits > self._num_logits_left:
            num_tokens -= num_logits - self._num_logits_left
            num_logits = request.num_logits(num_tokens)
        if num_tokens == 0 or (self._whole_prompts and num_tokens < sequence.num_uncomputed):
            return True
        try:
            reservation = self._step.reserve(sequence, num_tokens)
        except OutOfPages:
            return False
        self.budget -= num_tokens
        self._num_logits_left -= num_logits
        samples = reservation.stop == len(sequence)
        if time is not None and num_tokens > 1:
            time.take(reservation.start, num_tokens, ends=samples)
        self._scheduled[request.request_id] = ScheduledRequest(request, reservation, num_logits, samples)
        return True

    def reserve_draft(self, request: Request, draft: Draft) -> bool:
        """Add a request's uncomputed tokens and a draft after them; return False, with nothing changed, if none fit."""
        num_logits, sequence = 1 + len(draft.token_ids), request.admitted
        try:
            reservation = self._step.reserve(sequence, sequence.num_uncomputed, draft.token_ids)
        except OutOfPages:
            return False
        self.budget -= reservation.num_tokens
        self._num_logits_left -= num_logits
        self._scheduled[request.request_id] = ScheduledRequest(request, reservation, num_logits, True, draft)
        return True

    def cut_at_states(self) -> None:
        """Cut requests at tokens after which a state was requested since they were added."""
        for item in self.scheduled:
            reserved = item.reservation
            stop = reserved.sequence.state.next_stop(reserved.start)
            if stop is not None and stop < reserved.stop:
                self.drop(item.request)
                self.reserve(item.request)

    def drop(self, request: Request) -> None:
        """Remove a request from the plan, if it is in; its pages, tokens and time are free for others."""
        dropped = self._scheduled.pop(request.request_id, None)
        if dropped is not None:
            self._step.drop(dropped.reservation.sequence)
            self.budget += dropped.reservation.num_tokens
            self._num_logits_left += dropped.num_logits
            reserved = dropped.reservation
            if self._time is not None and not reserved.decodes:
                self._time.give_back(reserved.start, reserved.num_tokens, ends=dropped.samples)

    def set_half_aside(self) -> None:
        """Keep half of tokens, rows and time until `take_back`, for the oldest prompt, which gets what others leave."""
        self._aside = (self.budget + 1) // 2
        self.budget -= self._aside
        self._logits_aside = (self._num_logits_left + 1) // 2
        self._num_logits_left -= self._logits_aside
        if self._time is not None:
            self._time.set_aside(0.5)

    def take_back(self) -> None:
        """Make everything that is left available."""
        self.budget, self._aside = self.budget + self._aside, 0
        self._num_logits_left, self._logits_aside = self._num_logits_left + self._logits_aside, 0
        if self._time is not None:
            self._time.set_aside(0.0)

    def compute(
        self, forward: Forward, *, num_outputs: int, clock: Callable[[], float]
    ) -> list[tuple[ScheduledRequest, Outcome]]:
        """Run the model, and pass readers the first `num_outputs` logits of each row.

        Return the outcomes of the requests that sample, and of those that fail, in order.

        Raises:
            EngineError: the model returned logits of another shape.
        """
        scheduled = self.scheduled
        if not scheduled:
            return []
        if copies := self._step.copies:
            forward.copy_rows(copies)
        num_logits = [item.num_logits for item in scheduled]
        num_rows = sum(num_logits)
        adapters = [item.request.adapter_index for item in scheduled]
        logits = forward.forward(make_batch([item.reservation for item in scheduled], num_logits, adapters))
        if logits.shape[0] != num_rows or logits.shape[1] < num_outputs:
            expected = f"{(num_rows, num_outputs)}; compile the model again"
            raise EngineError(f"the model returned logits of shape {logits.shape}, not {expected}")
        if not num_rows:
            return []
        # a padded embedding has rows that are no token: they are never sampled
        step = StepLogits(logits[:, :num_outputs], forward.top_logits(num_rows, num_outputs), clock())
        # all rows are read before any reply continues: alternating was slower for both (bench/LOG.md)
        read = [(item, item.read(step, end)) for item, end in zip(scheduled, accumulate(num_logits), strict=True)]
        return [
            (item, item.request.sampler.go_on(step.now) if failure is None else failure)
            for item, failure in read
            if item.samples or failure is not None
        ]

    def num_held_pages(self, request: Request) -> int:
        """Return the number of pages that a running request holds, those of this step included."""
        scheduled = self._scheduled.get(request.request_id)
        return scheduled.reservation.num_pages if scheduled else len(request.admitted.page_ids)
