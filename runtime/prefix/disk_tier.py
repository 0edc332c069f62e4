"""The second tier of the cache: what memory has no room for, and what the process before this one computed, on disk.

Puts together what finds, loads and saves pages. Exact: what it finds is the page of these very tokens, or a miss.
Knows prompts and pages, not requests. The engine's thread owns it; two threads of its own read and write.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from ..artifact.manifest import PAGE_SIZE
from ..cache.prefix_cache import PrefixCache
from ..cache.radix_node import Node
from ..model.batch import PageIO
from ..store.page_key import NO_PARENT, PageKey
from ..store.record import BLOCK, padded
from .chosen_rows import ChosenRows
from .disk_index import DiskIndex
from .disk_reader import DiskReader
from .disk_writer import DiskWriter, remaining_s
from .end_loader import EndLoader
from .load_counts import LoadCounts
from .loaded_prefix import LoadedPrefix
from .loaded_rows import LoadedRows
from .page_inserter import PageInserter
from .page_loader import FindPrefix, PageLoader
from .page_saver import PageSaver
from .rates import Rates
from .tier_stats import TierStats

if TYPE_CHECKING:
    from ..store import PageStore

_LOGGER = logging.getLogger(__name__)

QUEUE_BYTES = 128 << 20  # of pages that wait to be written
CLOSE_S = 10.0  # to write what waits, at the end


class DiskTier:
    """A store below a cache. `begin` says whether a request waits for the disk, `advance` who may go on.

    Args:
        clock: seconds; the cache's own.
        choose_rows: makes what learns which rows matter, stores them in that order, and loads a share of them.

    Attributes:
        store, cache, index, writer, reader: what the tier works with.
        rates: told how long steps take.
        ends: loads the end of a prefix for who does not wait: he computes its beginning.
        wake: called in any thread when `advance` has something to do.
    """

    def __init__(
        self,
        store: PageStore,
        cache: PrefixCache,
        io: PageIO,
        *,
        clock: Callable[[], float],
        queue_bytes: int = QUEUE_BYTES,
        choose_rows: Callable[[DiskTier], ChosenRows] | None = None,
    ) -> None:
        self.rates = Rates()
        self.wake: Callable[[], None] = lambda: None
        self.store, self.cache = store, cache
        page_bytes = store.identity.page_bytes
        self.index = DiskIndex(store.stats().max_bytes // (BLOCK + padded(page_bytes)) + 1, clock=clock)
        self.index.cache.aliases = cache.aliases  # what a reply is rendered as does not depend on where it lies
        self.index.add(store.heads())
        self.writer = DiskWriter(store, max_bytes=max(queue_bytes, page_bytes), notify=self._notify)
        self.reader = DiskReader(store, page_bytes, notify=self._notify)
        self._saver = PageSaver(cache, self.index, self.writer, io, store.identity, store.touch)
        inserter, counts = PageInserter(cache, io), LoadCounts()
        self.ends = EndLoader(inserter, self.reader, self.rates, counts, page_bytes=page_bytes, lost=self._forget)
        self._loader = PageLoader(
            inserter,
            self.index,
            self.reader,
            self.ends,
            self.rates,
            counts,
            page_bytes=page_bytes,
            clock=clock,
            lost=self._forget,
        )
        self.chosen = None if choose_rows is None else choose_rows(self)
        self._parts = None if self.chosen is None else self.chosen.parts
        self._num_waiting = 0
        self._is_closed = False
        cache.tree.leaving = self._save_leaving
        self._loader.probe()

    @property
    def is_ready(self) -> bool:
        """Whether `advance` would get on with something now."""
        loaders = (self._loader, self._parts)
        is_read = any(loader.is_ready for loader in loaders if loader is not None)
        return bool(self.writer.results or self.ends.names) or self._saver.is_ready or self._rewrites or is_read

    @property
    def wait_s(self) -> float | None:
        """Seconds until a load is late; None: there is none."""
        waits = [loader.wait_s for loader in (self._loader, self._parts) if loader is not None]
        return min((wait_s for wait_s in waits if wait_s is not None), default=None)

    @property
    def learns(self) -> bool:
        """Whether `used` is of any use: there is importance."""
        return self.chosen is not None

    def begin(
        self, name: str, find: FindPrefix, *, num_tokens_ahead: int | None = None, kv_budget: float = 1.0
    ) -> bool:
        """Load what the disk has of a prompt and memory has not, where that is quicker than computing it; whether to
        wait until `advance` names it.

        Args:
            num_tokens_ahead: as many are computed before a request that does not wait; None: nobody knows, and it is
                not to be computed and loaded at once.
            kv_budget: the share of its keys and values that is enough.
        """
        parts = self._parts if kv_budget < 1 else None
        waits = parts is not None and parts.begin(name, find, kv_budget, num_tokens_ahead=num_tokens_ahead)
        if not waits and not self._loader.begin(name, find, num_tokens_ahead=num_tokens_ahead):
            return False
        self._num_waiting += 1
        return True

    def abandon(self, name: str) -> None:
        """Nobody waits under this name any more."""
        self._loader.abandon(name)
        if self._parts is not None:
            self._parts.abandon(name)
        self._num_waiting -= 1

    def advance(self) -> list[str]:
        """Take in what was read and written, save a little more; the names of who may go on."""
        while self.writer.results:
            written = self.writer.results.popleft()
            self._saver.settle(written)
            if written.result is not None:
                stored = frozenset(written.result.stored)
                self.index.remove(written.result.evicted)
                self.index.add(head for head in written.heads if head.key in stored)
        names = self._loader.advance()
        if self._parts is not None:
            ready, back = self._parts.advance()
            names += ready
            for name, (find, num_tokens_ahead) in back.items():
                if not self._begins_in_full(name, find, num_tokens_ahead):
                    names.append(name)
        self._num_waiting -= len(names)
        try:
            self._saver.advance()
            if self.chosen is not None and self._rewrites:
                self.chosen.advance()
        except Exception:  # who was let go must learn of it; what is not saved is computed again
            _LOGGER.exception("what was computed could not be saved")
            self._forget_unsaved()
        return names

    def loaded(self, name: str) -> LoadedPrefix | None:
        """What came from disk for who was named; asked once."""
        return self._loader.loaded(name)

    def rows(self, name: str) -> LoadedRows | None:
        """The rows that came from disk for the request that was named; asked once."""
        return None if self._parts is None else self._parts.loaded(name)

    def save(self, namespace: bytes, token_ids: Sequence[int], generated: bytes) -> None:
        """Keep the full pages of these tokens, which are in the tree, on disk too; when there is time."""
        self._saver.save(namespace, token_ids, generated)

    def used(self, namespace: bytes, token_ids: Sequence[int], *, num_reused: int) -> None:
        """The prompt `token_ids` is computed, of which the first `num_reused` were found: what it found is stored in a
        better order when there is time.
        """
        try:
            if self.chosen is not None:
                self.chosen.used(namespace, token_ids, num_reused=num_reused)
        except Exception:  # it is no more than a hint
            _LOGGER.exception("what a prompt looked at could not be noted")

    def distrust(self, namespace: bytes, token_ids: Sequence[int]) -> None:
        """Take what was computed of these tokens off the disk, with all that goes on from it: it may be wrong."""
        self._forget_unsaved()
        self._end_loads()
        keys, parent_key = [], NO_PARENT
        for start in range(0, len(token_ids) - PAGE_SIZE + 1, PAGE_SIZE):
            page = token_ids[start : start + PAGE_SIZE]
            parent_key = PageKey.of(self.store.identity, namespace, parent_key, page, bytes(PAGE_SIZE)).key
            keys.append(parent_key)
        self._forget(keys)

    def discard(self, namespace: bytes) -> tuple[int, Future[None]]:
        """Take a namespace off the disk: how many pages nobody finds from here on, and when their bytes are gone."""
        self._forget_unsaved(namespace)
        self._end_loads(namespace)
        keys = self.index.clear(namespace)
        return len(keys), self.writer.discard(namespace)

    def drop_unused(self, since: float) -> None:
        """Take off the disk what nobody used since then, on the cache's clock; not before this process began."""
        keys = self.index.drop_unused(since)
        if keys:
            self.writer.drop(keys)

    def give_up(self) -> list[str]:
        """After a mistake of ours: end all loads, save nothing more of what waits; who may go on."""
        self._forget_unsaved()
        self._end_loads()
        names = self._loader.advance()
        if self._parts is not None:
            ready, back = self._parts.advance()
            names += [*ready, *back]
        self._num_waiting -= len(names)
        return names

    def start_over(self) -> None:
        """Forget all who wait and what waits to be saved, in whatever state that is; what is on disk stays."""
        self._forget_unsaved()
        self._loader.start_over()
        if self._parts is not None:
            self._parts.start_over()
        self._num_waiting = 0

    def stats(self) -> TierStats:
        """Counts as of now, from any thread."""
        store, loads, saver = self.store.stats(), self._loader.counts, self._saver
        chosen, parts = self.chosen, None if self._parts is None else self._parts.counts
        return TierStats(
            off_because=store.off_because,
            num_pages=len(self.index),
            num_bytes=store.num_bytes,
            max_bytes=store.max_bytes,
            num_waiting=self._num_waiting,
            num_loads=loads.num_loads,
            num_loads_from_end=loads.num_from_end,
            num_loads_late=loads.num_late,
            num_loads_cut=loads.num_cut,
            num_loads_broken=loads.num_broken,
            num_loads_refused=loads.num_refused,
            num_loaded_pages=loads.num_pages,
            num_parts=0 if parts is None else parts.num_pruned,
            num_parts_refused=0 if parts is None else parts.num_refused,
            num_parts_disagreed=0 if parts is None else parts.num_disagreed,
            num_parts_broken=0 if parts is None else parts.num_broken,
            num_parts_late=0 if parts is None else parts.num_late,
            num_read_bytes=store.read_bytes + (0 if parts is None else parts.num_read_bytes),
            num_saved_pages=saver.num_saved_pages,
            num_dropped_pages=saver.num_dropped_pages,
            num_written_bytes=store.num_pages_written * self.store.identity.page_bytes,
            num_queued_bytes=self.writer.queued_bytes,
            num_evicted_pages=store.num_pages_evicted,
            num_rewritten_runs=0 if chosen is None else chosen.num_rewritten,
            num_dropped_rewrites=0 if chosen is None else chosen.num_dropped,
            disk_bytes_per_s=self.rates.disk_bytes_per_s,
            misses_by_kind={kind: count for kind, count in store.misses.items()},
        )

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Write what waits, for so long, and close the store. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        self.cache.tree.leaving = None
        deadline = time.monotonic() + timeout_s
        self.reader.close()
        if self._parts is not None:
            self._parts.close()
        try:
            while self._saver.has_pending and remaining_s(deadline):
                if not self._saver.is_ready:
                    time.sleep(0.01)  # for the writer to make room
                self._saver.advance()
        except Exception:
            _LOGGER.exception("what was computed last could not be saved")
        self.writer.close(remaining_s(deadline))
        self.store.close()

    def check(self) -> None:
        """Raise AssertionError unless the index agrees with itself."""
        self.index.check()

    def _begins_in_full(self, name: str, find: FindPrefix, num_tokens_ahead: int | None) -> bool:
        """Whether who did not get a part waits for all of it; who cannot be looked up goes on, and fails alone."""
        try:
            return self._loader.begin(name, find, num_tokens_ahead=num_tokens_ahead)
        except Exception:
            _LOGGER.exception("what %s waits for could not be looked up", name)
            return False

    @property
    def _rewrites(self) -> bool:
        """Whether a run is to be stored in a better order: nothing else is to be written."""
        return self.chosen is not None and not self._saver.has_pending and self.chosen.is_ready

    def _forget_unsaved(self, namespace: bytes | None = None) -> None:
        """Drop what waits to be written, of a namespace or all."""
        self._saver.forget(namespace)
        if self.chosen is not None:
            self.chosen.forget(namespace)

    def _end_loads(self, namespace: bytes | None = None) -> None:
        """All, or a namespace's; who waits goes on with the next `advance`."""
        self._loader.end(namespace)
        if self._parts is not None:
            self._parts.end(namespace)

    def _forget(self, keys: list[bytes]) -> None:
        """Take pages out of the index and the store, and what cannot be found without them."""
        self.writer.drop([*keys, *self.index.remove(keys)])

    def _save_leaving(self, node: Node, num_leaving: int) -> None:
        try:
            self._saver.save_leaving(node, num_leaving)
        except Exception:  # what is not saved is computed again
            _LOGGER.exception("pages that make room could not be saved")

    def _notify(self) -> None:
        self.wake()
