"""Read a pruned prefix for one request, stage by stage: a `RowSource`.

Opens the runs, reads the rows that most queries attend to, probes with the prompt's own end, and reads the rows that
the probe picks. Knows one prompt and its prefix; neither what other requests wait for, nor when it is too late.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from ..artifact.manifest import PAGE_SIZE
from ..cache.sparse_span import SparseSpan
from ..model.batch import Float32Array, UInt8Array
from ..prefix.chosen_rows import Stage, TransferRefused, WantedRows
from ..prefix.disk_reader import DiskReader
from ..prefix.loaded_rows import LoadedRows
from ..prefix.prefix_plan import plan_chosen
from ..prefix.rates import Rates
from .probe_forward import ProbeForward
from .probe_keys import Prefetch, ProbeKeyCache, ProbeKeyPrefetch
from .pruned_prefix import PrunedPrefix

if TYPE_CHECKING:
    from ..store import PageStore

MAX_DROPPED_ATTENTION: Final = 0.15  # above it 10 % of SmolLM2's rows lose facts; no query at 25 % is (bench/LOG.md)


@dataclass
class PrunedReads:
    """What the sources of a store share.

    Attributes:
        plan: decides whether chosen rows are worth it.
        num_read_bytes: that closed sources asked of the disk.
        generation: counts the calls of `forget`.
    """

    store: PageStore
    reader: DiskReader
    rates: Rates
    probe: ProbeForward
    known: ProbeKeyCache
    prefetch: ProbeKeyPrefetch
    page_bytes: int
    clock: Callable[[], float]
    num_read_bytes: int = 0
    generation: int = 0

    plan = staticmethod(plan_chosen)

    def close(self, prefix: PrunedPrefix, namespace: bytes, generation: int) -> None:
        """Close a prefix that the reader has done with, and was opened in this generation. If its namespace may have
        been forgotten since, what was read of it is forgotten, too.
        """
        self.num_read_bytes += prefix.bytes_read
        prefix.close()
        if generation != self.generation:
            self.known.discard(namespace)

    def forget(self, namespace: bytes | None = None) -> None:
        """Drop what memory keeps of the runs of a namespace, or of all."""
        self.generation += 1
        self.known.discard(namespace)


class PrunedSource:
    """The pruned prefix of one request; see `RowSource`."""

    def __init__(self, wanted: WantedRows, reads: PrunedReads) -> None:
        self._wanted, self._reads = wanted, reads
        self.computes_next = self.is_not_enough = False
        self._generation = reads.generation
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
        return LoadedRows(self._wanted.match, span, self._pages, self._reads.probe.runner, self._dropped_attention)

    def late(self) -> None:
        """Have later plans be more careful: the request has waited too long."""
        if self._expected_s is not None:
            self._observe(max(self._expected_s, self._reads.clock() - self._planned_at))

    def close(self) -> None:
        """Close the files; the reader has done with them."""
        self._stages.close()  # or it would keep the rows, and itself
        if self._prefix is not None:
            self._reads.close(self._prefix, self._wanted.prefix.namespace, self._generation)
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
        queries = self._reads.probe.queries(self.rows(), prefix.probe_head)
        yield Stage(lambda: self._read_chosen(queries), max(0, prefix.bytes_to_read - prefix.bytes_read))
        self._observe(self._reads.clock() - self._planned_at)

    def _plan(self, prefix: PrunedPrefix, num_bytes: int) -> float | None:
        """Seconds that reading so many bytes and the probe should take; None: it is not worth it."""
        reads, first = self._reads, self._wanted.num_in_memory
        start, stop = first * PAGE_SIZE, max(first, self._stop) * PAGE_SIZE  # what exact pages would bring
        num_query_tokens = len(self._wanted.match.prompt_ids) - self._stop * PAGE_SIZE
        if num_query_tokens > reads.probe.max_num_tokens:
            return None
        self._planned_at = reads.clock()
        expected_s = reads.plan(
            start,
            stop,
            reads.rates,
            num_bytes=num_bytes,
            full_bytes=(stop - start) // PAGE_SIZE * reads.page_bytes,
            num_query_tokens=num_query_tokens,
            queued_bytes=reads.reader.queued_bytes,
        )
        if expected_s is None:
            reads.rates.forget_chosen()
        return expected_s

    def _prefetch(self, prefix: PrunedPrefix) -> None:
        """Have the probe keys read later, if pruning would be worth it with them in memory."""
        num_bytes, stored = prefix.bytes_to_prefetch, self._wanted.prefix
        if num_bytes and self._plan(prefix, prefix.bytes_to_read - num_bytes) is not None:
            key = stored.heads[self._stop - 1].key
            close = partial(self._reads.close, prefix, stored.namespace, self._generation)
            if self._reads.prefetch.add(Prefetch(key, prefix.prefetch, num_bytes, close)):
                self._prefix = None

    def _observe(self, seconds: float) -> None:
        assert self._expected_s is not None
        self._reads.rates.observe_chosen(expected_s=self._expected_s, seconds=seconds)

    @property
    def _stop(self) -> int:
        """The page before which rows are pruned. The prompt's tokens from there on are computed."""
        num_pages = len(self._wanted.prefix.heads)
        return num_pages if self._prefix is None else self._start + self._prefix.num_tokens // PAGE_SIZE

    # In the reader's thread.

    def _open(self) -> bool:
        """Open the runs behind what memory has. Where memory ends within a run, open all from the prompt's start."""
        wanted, reads = self._wanted, self._reads
        for self._start in dict.fromkeys((wanted.num_in_memory, 0)):
            heads, num_before = wanted.prefix.heads[self._start :], self._start * PAGE_SIZE
            self._prefix = PrunedPrefix.open(
                reads.store, heads, budget=wanted.share, num_before=num_before, known=reads.known
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
        self.is_not_enough = self._dropped_attention > MAX_DROPPED_ATTENTION
        if self.is_not_enough or not self._prefix.read_chosen():
            return False
        self._pages = self._prefix.rows()
        return True
