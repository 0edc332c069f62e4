"""Read a pruned prefix for one request, stage by stage: a `RowSource`.

Opens the runs, reads the rows that most queries attend to, probes with the prompt's own end, and reads the rows that
the probe picks. Knows one prompt and its prefix; neither what other requests wait for, nor when it is too late.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from ...artifact.manifest import PAGE_SIZE
from ...cache.sparse_span import SparseSpan
from ...model.batch import Float32Array, UInt8Array
from ...prefix.disk_reader import DiskReader
from ...prefix.loaded_prefix import LoadedRows
from ...prefix.rates import Rates
from .chosen_rows import Stage, TransferRefused, WantedRows
from .part_teacher import PartLook, PartTeacher
from .probe_forward import ProbeForward
from .probe_keys import ProbeKeyCache
from .promoter import Promoter
from .pruned_prefix import PrunedPrefix
from .records.chunk_cache import ChunkCacheStats
from .row_rates import RowRates, plan_chosen

if TYPE_CHECKING:
    from .records.row_records import RowRecords

MAX_PREFETCHES: Final = 8


class PrunedSources:
    """Makes the sources of a store; see `RowSources`.

    Args:
        known: what memory keeps of the store's runs.
        max_dropped_attention: above it a prompt is served with all rows.
        least_share: of the rows: with fewer most prompts are above that, and have read a part for nothing.
        idle: called when the disk may have nothing to read; calls `read_ahead` if so.
        teacher: learns from what is served.
        promoter: brings prefixes to memory that are often served in part.

    Attributes:
        plan: decides whether chosen rows are worth it.
        num_prefetches: prefixes whose probe keys are to be read ahead.
        generation: counts the calls of `forget`.
    """

    plan = staticmethod(plan_chosen)

    def __init__(
        self,
        records: RowRecords,
        reader: DiskReader,
        rates: Rates,
        probe: ProbeForward,
        known: ProbeKeyCache,
        *,
        page_bytes: int,
        max_dropped_attention: float,
        least_share: float,
        clock: Callable[[], float],
        idle: Callable[[], None],
        teacher: PartTeacher,
        promoter: Promoter,
    ) -> None:
        self.records, self.reader, self.probe, self.known = records, reader, probe, known
        self.rates = RowRates(rates)
        self.page_bytes, self.clock, self._idle = page_bytes, clock, idle
        self.max_dropped_attention, self.least_share = max_dropped_attention, least_share
        self.teacher, self.promoter = teacher, promoter
        self.num_read_bytes = self.generation = 0
        self._prefetches: dict[bytes, _Prefetch] = {}  # by the key of the prefix's last page
        self._is_prefetching = False  # the first of them

    @property
    def chunks(self) -> ChunkCacheStats | None:
        """What memory keeps of rows that are read often; None: nothing is kept."""
        return None if self.known.chunks is None else self.known.chunks.stats()

    @property
    def num_prefetches(self) -> int:
        """See above."""
        return len(self._prefetches)

    def source(self, wanted: WantedRows) -> PrunedSource | None:
        """What reads rows for a request; None: its prompt's end is too long for one probe."""
        num_query_tokens = len(wanted.match.prompt_ids) - len(wanted.prefix.page_keys) * PAGE_SIZE
        return None if num_query_tokens > self.probe.max_num_tokens else PrunedSource(wanted, self)

    def add_prefetch(self, key: bytes, prefix: PrunedPrefix, close: Callable[[], None]) -> bool:
        """Read the probe keys of a prefix later, and close it. Returns False if too many wait, or this prefix does."""
        if len(self._prefetches) >= MAX_PREFETCHES or key in self._prefetches:
            return False
        self._prefetches[key] = _Prefetch(prefix, close)
        return True

    def read_ahead(self) -> None:
        """Read the probe keys of a prefix whose first request was better off without pruning, because all keys would
        have had to be read first. Otherwise it would never be pruned. Or a prefix, whole, that is often pruned.
        """
        if not self._prefetches:
            self.promoter.advance()
        elif not self._is_prefetching:
            self._is_prefetching, (key, first) = True, next(iter(self._prefetches.items()))
            num_bytes = first.prefix.bytes_to_prefetch
            self.reader.run(first.prefix.prefetch, lambda _: self._end_prefetch(key), num_bytes=num_bytes)

    def forget(self, namespace: bytes | None = None) -> None:
        """Drop what memory keeps of the runs of a namespace, or of all."""
        self.generation += 1
        self.known.discard(namespace)
        self.teacher.forget(namespace)
        self.promoter.forget(namespace)

    def close_prefix(self, prefix: PrunedPrefix, namespace: bytes, generation: int) -> None:
        """Close a prefix that was opened in this generation, and that the reader has done with. If its namespace may
        have been forgotten since, what was read of it is forgotten, too.
        """
        self.num_read_bytes += prefix.bytes_read
        prefix.close()
        if generation != self.generation:
            self.known.discard(namespace)

    def close(self) -> None:
        """Close the files of prefetches; the reader has ended."""
        for prefetch in self._prefetches.values():
            prefetch.close()
        self._prefetches.clear()

    def _end_prefetch(self, key: bytes) -> None:
        self._prefetches.pop(key).close()
        self._is_prefetching = False
        self._idle()


class _Prefetch(NamedTuple):
    """Probe keys that are to be read for later requests."""

    prefix: PrunedPrefix
    close: Callable[[], None]


