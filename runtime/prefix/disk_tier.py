"""The second tier of the cache: keeps on disk the pages that memory has no room for, also from earlier processes.

Connects the parts that find, load and save pages. Exact: a page that it finds belongs to exactly these tokens, or it is
a miss. Knows prompts and pages, not requests. The engine's thread owns it; two threads of its own read and write.
"""

from __future__ import annotations

import collections.abc
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ..artifact.manifest import PAGE_SIZE
from ..cache.prefix_cache import PrefixCache
from ..cache.sequence import Sequence
from ..memory import ForgetResult, Memory
from ..model.batch import PageIO, StateIO
from ..store.page_key import NO_PARENT, PageKey
from ..store.record import BLOCK, padded
from ..store.store_state import PutResult
from .disk_index import DiskIndex
from .disk_reader import DiskReader, EngineThread
from .disk_writer import DiskWriter, remaining_s
from .loaded_prefix import LoadedRows, PrefixLookup
from .page_saver import PageSaver
from .prefix_loader import PrefixLoader
from .rates import Rates
from .small_record_saver import SmallRecordSaver, StateSaver, keep_alias, load_aliases
from .tier_hooks import Observer, TierExtra, TierStats

if TYPE_CHECKING:
    from ..store import PageStore

_LOGGER = logging.getLogger(__name__)

QUEUE_BYTES = 128 << 20  # pages that wait to be written
CLOSE_S = 10.0  # at the end, to write the queued pages


