"""Read chosen rows of a stored prefix from its ordered runs and their pages, in two rounds.

The first round reads the rows that earlier queries attended to, the second the pages that the query's own probe picks.
Knows runs and rows, not requests, pools or engines. Anything missing or wrong ends the read; the exact pages are then
used.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from ...artifact.manifest import PAGE_SIZE
from ...model.batch import Float32Array, UInt8Array
from .packed_keys import JoinedKeys
from .probe_keys import KnownRun, ProbeKeyCache
from .read_rounds import ReadRounds
from .row_selection import (
    Probe,
    Tokens,
    always,
    dropped_attention,
    num_rows,
    probe,
    probed,
    stored_rows,
    stored_shares,
)

if TYPE_CHECKING:
    from ...store import PageKey
    from .records.ordered_reader import OpenRun
    from .records.row_records import RowRecords

MAX_REST_PAGES: Final = 3  # at the end of a prefix: such a short node has no run, and is computed with the query
MAX_RUNS: Final = 32  # of a prefix: each has a file open, and so many reads are no faster than the exact pages
_SCATTER: Final = 1.6  # bytes read per byte that a probe picks: other rows of its pages, and whole units (LOG.md)


@dataclass(eq=False)
class _Run:
    """A run of the prefix."""

    file: OpenRun
    start: int  # its first token in the prefix
    always: Tokens  # tokens, counted from `start`, that are always read
    num_stored: int  # rows that are read by stored order
    known: KnownRun | None  # None: its probe keys are not in memory

    @property
    def stop(self) -> int:
        """The position after its last token in the prefix."""
        return self.start + self.file.layout.num_tokens

    @property
    def num_first(self) -> int:
        """Number of rows read by stored order that the run itself has; the others are in pages."""
        return min(self.num_stored, self.file.layout.num_ranks)


class PrunedPrefix:
    """A share of the rows of whole pages, the same number in each layer and KV head, for one request.

    Not thread-safe, but any thread can use it after another. The methods that read belong to the reader thread;
    `choose` uses NumPy only.

    >>> prefix = PrunedPrefix.open(records, page_keys, budget=0.25, num_before=0, known=cache)
    >>> if prefix is not None and prefix.read_stored_rows():
    ...     queries = probe_forward.queries(prefix.rows())  # of the prompt's end, over these rows
    ...     if prefix.choose(queries) <= calibration.max_dropped_attention and prefix.read_chosen_rows():
    ...         admit_over(prefix.rows())

    Attributes:
        num_tokens: tokens of the prefix.
        num_rows: rows in each layer and head, when all is read.
        num_stored: rows in each layer and head, after `read_stored_rows`.
        num_there: rows in each layer and head that `rows` has now.
        probe_head: the KV head whose group's queries `choose` needs.
        run_pages: pages of each run.
        seen: the query's attention, found by `choose`; None before, and if all rows are read.
    """

    def __init__(
        self, runs: Sequence[tuple[OpenRun, KnownRun | None]], *, budget: float, num_before: int, known: ProbeKeyCache
    ) -> None:
        """Make a prefix from open runs; use `open`."""
        self._cache, self._files = known, ExitStack()
        self._token_bytes = runs[0][0].layout.kv.page_bytes // PAGE_SIZE
        self.probe_head = runs[0][0].header.probe_head
        lengths = [file.layout.num_tokens for file, _ in runs]
        self.num_tokens = sum(lengths)
        self.num_rows = num_rows(self.num_tokens, budget)
        starts = np.cumsum([0, *lengths[:-1]]).tolist()
        fixed = always(self.num_tokens, num_before)
        fixed_of = [
            fixed[(start <= fixed) & (fixed < start + length)] - start
            for start, length in zip(starts, lengths, strict=True)
        ]
        most = [file.layout.num_ranks for file, _ in runs]
        shares = stored_shares(lengths, [len(tokens) for tokens in fixed_of], self.num_rows, most)
        self.num_stored = sum(shares)
        self._runs = [
            _Run(file, start, tokens, share, kept)
            for (file, kept), start, tokens, share in zip(runs, starts, fixed_of, shares, strict=True)
        ]
        self.num_there = 0
        # [layers, kv_heads, n], ascending: read by stored order, and chosen in addition
        self._stored: Tokens | None = None
        self._picked: Tokens | None = None
        self._read = ReadRounds()
        self.run_pages = tuple(length // PAGE_SIZE for length in lengths)
        self.seen: Probe | None = None

    @classmethod
    def open(
        cls, records: RowRecords, page_keys: Sequence[PageKey], *, budget: float, num_before: int, known: ProbeKeyCache
    ) -> PrunedPrefix | None:
        """Open the runs that together hold the pages `page_keys`, except for a few at the end.

        Reads their headers only. None if there is a gap, a run is invalid, or there are too many. `num_tokens`
        does not count the pages at the end.

        Args:
            budget: share of the rows to read, above 0 and at most 1.
            num_before: tokens of the prompt before `page_keys`, which have all their rows.
            known: cached data of the store's runs.
        """
        with ExitStack() as files:
            runs = _open_runs(records, page_keys, known, files)
            if not runs:
                return None
            prefix = cls(runs, budget=budget, num_before=num_before, known=known)
            prefix._files = files.pop_all()
            return prefix

    @property
    def bytes_to_read(self) -> int:
        """Approximate bytes that will be read in total, `bytes_to_prefetch` included."""
        num_bytes = self.bytes_to_prefetch
        for run in self._runs:
            num_blocks = -(-run.num_first // run.file.layout.chunk_size)
            num_bytes += run.file.layout.blocks(0, num_blocks).num_bytes
        scattered = min(_SCATTER * (self.num_rows - self.num_stored), self.num_tokens)
        return num_bytes + int(scattered * self._token_bytes)

    @property
    def bytes_to_prefetch(self) -> int:
        """Bytes of probe keys that are not in memory, and of their checksums."""
        if self.num_rows == self.num_tokens:
            return 0
        return sum(run.file.layout.tail.num_bytes for run in self._runs if run.known is None)

    @property
    def bytes_read(self) -> int:
        """Bytes requested from disk so far, in whole units of 4 KiB."""
        return sum(run.file.counts.num_bytes for run in self._runs)

    @property
    def num_reads(self) -> int:
        """Number of reads so far."""
        return sum(run.file.counts.num_reads for run in self._runs)

    def prefetch(self) -> bool:
        """Read only the data that is cached for the next request. Return False if a run is invalid."""
        return all([self._prefetch(run) for run in self._runs])

    def read_stored_rows(self) -> bool:
        """Read from disk the rows that most queries attend to, and what `choose` needs.

        If a run is invalid, drop all rows and return False; the caller then uses the exact pages.
        """
        chosen = []
        for run in self._runs:
            mine = self._read_first(run) if self._prefetch(run) else None
            if mine is None:
                return self._fail()
            chosen.append(mine + run.start)
        self._stored, self.num_there = np.concatenate(chosen, axis=-1), self.num_stored
        self._read.end_first(self.num_stored)
        return True

    def rows(self) -> UInt8Array:
        """Return the `num_there` rows read so far, those of `chosen`, as pages `[N, page_bytes]`."""
        return self._read.pages()

    def choose(self, queries: Float32Array) -> float:
        """Choose the other rows by `queries`, `[layers, rows, group, head_dim]`, of the heads that share its keys.

        The queries come from a forward over `rows()`. Return the estimated share of the query's attention on the prefix
        that falls on rows that are not chosen.
        """
        assert self._stored is not None, "nothing was read"
        if self.num_rows == self.num_tokens:
            self._picked = probed(self._stored, np.zeros((len(self._stored), self.num_tokens)), self.num_tokens)
            return 0.0
        keys = [run.known.probe_keys for run in self._runs if run.known is not None]
        self.seen = seen = probe(queries, JoinedKeys(keys), self._stored[:, self.probe_head])
        self._picked = probed(self._stored, seen.largest, self.num_rows)
        return dropped_attention(seen.mean, self.chosen[:, self.probe_head])

    @property
    def chosen(self) -> Tokens:
        """The tokens of `rows()`, `[layers, kv_heads, n]`: those read by stored order, ascending, then those added by
        `choose`, ascending."""
        assert self._stored is not None, "nothing was chosen"
        return self._stored if self._picked is None else np.concatenate([self._stored, self._picked], axis=-1)

    def read_chosen_rows(self) -> bool:
        """Read from disk the rows that `choose` added.

        If a run is invalid, drop all rows and return False; the caller then uses the exact pages.
        """
        assert self._picked is not None and self.num_there == self.num_stored, "nothing was chosen, or all is read"
        is_wanted = np.zeros((*self._picked.shape[:2], self.num_tokens), bool)
        np.put_along_axis(is_wanted, self._picked, True, axis=-1)
        for run in self._runs:
            if not self._read_wanted(run, is_wanted[..., run.start : run.stop]):
                return self._fail()
        self._read.end_second(self.num_rows - self.num_stored)
        self.num_there = self.num_rows
        return True

    def close(self) -> None:
        """Close the files; can be called twice."""
        with suppress(OSError):
            self._files.close()

    def _prefetch(self, run: _Run) -> bool:
        """Load a run's probe keys into memory, also for later requests; return False if the run is invalid.

        They are not needed if all rows are read.
        """
        if run.known is None and self.num_rows < self.num_tokens:
            keys = run.file.probe_keys()
            run.known = None if keys is None else self._cache.keep(run.file, keys)
            return run.known is not None
        return True

    def _read_first(self, run: _Run) -> Tokens | None:
        """Read the rows of a run that are read by stored order; return their tokens, None if invalid."""
        first = run.file.first(run.num_first)
        if first is None:
            return None
        tokens = first.tokens.astype(np.int64)
        mine = stored_rows(tokens, run.always, run.num_stored, run.file.layout.num_tokens)
        is_wanted = np.zeros((*mine.shape[:2], run.file.layout.num_tokens), bool)
        np.put_along_axis(is_wanted, mine, True, axis=-1)
        self._read.add(run.start, tokens, first.rows, is_wanted)
        np.put_along_axis(is_wanted, tokens, False, axis=-1)  # rows that are always read but rank too low are in pages
        return mine if self._read_wanted(run, is_wanted) else None

    def _read_wanted(self, run: _Run, is_wanted: npt.NDArray[np.bool_]) -> bool:
        """Read the wanted tokens of a run, `[layers, kv_heads, tokens]`, from its pages; return False if invalid.

        Layers can want different numbers of pages, and heads different rows of a page.
        """
        by_page = is_wanted.reshape(*is_wanted.shape[:2], -1, PAGE_SIZE)
        pages = np.asarray(by_page.any(axis=(1, 3)))
        if not pages.any():
            return True
        rows = run.file.page_rows(pages)
        if rows is None:
            return False
        numbers = np.argsort(~pages, axis=-1, kind="stable")[:, : rows.num_tokens // PAGE_SIZE]
        tokens = (numbers[..., None] * PAGE_SIZE + np.arange(PAGE_SIZE)).reshape(len(pages), 1, -1)
        self._read.add(run.start, np.repeat(tokens, is_wanted.shape[1], axis=1), rows, is_wanted)
        return True

    def _fail(self) -> bool:
        """Drop all rows, and return False, so that the exact pages are used."""
        self._read, self._stored, self._picked, self.num_there = ReadRounds(), None, None, 0
        return False


def _open_runs(
    records: RowRecords, page_keys: Sequence[PageKey], known: ProbeKeyCache, files: ExitStack
) -> list[tuple[OpenRun, KnownRun | None]]:
    """Return the runs that hold the pages, except for a few at the end, with the cached data of each; or none."""
    runs: list[tuple[OpenRun, KnownRun | None]] = []
    first = 0
    while first < len(page_keys):
        rest = list(page_keys[first:])
        kept = known.find(rest)
        file = records.open_ordered(rest, tables=None if kept is None else kept.tables, chunks=known.chunks)
        if file is None:
            return runs if len(rest) <= MAX_REST_PAGES else []
        files.callback(file.close)
        if kept is not None and kept.tables.number != file.header.number:  # it was rewritten in another order since
            kept = None
        runs.append((file, kept))
        if len(runs) > MAX_RUNS or file.header.probe_head != runs[0][0].header.probe_head:
            return []
        first += file.header.num_pages
    return runs
