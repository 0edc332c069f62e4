"""Plan and run transfers for requests whose prompts have more tokens on disk than in memory.

Knows prompts by name, not requests. A request waits for a transfer from the front, and holds no page meanwhile. A
transfer from the back proceeds while a request computes, and never delays it. Several requests can share one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Literal

from ..artifact.manifest import PAGE_SIZE
from ..cache.prefix_cache import PrefixCache
from ..model.batch import PageIO, StateIO
from .disk_index import DiskIndex, StoredPrefix
from .disk_reader import DiskReader, EngineThread, Read
from .loaded_prefix import LoadedPrefix, PrefixLookup
from .prefix_plan import LoadBudget, PrefixPlan, meet, plan
from .rates import Rates
from .tier_hooks import LoadCounts
from .transfer import PageInserter, Transfer

_LOGGER = logging.getLogger(__name__)

MAX_TRIES = 3  # transfers that a request waits for, one after the other
STAGED_STATE_BYTES = 512 << 20  # read and not yet in the tree, in transfers that end with a state
STAGED_BYTES = 128 << 20  # read from the back and not yet in the tree, in all transfers together
_MIN_COMPUTED = 4 * PAGE_SIZE  # the least tokens of a step that is cut short for a load: fewer are expensive
_PIECE_S = 0.05  # a batch from the back is read in this time; the last one can be useless
_PROBE_BYTES = 2 << 20
_PROBE_EVERY_S = 30.0  # seconds until a disk that is too slow is measured again


class PrefixLoader:
    """Loads prefixes from disk.

    `begin` returns whether a request waits; `before_step` completes transfers from the back.

    Args:
        ready: called with requests that can continue.
        ended: called when a transfer has ended.
        lost: called with the keys of pages that are not on disk any more; all pages after them are lost, too.
        states: recurrent models: each transfer ends with a state, and comes from the front.

    Attributes:
        plan: decides where a prefix comes from.
    """

    plan = staticmethod(plan)

    def __init__(
        self,
        cache: PrefixCache,
        io: PageIO,
        index: DiskIndex,
        reader: DiskReader,
        rates: Rates,
        queue: EngineThread,
        *,
        clock: Callable[[], float],
        ready: Callable[[PrefixLookup], None],
        ended: Callable[[], None],
        lost: Callable[[list[bytes]], None],
        states: StateIO | None = None,
    ) -> None:
        self._ready, self._ended = ready, ended
        self._cache, self._index, self._reader, self._rates = cache, index, reader, rates
        self._queue, self._clock, self._lost = queue, clock, lost
        self._inserter, self._page_bytes = PageInserter(cache, io, states), reader.page_bytes
        self._state_bytes = 0 if states is None else states.state_bytes
        self.counts = LoadCounts()
        self._transfers: dict[Transfer, dict[str, PrefixLookup]] = {}  # with the requests that use each, by name
        self._deadlines: dict[Transfer, float] = {}  # for transfers that requests wait for
        self._unmeasured: set[Transfer] = set()  # transfers whose deadline was set before the disk was measured
        self._probed_at = clock()

    @property
    def met_names(self) -> list[str]:
        """Names of the requests with a transfer from the back."""
        return [name for transfer, users in self._transfers.items() if transfer.direction == "back" for name in users]

    @property
    def room_bytes(self) -> int:
        """Bytes that another transfer from the back can read ahead."""
        return STAGED_BYTES - sum(transfer.room_bytes for transfer in self._transfers)

    def begin(self, wanted: PrefixLookup) -> bool:
        """Load the tokens that the disk has and memory has not, if worthwhile; return whether to wait until `go_on`."""
        memory, disk = wanted.find(self._cache), wanted.find(self._index.cache)
        stop = len(disk.pages)
        if stop * PAGE_SIZE <= memory.num_tokens:
            return False
        assert disk.namespace is not None, "it has pages"
        prefix = self._index.prefix(disk.namespace, disk.prompt_ids, stop)
        start = self._inserter.num_there(prefix)
        if start == stop:
            return False
        wanted.num_tries, wanted.match = wanted.num_tries + 1, disk
        if wanted.num_tries == 1:
            wanted.num_in_memory, wanted.memory_by_kind = start, {**memory.tokens_by_kind}
        has_same_ids = memory.prompt_ids == disk.prompt_ids  # else the computed tokens can have other ids
        if (shared := self._shared(prefix, start, has_same_ids)) is not None:
            self._transfers[shared][wanted.name] = wanted
            return shared.direction == "front"
        queued_bytes = self._reader.queued_bytes
        splits = has_same_ids and not self._state_bytes
        planned = self._plan(start, stop, queued_bytes, wanted.num_tokens_ahead if splits else None)
        if planned.load is None or (self._state_bytes and not self._has_room_for(stop - start)):
            self.counts.num_loads_refused += 1
            if not queued_bytes and self._clock() - self._probed_at > _PROBE_EVERY_S:
                self.probe()
            return False
        if planned.load.source == "back":
            rate, first = self._rates.disk_bytes_per_s, stop - self.room_bytes // self._page_bytes
            piece_pages = 1 if rate is None else max(1, int(rate * _PIECE_S) // self._page_bytes)
            self._load(wanted, prefix, max(start, first), "back", piece_pages)
            self.counts.num_loads_from_end += 1
            return False
        transfer = self._load(wanted, prefix, start, "front", self._reader.piece_pages)
        if planned.expected_s is None:
            self._unmeasured.add(transfer)
        self._wait(transfer, planned.deadline_s)
        return True

    def begin_again(self, wanted: PrefixLookup) -> bool:
        """Call `begin` for a request that waited. If that raises, the request continues without a load."""
        try:
            return self.begin(wanted)
        except Exception:
            _LOGGER.exception("what %s waits for could not be looked up", wanted.name)
            return False

    def before_step(self) -> dict[str, int]:
        """Insert the tail pages that prefill has caught up with.

        Returns:
            By name, the position at which the next step should stop, because the rest is being loaded from disk.
        """
        stops: dict[str, int] = {}
        for transfer in [transfer for transfer in self._transfers if transfer.direction == "back"]:
            try:
                self._meet(transfer)
            except Exception:
                _LOGGER.exception("the end of a prefix could not be inserted")
                self._break(transfer)
            if not transfer.is_over:
                start, stop = transfer.there * PAGE_SIZE, transfer.arrived * PAGE_SIZE
                met = meet(start, stop, self._rates, token_bytes=self._page_bytes / PAGE_SIZE)
                met = min(max(met, transfer.start * PAGE_SIZE, start + _MIN_COMPUTED), stop)
                stops |= dict.fromkeys(self._transfers[transfer], met)
        return stops

    def abandon(self, name: str) -> None:
        """Stop loading for a request that has ended."""
        for transfer, users in list(self._transfers.items()):
            if users.pop(name, None) is not None and not users:
                self._end(transfer)

    def end(self, namespace: bytes | None = None) -> None:
        """End all transfers, or a namespace's. Requests that wait for them continue."""
        for transfer in list(self._transfers):
            if namespace is None or transfer.prefix.namespace == namespace:
                self._end(transfer, run=self._queue.post)

    def probe(self) -> None:
        """Measure the disk by reading arbitrary pages; no request waits for that."""
        self._probed_at = self._clock()
        page_keys = self._index.any_chain(max(1, min(self._reader.piece_pages, _PROBE_BYTES // self._page_bytes)))
        if page_keys:
            self._reader.read_pages(page_keys, self._measure)

    def _shared(self, prefix: StoredPrefix, start: int, has_same_ids: bool) -> Transfer | None:
        """Return a running transfer of the first missing page of this prefix, or of its last page from the back."""
        for transfer in self._transfers:
            if transfer.direction == "front":
                if transfer.start <= start and transfer.has(start, prefix):
                    return transfer
            elif has_same_ids and transfer.has(len(prefix.page_keys) - 1, prefix):
                return transfer
        return None

    def _plan(self, start: int, stop: int, queued_bytes: int, num_tokens_ahead: int | None) -> PrefixPlan:
        """Plan the source of the pages `[0, stop)`, of which memory has the first `start`."""
        budget = LoadBudget(
            token_bytes=self._page_bytes / PAGE_SIZE,
            queued_bytes=queued_bytes + self._state_bytes,
            room_bytes=self.room_bytes,
            num_tokens_ahead=num_tokens_ahead,
        )
        return self.plan(start * PAGE_SIZE, stop * PAGE_SIZE, self._rates, budget)

    def _load(
        self,
        wanted: PrefixLookup,
        prefix: StoredPrefix,
        start: int,
        direction: Literal["front", "back"],
        piece_pages: int,
    ) -> Transfer:
        """Start to load pages of a stored prefix for a request, and return the transfer.

        Args:
            start: index of the first page.
            direction: from which end of the prefix pages are read.
            piece_pages: pages of one read.
        """
        transfer = Transfer(
            *(prefix, start, direction, self._inserter, self._reader),
            piece_pages=piece_pages,
            arrived=self._arrived,
            state_bytes=self._state_bytes,
        )
        self._transfers[transfer] = {wanted.name: wanted}
        self.counts.num_loads += 1
        return transfer

    def _has_room_for(self, num_pages: int) -> bool:
        """Return whether `num_pages` more pages of a recurrent model can wait for a state."""
        staged = sum(transfer.room_bytes for transfer in self._transfers)
        return staged + num_pages * self._page_bytes <= STAGED_STATE_BYTES

    def _measure(self, read: Read) -> None:
        self._rates.observe_read(num_bytes=read.num_bytes, seconds=read.seconds)

    def _arrived(self, transfer: Transfer, first: int, read: Read) -> None:
        """Process a batch that was read, and end the transfer if the rest is no longer worthwhile."""
        self._measure(read)
        if transfer.is_over:
            return
        before = transfer.arrived
        try:
            transfer.take(first, read)
        except Exception:
            _LOGGER.exception("pages from disk could not be inserted")
            transfer.is_broken = True
        if transfer.direction == "front":
            self.counts.num_loaded_pages += transfer.arrived - before
        if transfer.is_broken:
            self._break(transfer)
        elif transfer.direction == "front":
            if transfer.arrived == transfer.stop:
                self._end(transfer)
                return
            if transfer.is_staged:
                return
            planned = self._plan(transfer.arrived, transfer.stop, 0, None)
            if planned.load is None:
                self.counts.num_loads_cut += 1
                self._end(transfer)
            elif transfer in self._unmeasured:
                self._unmeasured.remove(transfer)
                self._wait(transfer, planned.deadline_s)

    def _meet(self, transfer: Transfer) -> None:
        """Insert the pages of a transfer from the back, if the computing requests have reached them."""
        is_met = transfer.meet()
        if is_met:
            self.counts.num_loaded_pages += transfer.stop - transfer.there
            for wanted in self._transfers[transfer].values():
                assert wanted.match is not None, "it was looked for"
                stop = min(transfer.stop, len(wanted.match.pages))
                loaded = LoadedPrefix(transfer.there * PAGE_SIZE, stop * PAGE_SIZE, wanted.memory_by_kind)
                wanted.met(loaded, wanted.match)
        elif transfer.there == transfer.stop:  # all pages were computed before they were read
            self.counts.num_loads_cut += 1
        elif transfer.is_broken:
            self.counts.num_loads_broken += 1
        else:
            return
        self._end(transfer)

    def _wait(self, transfer: Transfer, seconds: float) -> None:
        """Set the deadline of a transfer that requests wait for."""
        deadline = self._deadlines[transfer] = self._clock() + seconds
        self._queue.at(deadline, partial(self._end_late, transfer, deadline))

    def _end_late(self, transfer: Transfer, deadline: float) -> None:
        """End a transfer whose deadline has passed, unless a later one was set."""
        if self._deadlines.get(transfer) == deadline:
            self.counts.num_loads_late += 1
            self._end(transfer)

    def _break(self, transfer: Transfer) -> None:
        """End a transfer after an invalid page, or a page that could not be inserted."""
        self.counts.num_loads_broken += 1
        if transfer.has_lost_state:
            self._index.remove_states([transfer.prefix.page_keys[-1].key])
        if transfer.lost_key is not None:
            self._lost([transfer.lost_key])
        self._end(transfer)

    def _end(self, transfer: Transfer, run: Callable[[Callable[[], None]], None] = lambda work: work()) -> None:
        """End a transfer, and `run` closures that let waiting requests continue."""
        transfer.end()
        users = self._transfers.pop(transfer)
        self._deadlines.pop(transfer, None)
        self._unmeasured.discard(transfer)
        self._ended()
        if transfer.direction == "back":
            return
        for wanted in users.values():
            stop = max(transfer.arrived, wanted.num_in_memory) * PAGE_SIZE
            start = max(wanted.num_in_memory, transfer.start) * PAGE_SIZE
            start = start if wanted.loaded is None else min(start, wanted.loaded.start)
            wanted.loaded = LoadedPrefix(start, max(stop, start), wanted.memory_by_kind)
            if transfer.arrived < transfer.stop:
                wanted.num_tries = MAX_TRIES  # the request waited for nothing
            run(partial(self._continue, wanted))

    def _continue(self, wanted: PrefixLookup) -> None:
        """Load more for a request that waited, if the disk has more by now; otherwise let it continue."""
        wanted.num_tokens_ahead = None
        if wanted.is_abandoned or (wanted.num_tries < MAX_TRIES and self.begin_again(wanted)):
            return
        self._ready(wanted)
