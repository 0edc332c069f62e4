"""Plan what one step computes: the requests of the step within its tokens and its time, and whether one more fits.

Then compute it. Knows requests, pages, reservations and the model; whose turn it is, is the scheduler's to say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ..cache.kv_transaction import KVTransaction, Reservation, make_batch
from ..errors import EngineError, OutOfPages
from ..model.batch import Float32Array, Forward, TopLogits
from ..prefix.rates import LinearRate
from .request import Request
from .sampler import Sampled, logprob_of, sample


class ScheduledRequest(NamedTuple):
    """One request's share of a step.

    Of its last `num_logits` tokens the logits are wanted: of the last one if it samples, and of those of a prompt whose
    logprobs are asked for.
    """

    request: Request
    reservation: Reservation
    num_logits: int
    samples: bool


ALONE_S = 0.25  # of a prompt that is alone, or of all that end in a step: so long does the next request wait for it
GRACE_S = 3.0  # that prompts may take more than streams: many short prompts are computed at once, which is faster
_LEAST, _FIRST = 8, 64  # tokens of a prompt: fewer cost a step as much; before anything was measured
_KEPT = 0.75  # of how long streams took by themselves before, with each such step


@dataclass
class StepPace:
    """What a step may take.

    >>> pace = StepPace(limit_s=0.05)
    >>> pace.num_tokens(0, pace.prompts_s(num_streams=0, has_others=True))  # nothing was measured yet
    64
    >>> pace.observe(num_streams=0, chunks=[(0, 512)], seconds=0.256)
    >>> pace.num_tokens(0, pace.prompts_s(num_streams=0, has_others=True))
    100

    Attributes:
        limit_s: seconds of parts of prompts in a step while others wait or stream. Where prompts have taken `GRACE_S`
            more than streams, there are steps without prompts, so that streams keep half of their speed.
    """

    limit_s: float
    _rate: LinearRate = field(default_factory=LinearRate)
    _streams_s: float = 0.0  # of a step without prompts
    _debt_s: float = 0.0  # that prompts took more than streams

    def prompts_s(self, *, num_streams: int, has_others: bool) -> float:
        """Seconds for parts of prompts in the next step; 0: no prompts.

        Args:
            num_streams: requests that decode in it.
            has_others: whether more than one prompt is to be computed.
        """
        if num_streams and self._debt_s >= GRACE_S:
            return 0.0
        return self.limit_s if num_streams or has_others else max(ALONE_S, self.limit_s)

    def num_tokens(self, position: int, seconds: float) -> int:
        """Tokens of a prompt, from `position` on, that take about so long; a few where that is fewer than pay."""
        each_s = self._rate.seconds(float(position))
        return max(_LEAST, int(seconds / each_s + 1e-6)) if each_s else _FIRST

    def seconds(self, position: int, num_tokens: int) -> float:
        """That so many tokens of a prompt take, from `position` on; 0 before anything was measured."""
        return num_tokens * (self._rate.seconds(position + num_tokens / 2) or 0.0)

    def observe(self, *, num_streams: int, chunks: Sequence[tuple[int, int]], seconds: float) -> None:
        """Note how long a step took: `num_streams` requests decoded beside `chunks` (start, stop) of prompts."""
        if seconds <= 0.0:
            return
        if not chunks:
            self._streams_s = seconds if not self._streams_s else _KEPT * self._streams_s + (1 - _KEPT) * seconds
            self._debt_s = max(0.0, self._debt_s - seconds)
            return
        if not num_streams:
            self._debt_s = 0.0
        else:
            streams_s = min(self._streams_s, 0.75 * seconds)
            seconds -= streams_s
            self._debt_s = max(0.0, self._debt_s + seconds - streams_s)
        num_tokens = sum(stop - start for start, stop in chunks)
        position = sum((stop - start) * (start + stop) / 2 for start, stop in chunks) / num_tokens
        self._rate.observe(position, seconds / num_tokens, float(num_tokens))

    def observe_step(self, reservations: Sequence[Reservation], seconds: float) -> None:
        """The same, of what a step reserved; a sequence with one token decodes."""
        chunks = [(each.start, each.stop) for each in reservations if each.num_tokens > 1]
        self.observe(num_streams=len(reservations) - len(chunks), chunks=chunks, seconds=seconds)


class PromptTime:
    """What is left of the seconds that a step has for prompts.

    Prompts that end in the step may take `ALONE_S` together: fifty short ones are computed in a few steps, as beside
    one another they cost less. Parts of longer ones take `parts_s`.
    """

    def __init__(self, pace: StepPace, parts_s: float) -> None:
        self._pace = pace
        self._parts_s, self._all_s = parts_s, max(ALONE_S, parts_s) if parts_s else 0.0
        self._used_by_parts_s = self._used_s = self._share_aside = 0.0

    @property
    def has_room(self) -> bool:
        """Whether one more prompt may begin in the step."""
        return self._left_s > 0.0

    def has_room_for(self, position: int, num_tokens: int) -> bool:
        """Whether a part of a prompt's tokens from `position` on fits, or all of them do."""
        return self._left_of_parts_s > 0.0 or num_tokens <= self._pace.num_tokens(position, self._left_s)

    def set_aside(self, share: float) -> None:
        """Let a share of all be for later."""
        self._share_aside = share

    def num_tokens(self, position: int, num_tokens: int, share: float) -> int:
        """How many of a prompt's `num_tokens` from `position` on take a share of what is left."""
        if num_tokens <= self._pace.num_tokens(position, share * self._left_s):
            return num_tokens
        return min(num_tokens, self._pace.num_tokens(position, share * self._left_of_parts_s))

    def take(self, position: int, num_tokens: int, *, ends: bool) -> None:
        """Use the time of so many tokens, with which the prompt ends or not."""
        seconds = self._pace.seconds(position, num_tokens)
        self._used_s += seconds
        self._used_by_parts_s += 0.0 if ends else seconds

    @property
    def _left_s(self) -> float:
        return self._all_s * (1 - self._share_aside) - self._used_s

    @property
    def _left_of_parts_s(self) -> float:
        return min(self._left_s, self._parts_s * (1 - self._share_aside) - self._used_by_parts_s)


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
    ) -> None:
        """An empty plan; a request that has a position in `stops` before it computes no further than that, prompts take
        no longer than `time`, and `max_num_logits` rows of logits are wanted at most."""
        self.budget = max_num_tokens
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
        if self._time is not None and num_tokens > 1:
            num_tokens = min(num_tokens, self._time.num_tokens(sequence.num_computed, sequence.num_uncomputed, share))
        if self._stops and (stop := self._stops.get(request.request_id, 0)) > sequence.num_computed:
            num_tokens = min(num_tokens, stop - sequence.num_computed)
        num_logits = request.num_logits(num_tokens)
        if num_logits > self._num_logits_left:
            num_tokens -= num_logits - self._num_logits_left
            num_logits = request.num_logits(num_tokens)
        if num_tokens == 0:
            return True
        try:
            reservation = self._step.reserve(sequence, num_tokens)
        except OutOfPages:
            return False
        self.budget -= num_tokens
        self._num_logits_left -= num_logits
        samples = reservation.stop == len(sequence)
        if self._time is not None and num_tokens > 1:
            self._time.take(reservation.start, num_tokens, ends=samples)
        self._scheduled[request.request_id] = ScheduledRequest(request, reservation, num_logits, samples)
        return True

    def drop(self, request: Request) -> None:
        """Take a request out again, if it is in; its pages and tokens are free for others."""
        dropped = self._scheduled.pop(request.request_id, None)
        if dropped is not None:
            self._step.drop(dropped.reservation.sequence)
            self.budget += dropped.reservation.num_tokens
            self._num_logits_left += dropped.num_logits

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

    def num_held_pages(self, request: Request) -> int:
        """Pages that a running request holds, those of this step included."""
        scheduled = self._scheduled.get(request.request_id)
        return scheduled.reservation.num_pages if scheduled else len(request.admitted.page_ids)