class DiskTier(Memory):
    """A store below a cache. `begin` returns whether a request waits for the disk; closures in `queue` do the rest.

    Args:
        clock: seconds; the same clock as the cache's.
        states: recurrent models: states are stored, too, and each loaded prefix ends with one.
        make_extra: makes the extra of this tier, which offers requests other rows than whole pages, and observes
            prompts.

    Attributes:
        store, cache, index, writer, reader, queue, loader, saver: the parts of the tier.
        rates: measured speed of disk and model.
        extra: the result of `make_extra`.
    """

    def __init__(
        self,
        store: PageStore,
        cache: PrefixCache,
        io: PageIO,
        queue: EngineThread,
        *,
        clock: Callable[[], float],
        queue_bytes: int = QUEUE_BYTES,
        make_extra: Callable[[DiskTier], TierExtra] | None = None,
        states: StateIO | None = None,
    ) -> None:
        self.store, self.cache, self.queue, self.rates = store, cache, queue, Rates()
        page_bytes = store.identity.page_bytes
        max_bytes = store.stats().max_bytes
        num_states = None if states is None else max_bytes // (2 * (BLOCK + padded(states.state_bytes)))
        self.index = DiskIndex(max_bytes // (BLOCK + padded(page_bytes)) + 1, num_states=num_states, clock=clock)
        self.index.cache.aliases = cache.aliases  # re-rendered replies are the same in memory and on disk
        self.index.add(store.page_keys())
        for key in () if states is None else store.pages_with_state():
            self.index.add_state(key)
        self.writer = DiskWriter(store, queue, max_bytes=max(queue_bytes, page_bytes), wrote=self._wrote)
        self.reader = DiskReader(store, page_bytes, queue)
        aliases, calls = SmallRecordSaver(self.writer), SmallRecordSaver(self.writer)
        load_aliases(cache.aliases, store)
        cache.aliases.recorded = partial(keep_alias, aliases)
        self.loader = PrefixLoader(
            *(cache, io, self.index, self.reader, self.rates, queue),
            clock=clock,
            ready=self.go_on,
            ended=self.load_ended,
            lost=self._forget,
            states=states,
        )
        self.saver = PageSaver(cache, self.index, self.writer, io, store.identity, store.touch, aliases, calls, queue)
        if states is not None:
            self.saver.states = StateSaver(cache, states, self.index, self.writer, store.identity, queue)
        self.extra = None if make_extra is None else make_extra(self)
        if self.extra is not None:
            self.saver.observer = self.extra.observer
        self._waiting: dict[str, PrefixLookup] = {}  # by name
        self._is_closed = False
        cache.tree.eviction.before_evict = self.saver.save_leaving
        if (windows := cache.pool.windows) is not None:
            windows.before_drop = self.saver.save_rows_leaving
        self.loader.probe()

    def begin(self, wanted: PrefixLookup) -> bool:
        """Load the part of a prompt that the disk has and memory has not, if that is faster than computing it.

        Returns:
            Whether the request waits until `wanted.go_on` is called.
        """
        waits = self.extra is not None and self.extra.offers.begin(wanted)
        if not waits and not self.loader.begin(wanted):
            return False
        self._waiting[wanted.name] = wanted
        return True

    def abandon(self, name: str) -> None:
        """Stop loading for a request that has ended."""
        self.loader.abandon(name)
        if (wanted := self._waiting.pop(name, None)) is not None:
            wanted.is_abandoned = True
            if self.extra is not None:
                self.extra.offers.abandon(name)

    def computed(self, sequence: Sequence, *, num_reused: int) -> None:
        """Save the computed prompt of a sequence, and report its use of the first `num_reused` tokens or of offered
        rows.
        """
        self._note(lambda observer: observer.computed(sequence, num_reused=num_reused))
        self.save_computed(sequence)

    def save_computed(self, sequence: Sequence) -> None:
        """Save the computed tokens of a sequence between the next steps."""
        if sequence.namespace is not None:
            self.saver.save(sequence.namespace, sequence.token_ids[: sequence.num_computed])

    def read_ahead(self) -> None:
        """Read data for later requests, if the disk is idle."""
        if self.extra is not None:
            self.extra.offers.read_ahead()

    def distrust(self, namespace: bytes, token_ids: collections.abc.Sequence[int]) -> None:
        """Remove the pages of these tokens from disk, with all that continue them, because they can be wrong."""
        self.saver.forget()
        self._end_loads()
        keys, parent_key = [], NO_PARENT
        for at in range(0, len(token_ids) - PAGE_SIZE + 1, PAGE_SIZE):
            page = PageKey.of(
                self.store.identity, namespace, parent_key, token_ids[at : at + PAGE_SIZE], bytes(PAGE_SIZE)
            )
            keys.append(parent_key := page.key)
        self._forget(keys)

    def forget(self, namespace: bytes) -> ForgetResult:
        """Remove a namespace from disk, with all LoRA adapters within it, also those that are not loaded now.

        The pending future is done when its bytes are gone.
        """
        num_discarded = 0
        for part in self.index.parts(namespace):
            self.saver.forget(part)
            self._end_loads(part)
            num_discarded += len(self.index.clear(part))
        return ForgetResult(num_discarded_pages=num_discarded, pending=(self.writer.discard(namespace),))

    def drop_unused(self, since: float) -> None:
        """Remove pages from disk that were last used before `since`, on the cache's clock.

        Uses before this process began are not known: its start counts as one.
        """
        keys = self.index.drop_unused(since)
        if keys:
            self.writer.drop(keys)

    def start_over(self) -> None:
        """Drop what waits to be saved, and let waiting requests continue.

        Pages on disk stay. The aliases of the cache, which has started over, are loaded again.
        """
        self.saver.forget()
        self._end_loads()
        load_aliases(self.cache.aliases, self.store)

    def go_on(self, wanted: PrefixLookup, rows: LoadedRows | None = None) -> None:
        """Let a waiting request continue, with offered rows or with loaded pages."""
        if self._waiting.pop(wanted.name, None) is wanted:
            wanted.go_on(wanted.loaded, rows)

    def load_pages(self, wanted: PrefixLookup) -> None:
        """Load pages for a request that waited for offered rows, or let it continue."""
        if self._waiting.get(wanted.name) is wanted and not self.loader.begin_again(wanted):
            self.go_on(wanted)

    def load_ended(self) -> None:
        """Read ahead after a transfer has ended, because the disk can be idle."""
        if self.extra is not None:
            self.queue.post(self.read_ahead)

    def stats(self) -> TierStats:
        """Return current counts, from any thread."""
        store, saver, extra = self.store.stats(), self.saver, self.extra
        return TierStats(
            off_because=store.off_because,
            num_pages=len(self.index),
            num_bytes=store.num_bytes,
            max_bytes=store.max_bytes,
            num_waiting=len(self._waiting),
            **vars(self.loader.counts),
            num_read_bytes=store.read_bytes + (0 if extra is None else extra.num_read_bytes),
            num_saved_pages=saver.num_saved_pages,
            num_dropped_pages=saver.num_dropped_pages,
            num_written_bytes=store.num_pages_written * self.store.identity.page_bytes,
            num_queued_bytes=self.writer.queued_bytes,
            num_evicted_pages=store.num_pages_evicted,
            disk_bytes_per_s=self.rates.disk_bytes_per_s,
            num_states=self.index.num_states,
            num_saved_states=0 if saver.states is None else saver.states.num_saved,
            num_dropped_states=0 if saver.states is None else saver.states.num_dropped,
            misses_by_kind=store.misses,
            extra=None if extra is None else extra.stats(),
        )

    def shut_down(self, timeout_s: float = CLOSE_S) -> None:
        """Write what is queued, for at most `timeout_s` seconds, and close the store.

        A disk that hangs is not waited for. Can be called twice.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self.cache.tree.eviction.before_evict = None
        if (windows := self.cache.pool.windows) is not None:
            windows.before_drop = None
        deadline = time.monotonic() + timeout_s
        has_read = self.reader.close()
        if has_read and self.extra is not None:
            self.extra.offers.close()
        self.saver.close(deadline)
        has_written = self.writer.close(remaining_s(deadline))
        if has_read and has_written:
            self.store.close()
        else:
            self.store.abandon()
            _LOGGER.error(
                "the store in %s does not answer; it stays in use until this process ends", self.store.directory
            )

    def check(self) -> None:
        """Raise AssertionError unless the index agrees with itself."""
        self.index.check()

    def _note(self, tell: Callable[[Observer], None]) -> None:
        """Report something to the extra."""
        if self.extra is None:
            return
        try:
            tell(self.extra.observer)
        except Exception:  # an observation is only a hint
            _LOGGER.exception("what a prompt looked at could not be noted")
        self.saver.go_on()

    def _wrote(self, page_keys: tuple[PageKey, ...], result: PutResult) -> None:
        """Update the index after the writer has changed the store."""
        stored = frozenset(result.stored)
        self.index.remove(result.evicted)
        self.index.remove_states(result.lost_states)
        self.index.add(page for page in page_keys if page.key in stored)
        self.saver.settle(page_keys)

    def _end_loads(self, namespace: bytes | None = None) -> None:
        """End all loads, or a namespace's; waiting requests continue before the next step."""
        self.loader.end(namespace)
        if self.extra is not None:
            self.extra.offers.end(namespace)

    def _forget(self, keys: list[bytes]) -> None:
        """Remove pages from index and store, with those that cannot be found without them."""
        self.writer.drop([*keys, *self.index.remove(keys)])
