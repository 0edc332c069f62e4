"""Bring the part of a stored prefix that matters most from disk, for requests that said how much is enough.

Knows waiters by name, not requests. Two reads, and a look between them: the tokens that most queries looked at, then
those that the prompt's own end looks for. Whatever is missing, wrong, late, or not clearly quicker sends a waiter back
to be served exactly, as if it had not asked. Each waiter has rows of its own: they are tainted and shared with nobody.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from .batch import UInt8Array
from .disk_index import DiskIndex, StoredPrefix
from .disk_reader import DiskReader, ReadWork
from .errors import OutOfPages, PrunedPrefixError
from .load_planner import LoadPlanner
from .manifest import PAGE_SIZE
from .page_loader import FindPrefix
from .partial_prefix import Choice, PartialPrefix
from .prefix_cache import PrefixCache
from .prefix_match import PrefixMatch
from .pruned_load import PrunedLoad
from .pruned_prefix import PrunedPrefix
from .query_look import QueryLook
from .run_cache import RunCache
from .store.chunk_cache import ChunkCache

if TYPE_CHECKING:
    from .batch import Float32Array
    from .store import PageStore

_LOGGER = logging.getLogger(__name__)

CHUNK_CACHE_BYTES = (
    64 << 20
)  # of keys and values that are wanted again and again: a quarter of 11,000 tokens of SmolLM2
MAX_STAGED_BYTES = 256 << 20  # of rows that waiters have, or will; who comes then is served exactly
MAX_LESSONS = 8  # runs whose keys are to be read when nothing else is
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


class _Stage(Enum):
    OPENING = auto()
    READING = auto()  # what most queries looked at
    CHOOSING = auto()  # and reading what this one looks for


@dataclass(eq=False)
class _Waiter:
    name: str
    find: FindPrefix
    num_tokens_ahead: int | None
    match: PrefixMatch  # the disk's
    prefix: StoredPrefix
    num_in_memory: int  # pages
    start: int  # the page from which on rows are pruned
    budget: float
    num_bytes: int  # of rows when all is read, about
    deadline: float
    stage: _Stage = _Stage.OPENING
    partial: PartialPrefix | None = None
    pages: UInt8Array | None = None  # the rows that are there
    choice: Choice | None = None
    is_forgotten: bool = False  # with all that is kept of its namespace's runs
    planned_at: float = 0.0
    expected_s: float = 0.0
    work: ReadWork = field(init=False)

    @property
    def stop(self) -> int:
        """The page before which rows are pruned; the rest of the prompt is the query."""
        return len(self.prefix.heads) if self.partial is None else self.start + self.partial.num_tokens // PAGE_SIZE

    @property
    def num_query_tokens(self) -> int:
        return len(self.match.prompt_ids) - self.stop * PAGE_SIZE

    @property
    def opened(self) -> PartialPrefix:
        assert self.partial is not None, "nothing is open"
        return self.partial

    def load(self, dropped_mass: float = 0.0) -> PrunedLoad:
        """Of as many rows as are there."""
        assert self.pages is not None, "nothing was read"
        stop = self.stop * PAGE_SIZE
        token_ids, generated = self.prefix.token_ids[:stop], self.prefix.generated[:stop]
        pruned = PrunedPrefix(self.start * PAGE_SIZE, self.opened.num_there, token_ids, generated)
        return PrunedLoad(self.match, pruned, self.pages, dropped_mass)

    # In the reader's thread.

    def open(self, store: PageStore, known: RunCache) -> bool:
        """Begin where memory ends, or, where no run begins there, because memory has a part of one, at the start."""
        for start in dict.fromkeys((self.num_in_memory, 0)):
            heads, num_before = self.prefix.heads[start:], start * PAGE_SIZE
            self.start = start
            self.partial = PartialPrefix.open(store, heads, budget=self.budget, num_before=num_before, known=known)
            if self.partial is not None:
                return True
        return False

    def read(self) -> bool:
        if not self.opened.read_stored():
            return False
        self.pages = self.opened.rows()
        return True

    def choose(self, queries: Float32Array) -> bool:
        self.choice = self.opened.choose(queries)
        if not self.choice.is_enough or not self.opened.read_chosen():
            return False
        self.pages = self.opened.rows()
        return True


@dataclass(eq=False)
class _Lesson:
    """What is to be kept in memory of a prefix, for the next who asks."""

    partial: PartialPrefix
    namespace: bytes
    num_bytes: int
    is_forgotten: bool = False
    work: ReadWork | None = None


class PartialLoader:
    """`begin` for whoever would gain by a part; `advance` says who may go on, and who is to be served exactly."""

    def __init__(
        self,
        cache: PrefixCache,
        index: DiskIndex,
        store: PageStore,
        reader: DiskReader,
        planner: LoadPlanner,
        look: QueryLook,
        *,
        page_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self._cache, self._index, self._store, self._reader = cache, index, store, reader
        self._planner, self._look, self._page_bytes, self._clock = planner, look, page_bytes, clock
        self._known = RunCache(chunks=ChunkCache(CHUNK_CACHE_BYTES))
        self._waiters: dict[str, _Waiter] = {}
        self._ended: list[_Waiter] = []  # whose file the reader may have in use
        self._lessons: deque[_Lesson] = deque()  # the first may be under way
        self._back: dict[str, tuple[FindPrefix, int | None]] = {}
        self._loaded: dict[str, PrunedLoad] = {}
        # whoever has them by now: who was let go may wait for his turn with them
        self._staged: WeakValueDictionary[str, PrunedLoad] = WeakValueDictionary()
        self.counts = PartialCounts()

    @property
    def is_ready(self) -> bool:
        """Whether `advance` would do anything now."""
        is_done = any(waiter.work.is_done for waiter in [*self._waiters.values(), *self._ended])
        return bool(self._back) or is_done or self._can_learn or self.wait_s == 0.0

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
        compute_s = self._planner.compute_s(start * PAGE_SIZE, stop * PAGE_SIZE)
        if num_query > self._look.max_num_tokens or not has_room or compute_s is None:
            self.counts.num_refused += 1
            return False
        prefix = self._index.prefix(match.namespace, match.prompt_ids, stop)
        deadline = self._clock() + compute_s + _SLACK_S
        waiter = _Waiter(name, find, num_tokens_ahead, match, prefix, start, start, budget, num_bytes, deadline)
        waiter.work = self._reader.submit_work(lambda: waiter.open(self._store, self._known))
        self._waiters[name] = waiter
        return True

    def advance(self) -> tuple[list[str], dict[str, tuple[FindPrefix, int | None]]]:
        """Look for those whose first rows came; the names of who has a part, and of who is to be served exactly, with
        what `begin` was told."""
        self._close_ended()
        self._learn()
        ready, has_looked = [], False
        for name, waiter in [(name, waiter) for name, waiter in self._waiters.items() if waiter.work.is_done]:
            if waiter.stage is _Stage.READING:
                if has_looked or waiter.deadline <= self._clock():
                    continue  # one look between two steps: others wait for the next
                has_looked = True
            if self._go_on(waiter):
                ready.append(name)
        now = self._clock()
        for waiter in [waiter for waiter in self._waiters.values() if waiter.deadline <= now]:
            self.counts.num_late += 1
            if waiter.stage is not _Stage.OPENING:  # so that the next is not planned as if it had come in time
                seconds = max(waiter.expected_s, waiter.deadline - waiter.planned_at)  # as long at least
                self._planner.observe_partial(expected_s=waiter.expected_s, seconds=seconds)
            self._send_back(waiter)
        back, self._back = self._back, {}
        return ready, back

    def loaded(self, name: str) -> PrunedLoad | None:
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
                if waiter not in self._ended:
                    self._send_back(waiter)
        for lesson in self._lessons:
            lesson.is_forgotten |= namespace is None or lesson.namespace == namespace
        if namespace is None:
            self._known.clear()
        else:
            self._known.discard(namespace)

    def close(self) -> None:
        """Close all files; the reader has ended."""
        for waiter in [*self._waiters.values(), *self._ended]:
            if waiter.partial is not None:
                self._close(waiter.partial)
        for lesson in self._lessons:
            self._close(lesson.partial)

    def _go_on(self, waiter: _Waiter) -> bool:
        """Take what was read, and read on; whether there is no more to read."""
        try:
            if not waiter.work.is_right:
                agreed = waiter.choice is None or waiter.choice.is_enough
                self.counts.num_broken += agreed
                self.counts.num_disagreed += not agreed
            elif waiter.stage is _Stage.CHOOSING:
                self._finish(waiter)
                return True
            elif waiter.stage is _Stage.READING:
                self._choose(waiter)
                return False
            elif (expected_s := self._plan(waiter)) is not None:
                waiter.expected_s = expected_s
                waiter.stage = _Stage.READING
                waiter.work = self._reader.submit_work(waiter.read, num_bytes=waiter.opened.bytes_to_read)
                return False
            else:
                self.counts.num_refused += 1
                self._learn_later(waiter)
        except (OutOfPages, PrunedPrefixError):
            self.counts.num_broken += 1
        except Exception:  # whoever waits must go on
            _LOGGER.exception("a part of what %s waits for could not be loaded", waiter.name)
            self.counts.num_broken += 1
        self._send_back(waiter)
        return False

    def _learn_later(self, waiter: _Waiter) -> None:
        """If a part would be worth it to who has the keys in memory: have them read when the disk has nothing to do.
        Else nobody ever had them, where the first who asks is better off without."""
        num_bytes = waiter.opened.bytes_to_learn
        if num_bytes and len(self._lessons) < MAX_LESSONS and self._plan(waiter, is_learned=True) is not None:
            self._lessons.append(_Lesson(waiter.opened, waiter.prefix.namespace, num_bytes))
            waiter.partial = None

    @property
    def _can_learn(self) -> bool:
        """Whether `_learn` would do anything."""
        if not self._lessons:
            return False
        work = self._lessons[0].work
        if work is not None:
            return work.is_done
        return not self._waiters and self._reader.queued_bytes == 0

    def _learn(self) -> None:
        """End the lesson that is over, or begin one."""
        if not self._can_learn:
            return
        lesson = self._lessons[0]
        if lesson.work is None:
            lesson.work = self._reader.submit_work(lesson.partial.learn, num_bytes=lesson.num_bytes)
            return
        self._close(lesson.partial)
        if lesson.is_forgotten:
            self._known.discard(lesson.namespace)
        self._lessons.popleft()

    def _plan(self, waiter: _Waiter, *, is_learned: bool = False) -> float | None:
        """Seconds that reading the part should take, or would if its keys were in memory; None: it is not worth it."""
        start, stop = waiter.num_in_memory, max(waiter.num_in_memory, waiter.stop)  # which doing all would bring
        if waiter.num_query_tokens > self._look.max_num_tokens:
            return None
        waiter.planned_at = self._clock()
        return self._planner.plan_partial(
            start * PAGE_SIZE,
            stop * PAGE_SIZE,
            num_bytes=waiter.opened.bytes_to_read - (waiter.opened.bytes_to_learn if is_learned else 0),
            full_bytes=(stop - start) * self._page_bytes,
            num_query_tokens=waiter.num_query_tokens,
            queued_bytes=self._reader.queued_bytes,
        )

    def _choose(self, waiter: _Waiter) -> None:
        """Look, and have the rest read."""
        queries = self._look.queries(waiter.load(), waiter.opened.probe_head)
        num_bytes = max(0, waiter.opened.bytes_to_read - waiter.opened.bytes_read)
        waiter.stage = _Stage.CHOOSING
        waiter.work = self._reader.submit_work(lambda: waiter.choose(queries), num_bytes=num_bytes)

    def _finish(self, waiter: _Waiter) -> None:
        assert waiter.choice is not None
        load = waiter.load(waiter.choice.dropped_mass)
        self._loaded[waiter.name] = self._staged[waiter.name] = load
        self._planner.observe_partial(expected_s=waiter.expected_s, seconds=self._clock() - waiter.planned_at)
        self.counts.num_pruned += 1
        self._end(waiter)

    def _send_back(self, waiter: _Waiter) -> None:
        self._back[waiter.name] = waiter.find, waiter.num_tokens_ahead
        self._end(waiter)

    def _end(self, waiter: _Waiter) -> None:
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