def compute(
    forward: Forward, step: KVTransaction, scheduled: Sequence[ScheduledRequest], *, vocab_size: int
) -> list[tuple[ScheduledRequest, Sampled]]:
    """Run the model over all of `scheduled`, sample one of `vocab_size` ids for those that sample, and read logprobs of
    prompts. None for a request of which some logits are not finite, whether it samples or not.

    Raises:
        EngineError: the model returned logits of another shape.
    """
    if not scheduled:
        return []
    if step.copies:
        forward.copy_rows(step.copies)
    num_logits = [item.num_logits for item in scheduled]
    num_rows = sum(num_logits)
    logits = forward.forward(make_batch([item.reservation for item in scheduled], num_logits))
    if logits.shape[0] != num_rows or logits.shape[1] < vocab_size:
        raise EngineError(
            f"the model returned logits of shape {logits.shape}, not {(num_rows, vocab_size)}; compile the model again"
        )
    if not num_rows:
        return []
    # a padded embedding has rows that are no token: they are never sampled
    logits, top = logits[:, :vocab_size], forward.top_logits(num_rows, vocab_size)
    sampling = [item for item in scheduled if item.samples]
    damaged: list[tuple[ScheduledRequest, Sampled]] = []
    if num_rows > len(sampling):
        damaged = [(item, None) for item in _read_prompts(scheduled, logits, top)]
        is_last = np.array([place for item in scheduled for place in _are_last(item)], np.bool_)
        logits = logits[is_last]
        top = TopLogits(top.values[is_last], top.token_ids[is_last], top.is_finite[is_last])
    sampled = zip(sampling, sample(logits, top, [item.request.reply.sampler for item in sampling]), strict=True)
    if not damaged:
        return list(sampled)
    lost = {item.request.request_id for item, _ in damaged}
    return [*damaged, *(pair for pair in sampled if pair[0].request.request_id not in lost)]


def _are_last(item: ScheduledRequest) -> Iterator[bool]:
    """Of each row of logits of a request, whether it is the one that it samples from."""
    return (item.samples and row == item.num_logits - 1 for row in range(item.num_logits))


def _read_prompts(
    scheduled: Sequence[ScheduledRequest], logits: Float32Array, top: TopLogits
) -> Iterator[ScheduledRequest]:
    """Read the rows that say what comes next in prompts; yields the requests of which some are not finite."""
    stop = 0
    for item in scheduled:
        start, stop = stop, stop + item.num_logits
        asked, rows = item.request.prompt_logprobs, range(start, stop - item.samples)
        if asked is None or not rows:
            continue
        if not top.is_finite[rows.start : rows.stop].all():
            yield item
            continue
        for row in rows:
            logprob = logprob_of(logits[row], top.values[row], top.token_ids[row], asked.next_id, asked.num_top)
            asked.append(logprob)
