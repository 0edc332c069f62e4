"""Plan what one step computes, within its tokens and its time, then compute it.

Knows requests, pages, reservations and the model; whose turn it is, is the scheduler's to say, and what becomes of the
logits, the readers'.
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
"""What of a reply has pages reserved when its request is let in.

`optimistic`: one token, so that more requests run, and the newest gives its pages back when they become too few;
`conservative`: `max_tokens`, or what the context leaves, so that none ever does.
"""


@dataclass(frozen=True)
class SchedulerPolicy:
    """Limits of a step, and how cached prefixes weigh against waiting.

    A waiting request's turn comes by `cached tokens + ageing_tokens_per_s * seconds waited`: a cached prefix
    lets it overtake others, for a bounded time. Only the `num_candidates` oldest are looked at, so that a
    long queue costs nothing.

    Parts of prompts take about `prompts_s` seconds of a step at most while others wait or stream; the oldest has half
    of that, and others share the rest, the shortest first. Prompts that end in the step have a quarter of a second.
    None: tokens alone limit a step.

    A step has `max_num_logits` rows of logits, at least one for each sequence. A prompt whose logprobs are asked for
    takes one for each token, and so is computed in shorter parts.

    Where it `speculates`, steps without prompts check guesses of what replies go on with, as many as pay: of a draft
    model if there is one, and where it `looks_up`, of what was said before.
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
    whole_prompts: bool = False  # a prompt is computed in one step or not at all: its tokens see those after them


class ScheduledRequest(NamedTuple):
    """One request's share of a step.

    Of its last `num_logits` tokens the logits are wanted: of the last one if it samples, of those of a prompt whose
    logprobs are asked for, and of a draft and the token before it.
    """

    request: Request
    reservation: Reservation
    num_logits: int
    samples: bool
    draft: Draft = NO_DRAFT

    def read(self, step: StepLogits, end: int) -> Outcome | None:
        """Hand the request's readers their rows, which end before row `end` of the step. Returns how the request fails
        if some of these are not finite or a reader raises; None if it goes on.
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
    """The requests of a step, in order, and the tokens that may still be added.

    `unservable` is a request that does not fit the pool even alone, if one was met: it can only fail.
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
        """An empty plan; a request that has a position in `stops` before it computes no further than that, prompts take
        no longer than `time`, and `max_num_logits` rows of logits are wanted at most. `whole_prompts` are not cut."""
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
        """Whether tokens of prompts may still be added."""
        return self.budget > 0 and (self._time is None or self._time.has_room)

    def has_room_for(self, request: Request) -> bool:
        """Whether tokens of a running request's prompt may still be added."""
        sequence = request.admitted
        return self.has_room and (
            self._time is None or self._time.has_room_for(sequence.num_computed, sequence.num_uncomputed)
        )

    def reserve(self, request: Request, share: float = 1.0) -> bool:
        """Add as many of the request's tokens as the budget allows, none where the step has no row of logits left for
        it; False, with nothing changed, without pages.

        Args:
            share: of the time that is left for prompts.
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
        """Add a request's uncomputed tokens and a draft behind them; False, with nothing changed, without pages."""
        num_logits, sequence = 1 + len(draft.token_ids), request.admitted
        try:
            reservation = self._step.reserve(sequence, sequence.num_uncomputed, draft.token_ids)
        except OutOfPages:
            return False
        self.budget -= reservation.num_tokens
        self._num_logits_left -= num_logits
        self._scheduled[request.request_id] = ScheduledRequest(request, reservation, num_logits, True, draft)
        return True

    def keep_to_states(self) -> None:
        """Have requests end at a token behind which a state is wanted since they were added."""
        for item in self.scheduled:
            reserved = item.reservation
            stop = reserved.sequence.state.next_stop(reserved.start)
            if stop is not None and stop < reserved.stop:
                self.drop(item.request)
                self.reserve(item.request)

    def drop(self, request: Request) -> None:
        """Take a request out again, if it is in; its pages, tokens and time are free for others."""
        dropped = self._scheduled.pop(request.request_id, None)
        if dropped is not None:
            self._step.drop(dropped.reservation.sequence)
            self.budget += dropped.reservation.num_tokens
            self._num_logits_left += dropped.num_logits
            reserved = dropped.reservation
            if self._time is not None and not reserved.decodes:
                self._time.give_back(reserved.start, reserved.num_tokens, ends=dropped.samples)

    def set_half_aside(self) -> None:
        """Keep half of all until `take_back`, for the oldest prompt: it has what others leave it."""
        self._aside = (self.budget + 1) // 2
        self.budget -= self._aside
        self._logits_aside = (self._num_logits_left + 1) // 2
        self._num_logits_left -= self._logits_aside
        if self._time is not None:
            self._time.set_aside(0.5)

    def take_back(self) -> None:
        """Have all that is left."""
        self.budget, self._aside = self.budget + self._aside, 0
        self._num_logits_left, self._logits_aside = self._num_logits_left + self._logits_aside, 0
        if self._time is not None:
            self._time.set_aside(0.0)

    def compute(
        self, forward: Forward, *, num_outputs: int, clock: Callable[[], float]
    ) -> list[tuple[ScheduledRequest, Outcome]]:
        """Run the model, and have readers read the first `num_outputs` logits of each row.

        Returns what that brought the requests that sample, and those that fail, in order.

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
        # all rows are read before any reply goes on: in turns, both were slower (bench/LOG.md)
        read = [(item, item.read(step, end)) for item, end in zip(scheduled, accumulate(num_logits), strict=True)]
        return [
            (item, item.request.sampler.go_on(step.now) if failure is None else failure)
            for item, failure in read
            if item.samples or failure is not None
        ]

    def num_held_pages(self, request: Request) -> int:
        """Pages that a running request holds, those of this step included."""
        scheduled = self._scheduled.get(request.request_id)
        return scheduled.reservation.num_pages if scheduled else len(request.admitted.page_ids)
