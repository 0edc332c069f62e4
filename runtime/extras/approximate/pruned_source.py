"""Read a pruned prefix for one request, stage by stage: a `RowSource`.

Opens the runs, reads the rows that most queries attend to, probes with the prompt's own end, and reads the rows that
the probe picks. Knows one prompt and its prefix; not what other requests wait for, nor deadlines.
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
from .probe_forward import ProbeForward
from .probe_keys import ProbeKeyCache
from .promoter import Promoter
from .pruned_prefix import PrunedPrefix
from .records.chunk_cache import ChunkCacheStats
from .row_rates import RowRates, plan_chosen
from .score_updater import ScoreUpdater, ServedPart

if TYPE_CHECKING:
    from .records.row_records import RowRecords

MAX_PREFETCHES: Final = 8


class PrunedSources:
    """Makes the sources of a store; see `RowSources`.

    Args:
        known: cached data of the store's runs.
        max_dropped_attention: above it a prompt is served with all rows.
        least_share: of rows: with fewer, most prompts exceed that bound, and have read a part for nothing.
        idle: called when the disk may be idle; calls `read_ahead` then.
        updater: learns from served parts.
        promoter: loads prefixes whole whose parts are requested often.

    Attributes:
        plan: decides whether chosen rows are worth it.
        num_prefetches: number of prefixes whose probe keys are queued for reading ahead.
        generation: number of calls of `forget`.
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
        updater: ScoreUpdater,
        promoter: Promoter,
    ) -> None:
        self.records, self.reader, self.probe, self.known = records, reader, probe, known
        self.rates = RowRates(rates)
        self.page_bytes, self.clock, self._idle = page_bytes, clock, idle
        self.max_dropped_attention, self.least_share = max_dropped_attention, least_share
        self.updater, self.promoter = updater, promoter
        self.num_read_bytes = self.generation = 0
        self._prefetches: dict[bytes, _Prefetch] = {}  # by the key of the prefix's last page
        self._is_prefetching = False  # whether the first of them is being read

    @property
    def chunks(self) -> ChunkCacheStats | None:
        """The statistics of the cache of frequently read rows; None if there is none."""
        return None if self.known.chunks is None else self.known.chunks.stats()

    @property
    def num_prefetches(self) -> int:
        """Number of prefixes whose probe keys are queued for reading ahead."""
        return len(self._prefetches)

    def source(self, wanted: WantedRows) -> PrunedSource | None:
        """Return a source of rows for a request; None if its prompt's end is too long for one probe."""
        num_query_tokens = len(wanted.match.prompt_ids) - len(wanted.prefix.page_keys) * PAGE_SIZE
        return None if num_query_tokens > self.probe.max_num_tokens else PrunedSource(wanted, self)

    def add_prefetch(self, key: bytes, prefix: PrunedPrefix, close: Callable[[], None]) -> bool:
        """Queue the probe keys of a prefix for reading ahead, then close it. Return False if full, or queued."""
        if len(self._prefetches) >= MAX_PREFETCHES or key in self._prefetches:
            return False
        self._prefetches[key] = _Prefetch(prefix, close)
        return True

    def read_ahead(self) -> None:
        """Read ahead the probe keys of a prefix, or a whole prefix that is pruned often.

        The first request of a prefix is often faster without pruning, because all keys would have to be read first.
        Without reading ahead, the prefix would never be pruned.
        """
        if not self._prefetches:
            self.promoter.advance()
        elif not self._is_prefetching:
            self._is_prefetching, (key, first) = True, next(iter(self._prefetches.items()))
            num_bytes = first.prefix.bytes_to_prefetch
            self.reader.run(first.prefix.prefetch, lambda _: self._end_prefetch(key), num_bytes=num_bytes)

    def forget(self, namespace: bytes | None = None) -> None:
        """Drop cached data of the runs of a namespace, or of all."""
        self.generation += 1
        self.known.discard(namespace)
        self.updater.forget(namespace)
        self.promoter.forget(namespace)

    def close_prefix(self, prefix: PrunedPrefix, namespace: bytes, generation: int) -> None:
        """Close a prefix of this generation, when the reader has finished with it.

        If its namespace may have been forgotten since, drop its cached data, too.
        """
        self.num_read_bytes += prefix.bytes_read
        prefix.close()
        if generation != self.generation:
            self.known.discard(namespace)

    def close(self) -> None:
        """Close the files of prefetches; the reader must have ended."""
        for prefetch in self._prefetches.values():
            prefetch.close()
        self._prefetches.clear()

    def _end_prefetch(self, key: bytes) -> None:
        """Close the prefix whose probe keys were read ahead, and report the idle disk."""
        self._prefetches.pop(key).close()
        self._is_prefetching = False
        self._idle()


class _Prefetch(NamedTuple):
    """The probe keys to read for later requests."""

    prefix: PrunedPrefix
    close: Callable[[], None]


