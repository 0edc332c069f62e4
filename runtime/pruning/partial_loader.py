"""Bring the part of a stored prefix that matters most from disk, for requests that said how much is enough.

Knows waiters by name, not requests. Two reads, and a look between them: the tokens that most queries looked at, then
those that the prompt's own end looks for. Whatever is missing, wrong, late, or not clearly quicker sends a waiter back
to be served exactly, as if it had not asked. Each waiter has rows of its own: they are tainted and shared with nobody.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from ..artifact.manifest import PAGE_SIZE
from ..cache.prefix_cache import PrefixCache
from ..errors import OutOfPages, SparseSpanError
from ..prefix.disk_index import DiskIndex
from ..prefix.disk_reader import DiskReader
from ..prefix.loaded_rows import LoadedRows
from ..prefix.page_loader import FindPrefix
from ..prefix.prefix_plan import plan_chosen
from ..prefix.rates import Rates
from ..store.chunk_cache import ChunkCache
from .key_lessons import KeyLessons
from .partial_prefix import PartialPrefix
from .partial_waiter import PartialWaiter, Stage
from .query_look import QueryLook
from .run_cache import RunCache

if TYPE_CHECKING:
    from ..store import PageStore

_LOGGER = logging.getLogger(__name__)

# of keys and values that are wanted again and again: a quarter of 11,000 tokens of SmolLM2
CHUNK_CACHE_BYTES = 64 << 20
MAX_STAGED_BYTES = 256 << 20  # of rows that waiters have, or will; who comes then is served exactly
MAX_WAITERS = 16  # that have files open, or will: of each run of a prefix one
_SLACK_S = 0.05


@dataclass
class PartialCounts:
    """What became of those who asked for a part, since the start; all but the first were served exactly."""

    num_pruned: int = 0  # began with a part
    num_refused: int = 0  # it was not clearly quicker, or its prompt is not made for it
    num_disagreed: int = 0  # the look went too much to what the part has not
    num_broken: int = 0  # no run of some pages, or one that was not right, or no room
    num_late: int = 0
    num_read_bytes: int = 0  # asked of the disk for all of them


class PartialLoader:
    """`begin` for whoever would gain by a part; `advance` says who may go on, and who is to be served exactly.

    Attributes:
        plan: decides whether chosen rows are worth it.
    """

    plan = staticmethod(plan_chosen)

    def __init__(
        self,
        cache: PrefixCache,
        index: DiskIndex,
        store: PageStore,
        reader: DiskReader,
        rates: Rates,
        look: QueryLook,
        *,
        page_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self._cache, self._index, self._store, self._reader = cache, index, store, reader
        self._rates, self._look, self._page_bytes, self._clock = rates, look, page_bytes, clock
        self._known = RunCache(chunks=ChunkCache(CHUNK_CACHE_BYTES))
        self._waiters: dict[str, PartialWaiter] = {}
        self._ended: list[PartialWaiter] = []  # whose file the reader may have in use
        self._lessons = KeyLessons(reader, self._close, self._known.discard)
        self._back: dict[str, tuple[FindPrefix, int | None]] = {}
        self._loaded: dict[str, LoadedRows] = {}
        # whoever has them by now: who was let go may wait for his turn with them
        self._staged: WeakValueDictionary[str, LoadedRows] = WeakValueDictionary()
        self.counts = PartialCounts()

    @property
    def is_ready(self) -> bool:
        """Whether `advance` would do anything now."""
        is_done = any(waiter.work.is_done for waiter in [*self._waiters.values(), *self._ended])
        return bool(self._back) or is_done or self._has_lesson or self.wait_s == 0.0

    @property
    def wait_s(self) -> float | None:
        """Seconds until somebody waits too long; None: nobody waits."""
        if not self._waiters:
            return None
        return max(0.0, min(waiter.deadline for waiter in self._waiters.values()) - self._clock())

    def begin(self, name: str, find: FindPrefix, budget: float, *, num_tokens_ahead: int | None = None) -> bool:
        """Load `budget` of what the disk has and memory has not, if that may be worth it; whether to wait for it.

        Args:
            num_tokens_ahead: handed back to who is sent back.
        """
        memory, match = find(self._cache), find(self._index.cache)
        stop = len(match.pages)
        if stop * PAGE_SIZE <= memory.num_tokens:
            return False
        start = len(self._cache.tree.find(match.namespace, match.prompt_ids[: stop * PAGE_SIZE]).pages)
        num_query = len(match.prompt_ids) - stop * PAGE_SIZE
        num_bytes = int(budget * (stop - start) * self._page_bytes)
        staged = sum(waiter.num_bytes for waiter in self._waiters.values())
        staged += sum(load.pages.nbytes for load in self._staged.values())
        has_room = staged + num_bytes <= MAX_STAGED_BYTES and len(self._waiters) + len(self._ended) < MAX_WAITERS
        compute_s = self._rates.compute_s(start * PAGE_SIZE, stop * PAGE_SIZE)
        if num_query > self._look.max_num_tokens or not has_room or compute_s is None:
            self.counts.num_refused += 1
            return False
        assert match.namespace is not None, "it has pages"
        prefix = self._index.prefix(match.namespace, match.prompt_ids, stop)
        deadline = self._clock() + compute_s + _SLACK_S
        waiter = PartialWaiter(name, find, num_tokens_ahead, match, prefix, start, start, budget, num_bytes, deadline)
        waiter.work = self._reader.submit_work(lambda: waiter.open(self._store, self._known))
        self._waiters[name] = waiter
        return True

    def advance(self) -> tuple[list[str], dict[str, tuple[FindPrefix, int | None]]]:
        """Look for those whose first rows came; the names of who has a part, and of who is to be served exactly, with
        what `begin` was told."""
        self._close_ended()
        if self._has_lesson:
            self._lessons.advance()
        ready, has_looked = [], False
        for name, waiter in [(name, waiter) for name, waiter in self._waiters.items() if waiter.work.is_done]:
            if waiter.stage is Stage.READING:
                if has_looked or waiter.deadline <= self._clock():
                    continue  # one look between two steps: others wait for the next
                has_looked = True
            if self._go_on(waiter):
                ready.append(name)
        now = self._clock()
        for waiter in [waiter for waiter in self._waiters.values() if waiter.deadline <= now]:
            self.counts.num_late += 1
            if waiter.stage is not Stage.OPENING:  # so that the next is not planned as if it had come in time
                seconds = max(waiter.expected_s, waiter.deadline - waiter.planned_at)  # as long at least
                self._rates.observe_chosen(expected_s=waiter.expected_s, seconds=seconds)
            self._send_back(waiter)
        back, self._back = self._back, {}
        return ready, back

    def loaded(self, name: str) -> LoadedRows | None:
        """What came for who was said to have a part; asked once."""
        return self._loaded.pop(name, None)

    def abandon(self, name: str) -> None:
        """Nobody waits under this name any more."""
        self._loaded.pop(name, None)
        self._back.pop(name, None)
        if (waiter := self._waiters.get(name)) is not None:
            self._end(waiter)

    def end(self, namespace: bytes | None = None) -> None:
        """Send all waiters back, or a namespace's, and forget what is kept in memory of its runs."""
        for waiter in [*self._waiters.values(), *self._ended]:
            if namespace is None or waiter.prefix.namespace == namespace:
                waiter.is_forgotten = True  # what the reader is at may still be noted
        for waiter in [waiter for waiter in self._waiters.values() if waiter.is_forgotten]:
            self._send_back(waiter)
        self._lessons.end(namespace)
        if namespace is None:
            self._known.clear()
        else:
            self._known.discard(namespace)

    def start_over(self) -> None:
        """Forget all waiters; the files that the reader has in use are closed when it is done with them."""
        self.end()
        self._back.clear()
        self._loaded.clear()

    def close(self) -> None:
        """Close all files; the reader has ended."""
        for waiter in [*self._waiters.values(), *self._ended]:
            if waiter.partial is not None:
                self._close(waiter.partial)
        self._lessons.close_all()

    @property
    def _has_lesson(self) -> bool:
        """Whether one is over, or may begin: nobody waits."""
        return self._lessons.is_over or (not self._waiters and self._lessons.is_ready)

    def _go_on(self, waiter: PartialWaiter) -> bool:
        """Take what was read, and read on; whether there is no more to read."""
        try:
            if not waiter.work.is_right:
                agreed = waiter.choice is None or waiter.choice.is_enough
                self.counts.num_broken += agreed
                self.counts.num_disagreed += not agreed
            elif waiter.stage is Stage.CHOOSING:
                self._finish(waiter)
                return True
            elif waiter.stage is Stage.READING:
                self._choose(waiter)
                return False
            elif (expected_s := self._plan(waiter)) is not None:
                waiter.expected_s = expected_s
                waiter.stage = Stage.READING
                waiter.work = self._reader.submit_work(waiter.read, num_bytes=waiter.opened.bytes_to_read)
                return False
            else:
                self.counts.num_refused += 1
                self._learn_later(waiter)
        except (OutOfPages, SparseSpanError):
            self.counts.num_broken += 1
        except Exception:  # whoever waits must go on
            _LOGGER.exception("a part of what %s waits for could not be loaded", waiter.name)
            self.counts.num_broken += 1
        self._send_back(waiter)
        return False

    def _learn_later(self, waiter: PartialWaiter) -> None:
        """If a part would be worth it to who has the keys in memory: have them read when the disk has nothing to do.
        Else nobody ever had them, where the first who asks is better off without."""
        if not waiter.opened.bytes_to_learn or self._plan(waiter, is_learned=True) is None:
            return
        if self._lessons.add(waiter.opened, waiter.prefix.heads[waiter.stop - 1].key, waiter.prefix.namespace):
            waiter.partial = None

    def _plan(self, waiter: PartialWaiter, *, is_learned: bool = False) -> float | None:
        """Seconds that reading the part should take, or would if its keys were in memory; None: it is not worth it."""
        start, stop = waiter.num_in_memory, max(waiter.num_in_memory, waiter.stop)  # which doing all would bring
        if waiter.num_query_tokens > self._look.max_num_tokens:
            return None
        waiter.planned_at = self._clock()
        expected_s = self.plan(
            start * PAGE_SIZE,
            stop * PAGE_SIZE,
            self._rates,
            num_bytes=waiter.opened.bytes_to_read - (waiter.opened.bytes_to_learn if is_learned else 0),
            full_bytes=(stop - start) * self._page_bytes,
            num_query_tokens=waiter.num_query_tokens,
            queued_bytes=self._reader.queued_bytes,
        )
        if expected_s is None:
            self._rates.forget_chosen()
        return expected_s

    def _choose(self, waiter: PartialWaiter) -> None:
        """Look, and have the rest read."""
        queries = self._look.queries(waiter.load(self._look.runner), waiter.opened.probe_head)
        num_bytes = max(0, waiter.opened.bytes_to_read - waiter.opened.bytes_read)
        waiter.stage = Stage.CHOOSING
        waiter.work = self._reader.submit_work(lambda: waiter.choose(queries), num_bytes=num_bytes)

    def _finish(self, waiter: PartialWaiter) -> None:
        assert waiter.choice is not None
        load = waiter.load(self._look.runner, waiter.choice.dropped_mass)
        self._loaded[waiter.name] = self._staged[waiter.name] = load
        self._rates.observe_chosen(expected_s=waiter.expected_s, seconds=self._clock() - waiter.planned_at)
        self.counts.num_pruned += 1
        self._end(waiter)

    def _send_back(self, waiter: PartialWaiter) -> None:
        self._back[waiter.name] = waiter.find, waiter.num_tokens_ahead
        self._end(waiter)

    def _end(self, waiter: PartialWaiter) -> None:
        del self._waiters[waiter.name]
        waiter.work.is_cancelled = True
        self._ended.append(waiter)
        self._close_ended()

    def _close_ended(self) -> None:
        """Close the files that the reader has done with."""
        for waiter in [waiter for waiter in self._ended if waiter.work.is_done]:
            if waiter.partial is not None:
                self._close(waiter.partial)
            if waiter.is_forgotten:
                self._known.discard(waiter.prefix.namespace)
            self._ended.remove(waiter)

    def _close(self, partial: PartialPrefix) -> None:
        self.counts.num_read_bytes += partial.bytes_read
        partial.close()
