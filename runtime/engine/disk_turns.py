"""Let requests wait for the disk between steps, and give the disk what steps compute.

Knows requests and who waits for a load; what is loaded and kept, and how, is the tier's. Without a tier nobody waits
and nothing is kept.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future

from ..cache.prefix_cache import PrefixCache
from ..prefix.disk_tier import DiskTier
from .request import Request
from .scheduler import find_prefix
from .step_plan import ScheduledRequest

_LOGGER = logging.getLogger(__name__)

_PREFILL_PER_DECODE = 16  # tokens of prompts beside each of a reply, for a step to measure prefill


class DiskTurns:
    """The requests of one engine that wait for what the disk has of their prompts; they are in no queue meanwhile.

    Attributes:
        tier: what keeps pages on disk; None: nothing does.
    """

    def __init__(self, tier: DiskTier | None, *, context_length: int) -> None:
        self.tier = tier
        self._context_length = context_length
        self._waiting: dict[str, Request] = {}  # by id

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def requests(self) -> list[Request]:
        """Those that wait, in order of arrival."""
        return list(self._waiting.values())

    @property
    def is_ready(self) -> bool:
        """Whether `advance` would get on with something now."""
        return self.tier is not None and self.tier.is_ready

    @property
    def wait_s(self) -> float | None:
        """Seconds until somebody goes on in any case; None: nobody waits."""
        return None if self.tier is None else self.tier.wait_s

    def begin(self, request: Request, *, num_tokens_ahead: int | None) -> bool:
        """Whether the request waits here, until `advance` returns it, for what the disk has of its prompt.

        Args:
            num_tokens_ahead: as many would be computed before it; None: nobody knows.
        """
        if self.tier is None or request.namespace is None:
            return False
        context_length = self._context_length
        if not self.tier.begin(
            request.request_id,
            lambda cache: find_prefix(cache, request, context_length),
            num_tokens_ahead=num_tokens_ahead,
            kv_budget=1.0 if request.spec.options.kv_budget is None else request.spec.options.kv_budget,
        ):
            return False
        self._waiting[request.request_id] = request
        return True

    def remove(self, request_id: str) -> Request:
        """Take out a request that waits no longer."""
        request = self._waiting.pop(request_id)
        if self.tier is not None:
            self.tier.abandon(request_id)
        return request

    def advance(self, cache: PrefixCache) -> list[Request]:
        """Those who waited long enough, whatever became of their loads; saves a little, too.

        Args:
            cache: that they will be admitted from.
        """
        if self.tier is None:
            return []
        try:
            names = self.tier.advance()
        except Exception:
            _LOGGER.exception("loading from the store failed")
            names = self.tier.give_up()
        requests = [self._waiting.pop(name) for name in names]
        for request in requests:
            request.loaded = self.tier.loaded(request.request_id)
            if (rows := self.tier.rows(request.request_id)) is not None:
                request.rows = rows
        return requests

    def meet(self, find: Callable[[str], Request | None], cache: PrefixCache) -> None:
        """Give what came from disk beside computing to those whom it is for; between two steps.

        Args:
            find: the request with an id, of those that do not wait here; None: there is none any more.
        """
        if self.tier is None:
            return
        for end in self.tier.ends.take_loaded():
            request = find(end.name)
            if request is None:
                continue
            sequence = request.sequence
            if sequence is None:
                request.loaded = end.prefix
            elif (num_computed := sequence.num_computed) and cache.resume(sequence):  # else it was preempted
                request.count_loaded(end.by_kind(num_computed), end.match.why_not_more)
        for name in self.tier.ends.names:
            if find(name) is None:
                self.tier.ends.abandon(name)

    def stops(self) -> Mapping[str, int] | None:
        """By request id, positions before which the next step had better stop: the disk has what is behind them."""
        return None if self.tier is None else self.tier.ends.stops()

    def observe(self, scheduled: list[ScheduledRequest], seconds: float) -> None:
        """Tell who decides on loads how long a step of prompts took; decode costs more a token and is no measure."""
        if self.tier is None:
            return
        prefill = [item.reservation for item in scheduled if item.reservation.num_tokens > 1]
        num_tokens = sum(reservation.num_tokens for reservation in prefill)
        if num_tokens < _PREFILL_PER_DECODE * (len(scheduled) - len(prefill)) or not num_tokens:
            return
        positions = sum(item.num_tokens * (item.start + item.stop) / 2 for item in prefill)
        self.tier.rates.observe_compute(num_tokens=num_tokens, position=positions / num_tokens, seconds=seconds)

    def start_over(self) -> None:
        """Forget all who wait, in whatever state their loads are; what is on disk stays."""
        self._waiting.clear()
        if self.tier is not None:
            self.tier.start_over()

    def save(self, request: Request) -> None:
        """Keep what is computed of a request on disk, too."""
        sequence = request.sequence
        if self.tier is not None and sequence is not None and sequence.namespace is not None:
            num_tokens = sequence.num_computed
            self.tier.save(sequence.namespace, sequence.token_ids[:num_tokens], sequence.generated[:num_tokens])

    def used(self, request: Request) -> None:
        """Say that a prompt is computed, and what it found; over a sparse span it says nothing of what is exact."""
        sequence = request.sequence
        if self.tier is None or not self.tier.learns or sequence is None or sequence.sparse is not None:
            return
        if sequence.namespace is None:
            return
        token_ids = sequence.token_ids[: sequence.num_computed]
        self.tier.used(sequence.namespace, token_ids, num_reused=request.reuse.num_tokens)

    def distrust(self, damaged: list[Request]) -> None:
        """Take off the disk what requests whose numbers went wrong have reused and computed."""
        if self.tier is not None:
            for request in damaged:
                if request.namespace is None:  # it has nothing from there, and nothing is there of it
                    continue
                self.tier.distrust(request.namespace, request.admitted.token_ids)

    def discard(self, namespace: bytes) -> tuple[int, Future[None]]:
        """Take a namespace off the disk: how many pages nobody finds from here on, and when their bytes are gone."""
        if self.tier is not None:
            return self.tier.discard(namespace)
        done: Future[None] = Future()
        done.set_result(None)
        return 0, done

    def check(self) -> None:
        """Raise AssertionError if somebody who waits has pages, or the tier does not agree with itself."""
        for request in self._waiting.values():
            assert request.sequence is None, f"{request!r} waits for the disk and has a sequence"
        if self.tier is not None:
            self.tier.check()