class PrunedSource:
    """The pruned prefix of one request; see `RowSource`."""

    def __init__(self, wanted: WantedRows, shared: PrunedSources) -> None:
        self._wanted, self._shared = wanted, shared
        self.computes_next = self.is_not_enough = False
        self._generation = shared.generation
        self._start = wanted.num_in_memory  # the page from which rows are pruned
        self._prefix: PrunedPrefix | None = None
        self._pages: UInt8Array | None = None
        self._dropped_attention = 0.0
        self._planned_at = 0.0
        self._expected_s: float | None = None  # seconds for all reads; None: not planned yet
        self._stages = self._make_stages()

    def next_stage(self) -> Stage | None:
        """Return the next read; None if all is read."""
        return next(self._stages, None)

    def rows(self) -> LoadedRows:
        """Return the rows read so far."""
        assert self._prefix is not None and self._pages is not None, "nothing was read"
        stored, stop = self._wanted.prefix, self._stop_page * PAGE_SIZE
        token_ids, generated = stored.token_ids[:stop], stored.generated[:stop]
        span = SparseSpan(self._start * PAGE_SIZE, self._prefix.num_there, token_ids, generated)
        io = self._shared.probe.runner.apart
        if self._prefix.seen is not None:  # these are all rows
            look = stored, self._start, self._prefix.run_pages, self._prefix.chosen, self._prefix.seen.mean
            self._shared.updater.note(span, ServedPart(*look))
            self._shared.promoter.used(stored)
        return LoadedRows(self._wanted.match, span, self._pages, io, self._dropped_attention)

    def late(self) -> None:
        """Make later plans more careful, because the request has waited too long."""
        if self._expected_s is not None:
            self._observe(max(self._expected_s, self._shared.clock() - self._planned_at))

    def close(self) -> None:
        """Close the files; the reader must have finished with them."""
        self._stages.close()  # it refers to this source, and would keep it alive
        self._pages = None
        if self._prefix is not None:
            self._shared.close_prefix(self._prefix, self._wanted.prefix.namespace, self._generation)
            self._prefix = None

    def _make_stages(self) -> Generator[Stage]:
        """Yield the stages; between two of them the engine's thread runs."""
        yield Stage(self._open)
        prefix = self._prefix
        assert prefix is not None
        self._expected_s = self._estimate_seconds(prefix, prefix.bytes_to_read)
        if self._expected_s is None:
            self._queue_prefetch(prefix)
            raise TransferRefused
        self.computes_next = True
        yield Stage(self._read_stored, prefix.bytes_to_read)
        self.computes_next = False
        queries = self._shared.probe.queries(self.rows(), prefix.probe_head)
        yield Stage(lambda: self._read_chosen(queries), max(0, prefix.bytes_to_read - prefix.bytes_read))
        self._observe(self._shared.clock() - self._planned_at)

    def _estimate_seconds(self, prefix: PrunedPrefix, num_bytes: int) -> float | None:
        """Return the seconds that reading and the probe should take; None if not worth it."""
        shared, first = self._shared, self._wanted.num_in_memory
        start, stop = first * PAGE_SIZE, max(first, self._stop_page) * PAGE_SIZE  # what exact pages would provide
        num_query_tokens = len(self._wanted.match.prompt_ids) - self._stop_page * PAGE_SIZE
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

    def _queue_prefetch(self, prefix: PrunedPrefix) -> None:
        """Queue the probe keys for reading ahead, if pruning would be worth it with them in memory."""
        num_bytes, stored = prefix.bytes_to_prefetch, self._wanted.prefix
        if num_bytes and self._estimate_seconds(prefix, prefix.bytes_to_read - num_bytes) is not None:
            key = stored.page_keys[self._stop_page - 1].key
            close = partial(self._shared.close_prefix, prefix, stored.namespace, self._generation)
            if self._shared.add_prefetch(key, prefix, close):
                self._prefix = None

    def _observe(self, seconds: float) -> None:
        """Record how long the reads took, for later plans."""
        assert self._expected_s is not None
        self._shared.rates.observe(expected_s=self._expected_s, seconds=seconds)

    @property
    def _stop_page(self) -> int:
        """The page at which pruning ends. The prompt's later tokens are computed."""
        num_pages = len(self._wanted.prefix.page_keys)
        return num_pages if self._prefix is None else self._start + self._prefix.num_tokens // PAGE_SIZE

    # In the reader's thread

    def _open(self) -> bool:
        """Open the runs after the pages in memory, or if memory ends within a run, all from the prompt's start.

        Return False if neither can be opened.
        """
        wanted, shared = self._wanted, self._shared
        for self._start in dict.fromkeys((wanted.num_in_memory, 0)):
            page_keys, num_before = wanted.prefix.page_keys[self._start :], self._start * PAGE_SIZE
            self._prefix = PrunedPrefix.open(
                shared.records, page_keys, budget=wanted.share, num_before=num_before, known=shared.known
            )
            if self._prefix is not None:
                return True
        return False

    def _read_stored(self) -> bool:
        """Read the rows that most queries attend to into `_pages`. Return False if a run is invalid."""
        assert self._prefix is not None
        if not self._prefix.read_stored_rows():
            return False
        self._pages = self._prefix.rows()
        return True

    def _read_chosen(self, queries: Float32Array) -> bool:
        """Choose the other rows by the prompt's queries, and read them.

        Return False if too much attention would be dropped, or a run is invalid.
        """
        assert self._prefix is not None
        self._dropped_attention = self._prefix.choose(queries)
        self.is_not_enough = self._dropped_attention > self._shared.max_dropped_attention
        if self.is_not_enough or not self._prefix.read_chosen_rows():
            return False
        self._pages = self._prefix.rows()
        return True
