"""The second tier of the cache: what memory has no room for, and what the process before this one computed, on disk.

Puts together what finds, loads and saves pages. Exact: what it finds is the page of these very tokens, or a miss.
Knows prompts and pages, not requests. The engine's thread owns it; two threads of its own read and write.
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
from ..memory import Forgotten, Memory
from ..model.batch import PageIO, StateIO
from ..store.page_key import NO_PARENT, PageKey
from ..store.record import BLOCK, padded
from ..store.store_state import PutResult
from .beside_saver import BesideSaver, StateSaver, keep_alias, load_aliases
from .disk_index import DiskIndex
from .disk_reader import DiskReader, EngineThread
from .disk_writer import DiskWriter, remaining_s
from .loaded_prefix import LoadedRows, Wanted
from .page_saver import PageSaver
from .prefix_loader import PrefixLoader
from .rates import Rates
from .tier_hooks import Observer, TierExtra, TierStats

if TYPE_CHECKING:
    from ..store import PageStore

_LOGGER = logging.getLogger(__name__)

QUEUE_BYTES = 128 << 20  # of pages that wait to be written
CLOSE_S = 10.0  # to write what waits, at the end


class DiskTier(Memory):
    """A store below a cache. `begin` says whether a request waits for the disk; closures in `queue` do the rest.

    Args:
        clock: seconds; the cache's own.
        states: of a recurrent model: they are stored, too, and what is loaded ends with one.
        make_extra: makes what offers requests other rows than the pages of their prefixes, and observes prompts.

    Attributes:
        store, cache, index, writer, reader, queue, loader, saver: what the tier works with.
        rates: of disk and model.
        extra: what `make_extra` made.
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
        self.index.cache.aliases = cache.aliases  # what a reply is rendered as does not depend on where it lies
        self.index.add(store.heads())
        for key in () if states is None else store.pages_with_state():
            self.index.add_state(key)
        self.writer = DiskWriter(store, queue, max_bytes=max(queue_bytes, page_bytes), wrote=self._wrote)
        self.reader = DiskReader(store, page_bytes, queue)
        aliases, calls = BesideSaver(self.writer), BesideSaver(self.writer)
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
        self._waiting: dict[str, Wanted] = {}  # by name
        self._is_closed = False
        cache.tree.eviction.leaving = self.saver.save_leaving
        self.loader.probe()

    def begin(self, wanted: Wanted) -> bool:
        """Load what the disk has of a prompt and memory has not, where that is quicker than computing it. Returns
        whether the request waits until `wanted.go_on` is called.
        """
        waits = self.extra is not None and self.extra.offers.begin(wanted)
        if not waits and not self.loader.begin(wanted):
            return False
        self._waiting[wanted.name] = wanted
        return True

    def abandon(self, name: str) -> None:
        """Load nothing for a request any more that has ended."""
        self.loader.abandon(name)
        if (wanted := self._waiting.pop(name, None)) is not None:
            wanted.is_abandoned = True
            if self.extra is not None:
                self.extra.offers.abandon(name)

    def computed(self, sequence: Sequence, *, num_reused: int) -> None:
        """Save the prompt of a sequence, which is computed, and have noted what it used: the first `num_reused` tokens,
        or offered rows.
        """
        self._note(lambda observer: observer.computed(sequence, num_reused=num_reused))
        self.save_computed(sequence)

    def save_computed(self, sequence: Sequence) -> None:
        """Save what is computed of a sequence between the next steps."""
        if sequence.namespace is not None:
            self.saver.save(sequence.namespace, sequence.token_ids[: sequence.num_computed])

    def read_ahead(self) -> None:
        """Read something for later requests, if the disk has nothing to read."""
        if self.extra is not None:
            self.extra.offers.read_ahead()

    def distrust(self, namespace: bytes, token_ids: collections.abc.Sequence[int]) -> None:
        """Take what was computed of these tokens off the disk, with all that goes on from it: it may be wrong."""
        self.saver.forget()
        self._end_loads()
        keys, parent_key = [], NO_PARENT
        for at in range(0, len(token_ids) - PAGE_SIZE + 1, PAGE_SIZE):
            page = PageKey.of(
                self.store.identity, namespace, parent_key, token_ids[at : at + PAGE_SIZE], bytes(PAGE_SIZE)
            )
            keys.append(parent_key := page.key)
        self._forget(keys)

    def forget(self, namespace: bytes) -> Forgotten:
        """Take a namespace off the disk; what is pending is done when its bytes are gone."""
        self.saver.forget(namespace)
        self._end_loads(namespace)
        keys = self.index.clear(namespace)
        return Forgotten(num_discarded_pages=len(keys), pending=(self.writer.discard(namespace),))

    def drop_unused(self, since: float) -> None:
        """Take off the disk what was not used since then, on the cache's clock; not before this process began."""
        keys = self.index.drop_unused(since)
        if keys:
            self.writer.drop(keys)

    def start_over(self) -> None:
        """Forget what waits to be saved. Requests that wait go on. What is on disk stays, and the cache, which has
        started over, knows again how replies are rendered.
        """
        self.saver.forget()
        self._end_loads()
        load_aliases(self.cache.aliases, self.store)

    def go_on(self, wanted: Wanted, rows: LoadedRows | None = None) -> None:
        """Let a request go on that waited, with offered rows or what was loaded."""
        if self._waiting.pop(wanted.name, None) is wanted:
            wanted.go_on(wanted.loaded, rows)

    def load_pages(self, wanted: Wanted) -> None:
        """Load pages for a request that waited for offered rows, or let it go on."""
        if self._waiting.get(wanted.name) is wanted and not self.loader.begin_again(wanted):
            self.go_on(wanted)

    def load_ended(self) -> None:
        """A transfer has ended: the disk may have nothing to read."""
        if self.extra is not None:
            self.queue.post(self.read_ahead)

    def stats(self) -> TierStats:
        """Counts as of now, from any thread."""
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
        """Write what waits, for so long, and close the store. A disk that hangs is not waited for. May be called
        twice.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self.cache.tree.eviction.leaving = None
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
        """Have the extra told of something."""
        if self.extra is None:
            return
        try:
            tell(self.extra.observer)
        except Exception:  # it is no more than a hint
            _LOGGER.exception("what a prompt looked at could not be noted")
        self.saver.go_on()

    def _wrote(self, heads: tuple[PageKey, ...], result: PutResult) -> None:
        """The writer has changed the store."""
        stored = frozenset(result.stored)
        self.index.remove(result.evicted)
        self.index.remove_states(result.lost_states)
        self.index.add(head for head in heads if head.key in stored)
        self.saver.settle(heads)

    def _end_loads(self, namespace: bytes | None = None) -> None:
        """All, or a namespace's; requests that wait go on before the next step."""
        self.loader.end(namespace)
        if self.extra is not None:
            self.extra.offers.end(namespace)

    def _forget(self, keys: list[bytes]) -> None:
        """Take pages out of the index and the store, and what cannot be found without them."""
        self.writer.drop([*keys, *self.index.remove(keys)])