class PrunedSource:
    """The pruned prefix of one request; see `RowSource`."""

    def __init__(self, wanted: WantedRows, shared: PrunedSources) -> None:
        self._wanted, self._shared = wanted, shared
        self.computes_next = self.is_not_enough = False
        self._generation = shared.generation
        self._start = wanted.num_in_memory  # the page from which on rows are pruned
        self._prefix: PrunedPrefix | None = None
        self._pages: UInt8Array | None = None
        self._dropped_attention = 0.0
        self._planned_at = 0.0
        self._expected_s: float | None = None  # seconds for all reads; None: they are not planned
        self._stages = self._in_order()

    def next_stage(self) -> Stage | None:
        """What to read next; None: all is read."""
        return next(self._stages, None)

    def rows(self) -> LoadedRows:
        """The rows that are there."""
        assert self._prefix is not None and self._pages is not None, "nothing was read"
        stored, stop = self._wanted.prefix, self._stop * PAGE_SIZE
        token_ids, generated = stored.token_ids[:stop], stored.generated[:stop]
        span = SparseSpan(self._start * PAGE_SIZE, self._prefix.num_there, token_ids, generated)
        io = self._shared.probe.runner.apart
        if self._prefix.seen is not None:  # these are all
            look = stored, self._start, self._prefix.run_pages, self._prefix.chosen, self._prefix.seen.mean
            self._shared.teacher.note(span, PartLook(*look))
            self._shared.promoter.used(stored)
        return LoadedRows(self._wanted.match, span, self._pages, io, self._dropped_attention)

    def late(self) -> None:
        """Have later plans be more careful: the request has waited too long."""
        if self._expected_s is not None:
            self._observe(max(self._expected_s, self._shared.clock() - self._planned_at))

    def close(self) -> None:
        """Close the files; the reader has done with them."""
        self._stages.close()  # it refers to this source, and would keep it
        self._pages = None
        if self._prefix is not None:
            self._shared.close_prefix(self._prefix, self._wanted.prefix.namespace, self._generation)
            self._prefix = None

    def _in_order(self) -> Generator[Stage]:
        """The stages; between two of them the engine's thread runs."""
        yield Stage(self._open)
        prefix = self._prefix
        assert prefix is not None
        self._expected_s = self._plan(prefix, prefix.bytes_to_read)
        if self._expected_s is None:
            self._prefetch(prefix)
            raise TransferRefused
        self.computes_next = True
        yield Stage(self._read_stored, prefix.bytes_to_read)
        self.computes_next = False
        queries = self._shared.probe.queries(self.rows(), prefix.probe_head)
        yield Stage(lambda: self._read_chosen(queries), max(0, prefix.bytes_to_read - prefix.bytes_read))
        self._observe(self._shared.clock() - self._planned_at)

    def _plan(self, prefix: PrunedPrefix, num_bytes: int) -> float | None:
        """Seconds that reading so many bytes and the probe should take; None: it is not worth it."""
        shared, first = self._shared, self._wanted.num_in_memory
        start, stop = first * PAGE_SIZE, max(first, self._stop) * PAGE_SIZE  # what exact pages would bring
        num_query_tokens = len(self._wanted.match.prompt_ids) - self._stop * PAGE_SIZE
        if num_query_tokens > shared.probe.max_num_tokens:
            return None
        self._planned_at = shared.clock()
        shared.rates.forget(self._planned_at)
        return shared.plan(
            start,
            stop,
            shared.rates,
            num_bytes=num_bytes,
            full_bytes=(stop - start) // PAGE_SIZE * shared.page_bytes,
            num_query_tokens=num_query_tokens,
            queued_bytes=shared.reader.queued_bytes,
        )

    def _prefetch(self, prefix: PrunedPrefix) -> None:
        """Have the probe keys read later, if pruning would be worth it with them in memory."""
        num_bytes, stored = prefix.bytes_to_prefetch, self._wanted.prefix
        if num_bytes and self._plan(prefix, prefix.bytes_to_read - num_bytes) is not None:
            key = stored.page_keys[self._stop - 1].key
            close = partial(self._shared.close_prefix, prefix, stored.namespace, self._generation)
            if self._shared.add_prefetch(key, prefix, close):
                self._prefix = None

    def _observe(self, seconds: float) -> None:
        assert self._expected_s is not None
        self._shared.rates.observe(expected_s=self._expected_s, seconds=seconds)

    @property
    def _stop(self) -> int:
        """The page before which rows are pruned. The prompt's tokens from there on are computed."""
        num_pages = len(self._wanted.prefix.page_keys)
        return num_pages if self._prefix is None else self._start + self._prefix.num_tokens // PAGE_SIZE

    # In the reader's thread.

    def _open(self) -> bool:
        """Open the runs behind what memory has. Where memory ends within a run, open all from the prompt's start."""
        wanted, shared = self._wanted, self._shared
        for self._start in dict.fromkeys((wanted.num_in_memory, 0)):
            heads, num_before = wanted.prefix.page_keys[self._start :], self._start * PAGE_SIZE
            self._prefix = PrunedPrefix.open(
                shared.records, heads, budget=wanted.share, num_before=num_before, known=shared.known
            )
            if self._prefix is not None:
                return True
        return False

    def _read_stored(self) -> bool:
        """Read what most queries attend to."""
        assert self._prefix is not None
        if not self._prefix.read_stored():
            return False
        self._pages = self._prefix.rows()
        return True

    def _read_chosen(self, queries: Float32Array) -> bool:
        """Choose the other rows by the prompt's queries, and read them, if little enough attention is dropped."""
        assert self._prefix is not None
        self._dropped_attention = self._prefix.choose(queries)
        self.is_not_enough = self._dropped_attention > self._shared.max_dropped_attention
        if self.is_not_enough or not self._prefix.read_chosen():
            return False
        self._pages = self._prefix.rows()
        return True
