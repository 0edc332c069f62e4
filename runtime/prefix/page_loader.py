"""Bring prefixes back from disk for requests that wait, where that is quicker than to compute them.

Knows waiters by name, not requests. While a load is in flight nobody holds a page for it: what was read is put into the
tree between two steps, piece by piece from the prompt's beginning, and found there like anything else.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ..artifact.manifest import PAGE_SIZE
from ..cache.prefix_cache import PrefixCache
from ..cache.prefix_match import MatchKind, PrefixMatch
from ..model.batch import UInt8Array
from .disk_index import DiskIndex, StoredPrefix
from .disk_reader import DiskReader, ReadJob
from .end_loader import EndLoader
from .load_counts import LoadCounts
from .loaded_prefix import LoadedPrefix
from .page_inserter import PageInserter
from .prefix_plan import LoadBudget, PrefixPlan, plan
from .rates import Rates

_LOGGER = logging.getLogger(__name__)

FindPrefix = Callable[[PrefixCache], PrefixMatch]
"""What a request may reuse of a cache: of the one in memory, and of the one on disk."""

MAX_TRIES = 3  # loads that a request waits for, one after the other
_PROBE_BYTES = 2 << 20
_PROBE_EVERY_S = 30.0  # a disk that is not worth reading from is measured again so often


@dataclass(eq=False)
class _Waiter:
    name: str
    find: FindPrefix
    start: int  # pages that memory had
    stop: int  # pages that the disk has
    memory_by_kind: Mapping[MatchKind, int]
    num_tries: int
    first_start: int


@dataclass(eq=False)
class _Load:
    prefix: StoredPrefix
    start: int  # the page that it begins with
    job: ReadJob
    deadline: float
    done: int  # pages [start, done) are in memory
    waiters: list[_Waiter] = field(default_factory=list)


class PageLoader:
    """`begin` a load for whoever would gain by it; `advance` says who may go on.

    Attributes:
        plan: decides where a prefix comes from.
    """

    plan = staticmethod(plan)

    def __init__(
        self,
        inserter: PageInserter,
        index: DiskIndex,
        reader: DiskReader,
        ends: EndLoader,
        rates: Rates,
        counts: LoadCounts,
        *,
        page_bytes: int,
        clock: Callable[[], float],
        lost: Callable[[list[bytes]], None],
    ) -> None:
        """A loader into the inserter's cache.

        Args:
            ends: loads the end of a prefix for who does not wait.
            lost: told of the keys of pages that are on disk no more, and of all behind them.
        """
        self._inserter, self._index, self._reader, self._rates = inserter, index, reader, rates
        self._cache, self._ends, self.counts = inserter.cache, ends, counts
        self._page_bytes, self._clock, self._lost = page_bytes, clock, lost
        self._loads: dict[ReadJob, _Load] = {}
        self._ready: deque[_Waiter] = deque()
        self._loaded: dict[str, LoadedPrefix] = {}
        self._probed_at = clock()

    @property
    def is_ready(self) -> bool:
        """Whether `advance` would do anything now."""
        return bool(self._ready or self._reader.results) or self.wait_s == 0.0

    @property
    def wait_s(self) -> float | None:
        """Seconds until a load is late; None: there is none."""
        if not self._loads:
            return None
        return max(0.0, min(load.deadline for load in self._loads.values()) - self._clock())

    def begin(self, name: str, find: FindPrefix, *, num_tokens_ahead: int | None = None) -> bool:
        """Load what the disk has and memory has not, if that is worth it; whether to wait for it.

        Args:
            num_tokens_ahead: as many are computed before a request that does not wait; None: nobody knows.
        """
        return self._begin(_Waiter(name, find, 0, 0, {}, 0, 0), num_tokens_ahead)

    def advance(self) -> list[str]:
        """Put what was read into memory; who waited long enough."""
        while self._reader.results:
            piece = self._reader.results.popleft()
            try:
                self._rates.observe_read(num_bytes=piece.pages.nbytes, seconds=piece.seconds)
                load = self._loads.get(piece.job)
                if load is not None:
                    self._take(load, piece.start, piece.pages, piece.num_right)
                else:
                    self._ends.take(piece)
            finally:
                self._reader.give_back(piece)
        self._ends.advance()
        now = self._clock()
        for load in [load for load in self._loads.values() if load.deadline <= now]:
            self.counts.num_late += 1
            self._end(load)
        names = []
        while self._ready:
            waiter = self._ready.popleft()
            if not self._begins_again(waiter):
                names.append(waiter.name)
        return names

    def loaded(self, name: str) -> LoadedPrefix | None:
        """What came from disk for who was said to go on; asked once."""
        return self._loaded.pop(name, None)

    def abandon(self, name: str) -> None:
        """Nobody waits under this name any more."""
        self._loaded.pop(name, None)
        self._ends.abandon(name)
        self._ready = deque(waiter for waiter in self._ready if waiter.name != name)
        for load in list(self._loads.values()):
            load.waiters = [waiter for waiter in load.waiters if waiter.name != name]
            if not load.waiters:
                self._end(load)

    def end(self, namespace: bytes | None = None) -> None:
        """End all loads, or a namespace's; those who wait go on with the next `advance`."""
        self._ends.end(namespace)
        for load in list(self._loads.values()):
            if namespace is None or load.prefix.namespace == namespace:
                self._end(load)

    def start_over(self) -> None:
        """End all loads, and forget who waited for them."""
        self.end()
        self._ready.clear()
        self._loaded.clear()

    def probe(self) -> None:
        """Measure the disk with a piece of anything that is on it, for later; nobody waits for that."""
        self._probed_at = self._clock()
        heads = self._index.any_chain(max(1, min(self._reader.piece_pages, _PROBE_BYTES // self._page_bytes)))
        if heads:
            self._reader.submit(ReadJob(heads))

    def _begins_again(self, waiter: _Waiter) -> bool:
        """Whether the disk has still more for somebody who waited; who cannot be looked up goes on, and fails alone."""
        try:
            return waiter.num_tries < MAX_TRIES and self._begin(waiter)
        except Exception:
            _LOGGER.exception("what %s waits for could not be looked up", waiter.name)
            return False

    def _begin(self, waiter: _Waiter, num_tokens_ahead: int | None = None) -> bool:
        memory, disk = waiter.find(self._cache), waiter.find(self._index.cache)
        stop = len(disk.pages)
        if stop * PAGE_SIZE <= memory.num_tokens:
            return False
        start = len(self._cache.tree.find(disk.namespace, disk.prompt_ids[: stop * PAGE_SIZE]).pages)
        waiter.num_tries += 1
        waiter.start, waiter.stop = start, stop
        if waiter.num_tries == 1:
            waiter.first_start, waiter.memory_by_kind = start, {**memory.tokens_by_kind}
        assert disk.namespace is not None, "it has pages"
        prefix = self._index.prefix(disk.namespace, disk.prompt_ids, stop)
        for load in self._loads.values():  # which another waits for already
            if load.start <= start < len(load.prefix.heads) and load.prefix.heads[start].key == prefix.heads[start].key:
                load.waiters.append(waiter)
                return True
        has_same_ids = memory.prompt_ids == disk.prompt_ids  # or what is computed might be of other ids
        if has_same_ids and self._ends.join(waiter.name, prefix, memory, disk):
            return False
        now, queued = self._clock(), self._reader.queued_bytes
        planned = self._plan(start, stop, queued, num_tokens_ahead if has_same_ids else None)
        if planned.load is not None and planned.load.source == "back":
            self._ends.begin(waiter.name, prefix, start, memory, disk)
            return False
        if planned.load is None:
            self.counts.num_refused += 1
            if not queued and now - self._probed_at > _PROBE_EVERY_S:
                self.probe()
            return False
        job = ReadJob(prefix.heads[start:])
        self._loads[job] = _Load(prefix, start, job, now + planned.deadline_s, start, [waiter])
        self._reader.submit(job)
        self.counts.num_loads += 1
        return True

    def _take(self, load: _Load, offset: int, pages: UInt8Array, num_right: int) -> None:
        """Pages of a load came; see whether the rest is still worth it."""
        start, stop = load.start + offset, len(load.prefix.heads)
        is_in = num_right > 0 and self._inserter.insert(load.prefix, start, pages[:num_right])
        if is_in:
            load.done = start + num_right
            self.counts.num_pages += num_right
        if not is_in or num_right < len(pages):
            self.counts.num_broken += 1
            if num_right < len(pages):
                self._lost([load.prefix.heads[start + num_right].key])
            self._end(load)
        elif load.done == stop:
            self._end(load)
        elif self._plan(load.done, stop, 0, None).load is None:  # the rest is not worth it any more
            self.counts.num_cut += 1
            self._end(load)

    def _plan(self, start: int, stop: int, queued_bytes: int, num_tokens_ahead: int | None) -> PrefixPlan:
        """Where the pages `[0, stop)` come from, of which memory has the first `start`."""
        budget = LoadBudget(
            token_bytes=self._page_bytes / PAGE_SIZE,
            queued_bytes=queued_bytes,
            room_bytes=self._ends.room_bytes,
            num_tokens_ahead=num_tokens_ahead,
        )
        return self.plan(start * PAGE_SIZE, stop * PAGE_SIZE, self._rates, budget)

    def _end(self, load: _Load) -> None:
        load.job.is_cancelled = True
        del self._loads[load.job]
        for waiter in load.waiters:
            stop = max(load.done, waiter.first_start) * PAGE_SIZE
            start = max(waiter.first_start, load.start) * PAGE_SIZE
            before = self._loaded.get(waiter.name)
            start = start if before is None else min(start, before.start)
            self._loaded[waiter.name] = LoadedPrefix(start, max(stop, start), waiter.memory_by_kind)
            if load.done < len(load.prefix.heads):
                waiter.num_tries = MAX_TRIES  # it was waited for in vain
            self._ready.append(waiter)
