"""Read chosen rows of a stored prefix from its ordered runs, in two rounds.

The first round reads the rows that earlier queries attended to, the second those that the query's own probe picks.
Knows runs and rows, not requests, pools or engines. Anything missing or wrong ends the read, and the exact pages must
do.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from ..artifact.manifest import PAGE_SIZE
from ..model.batch import Float32Array, UInt8Array
from ..model.kv_rows import KVRows
from .packed_keys import JoinedKeys
from .probe_keys import KnownRun, ProbeKeyCache
from .row_selection import (
    Probe,
    Tokens,
    always,
    dropped_attention,
    num_rows,
    probe,
    stored_rows,
    stored_shares,
    with_probed,
)

if TYPE_CHECKING:
    from ..store import PageKey, PageStore
    from ..store.ordered.ordered_reader import OpenRun, TokenRows

MAX_REST_PAGES: Final = 3  # at the end of a prefix: so short a node has no run, and is computed with the query
MAX_RUNS: Final = 32  # of a prefix: each has a file open, and so many reads are no quicker than the exact pages
_SCATTER: Final = 1.1  # bytes read for a byte that a probe picks: whole chunks, rounded to units (bench/LOG.md)
_NOTHING: Final = 1 << 30  # stands for no token


@dataclass(eq=False)
class _Run:
    """One run of the prefix."""

    file: OpenRun
    start: int  # its first token in the prefix
    always: Tokens  # of its tokens, counted from `start`, those that are read in any case
    num_stored: int  # rows that are read by stored order
    known: KnownRun | None  # None: its probe keys and order are not in memory

    @property
    def stop(self) -> int:
        return self.start + self.file.layout.num_tokens

    @property
    def num_stored_blocks(self) -> int:
        return -(-self.num_stored // self.file.layout.chunk_size)


@dataclass(frozen=True)
class _Rows:
    """Rows that were read, and their tokens in the prefix, `[layers, kv_heads, n]`, or `_NOTHING`."""

    tokens: Tokens
    rows: KVRows


class PrunedPrefix:
    """A share of the rows of whole pages, the same number in each layer and KV head, for one request.

    Not thread-safe, but any thread may call it after another. The methods that read belong to the reader thread;
    `choose` uses numpy only.

    >>> prefix = PrunedPrefix.open(store, heads, budget=0.25, num_before=0, known=cache)
    >>> if prefix is not None and prefix.read_stored():
    ...     queries = probe_forward.queries(prefix.rows())  # of the prompt's end, over these rows
    ...     if prefix.choose(queries) <= 0.15 and prefix.read_chosen():
    ...         admit_over(prefix.rows())

    Attributes:
        num_tokens: of the prefix.
        num_rows: in each layer and head, when all is read.
        num_stored: in each layer and head, after `read_stored`.
        num_there: in each layer and head, that `rows` has now.
        probe_head: the KV head whose group's queries `choose` needs.
        run_pages: of each run.
        seen: where `choose` found that the query looks; None before, and if all rows are read.
    """

    def __init__(
        self, runs: Sequence[tuple[OpenRun, KnownRun | None]], *, budget: float, num_before: int, known: ProbeKeyCache
    ) -> None:
        """Use `open`."""
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
        shares = stored_shares(lengths, [len(tokens) for tokens in fixed_of], self.num_rows)
        self.num_stored = sum(shares)
        self._runs = [
            _Run(file, start, tokens, share, kept)
            for (file, kept), start, tokens, share in zip(runs, starts, fixed_of, shares, strict=True)
        ]
        self.num_there = 0
        self._chosen: Tokens | None = None  # [layers, kv_heads, num_stored], then num_rows
        self._read: list[_Rows] = []
        self.run_pages = tuple(length // PAGE_SIZE for length in lengths)
        self.seen: Probe | None = None

    @classmethod
    def open(
        cls, store: PageStore, heads: Sequence[PageKey], *, budget: float, num_before: int, known: ProbeKeyCache
    ) -> PrunedPrefix | None:
        """Open the runs that together hold the pages `heads`, except for a few at the end, which `num_tokens` leaves
        out. Reads their headers only. None if there is a gap, a run is not right, or there are more than `MAX_RUNS`.

        Args:
            budget: share of the rows to read, above 0 and at most 1.
            num_before: tokens of the prompt before `heads`, which have all their rows.
            known: what memory keeps of the store's runs.
        """
        with ExitStack() as files:
            runs = _open_runs(store, heads, known, files)
            if not runs:
                return None
            prefix = cls(runs, budget=budget, num_before=num_before, known=known)
            prefix._files = files.pop_all()
            return prefix

    @property
    def bytes_to_read(self) -> int:
        """About what is asked of the disk in all, for planning; `bytes_to_prefetch` included."""
        num_bytes = self.bytes_to_prefetch
        for run in self._runs:
            num_bytes += run.file.layout.blocks(0, run.num_stored_blocks).num_bytes
            num_bytes += len(run.always) * self._token_bytes
        num_picked = self.num_rows - self.num_stored
        scattered = min(_SCATTER * num_picked, self.num_tokens - self.num_stored)
        return num_bytes + int(scattered * self._token_bytes)

    @property
    def bytes_to_prefetch(self) -> int:
        """Bytes of the probe keys and orders that are not in memory."""
        num_bytes = 0
        for run in self._runs:
            if run.known is None and self.num_rows < self.num_tokens:
                layout = run.file.layout
                num_bytes += layout.probe.num_bytes
                num_bytes += sum(map(layout.block_head_bytes, range(run.num_stored_blocks, layout.num_blocks)))
        return num_bytes

    @property
    def bytes_read(self) -> int:
        """What was asked of the disk so far, in whole units of 4 KiB."""
        return sum(run.file.counts.num_bytes for run in self._runs)

    @property
    def num_reads(self) -> int:
        """Reads so far."""
        return sum(run.file.counts.num_reads for run in self._runs)

    def prefetch(self) -> bool:
        """Read only what memory keeps for the next request. False if a run is not right."""
        return all([self._prefetch(run) for run in self._runs])

    def read_stored(self) -> bool:
        """Read the rows that most queries attend to, and what `choose` needs. False: use the exact pages."""
        chosen = []
        for run in self._runs:
            has_first = self._prefetch(run) and run.file.first(run.num_stored) is not None
            order = run.file.order() if has_first else None
            if order is None:
                return self._fail()
            mine = stored_rows(order, run.always, run.num_stored)
            if not self._take(run, run.file.at(mine), np.ones(mine.shape, bool)):
                return self._fail()
            chosen.append(mine + run.start)
        self._chosen, self.num_there = np.concatenate(chosen, axis=-1), self.num_stored
        return True

    def rows(self) -> UInt8Array:
        """The `num_there` rows that were read so far, in the order of the text, as pages `[N, page_bytes]`."""
        assert self._read, "nothing was read"
        tokens = np.concatenate([some.tokens for some in self._read], axis=-1)
        order = np.argsort(tokens, axis=-1, kind="stable")[..., : self.num_there]
        return KVRows.pages_of([some.rows for some in self._read], order)

    def choose(self, queries: Float32Array) -> float:
        """Choose the other rows by `queries`, `[layers, rows, group, head_dim]`, of the heads that share the probe's
        keys, from a forward of the query over `rows()`. Returns the estimated share of the query's attention on the
        prefix that falls on rows which are not chosen."""
        assert self._chosen is not None, "nothing was read"
        if self.num_rows == self.num_tokens:
            self._chosen = np.broadcast_to(np.arange(self.num_tokens), (*self._chosen.shape[:2], self.num_tokens))
            return 0.0
        keys = [run.known.probe_keys for run in self._runs if run.known is not None]
        self.seen = seen = probe(queries, JoinedKeys(keys), self._chosen[:, self.probe_head])
        orders = [run.file.order() for run in self._runs]  # in memory since `read_stored`
        order = [mine + run.start for mine, run in zip(orders, self._runs, strict=True) if mine is not None]
        self._chosen = with_probed(self._chosen, seen.largest, self.num_rows, np.concatenate(order, axis=-1))
        return dropped_attention(seen.mean, self._chosen[:, self.probe_head])

    @property
    def chosen(self) -> Tokens:
        """The tokens of `rows()`, `[layers, kv_heads, num_there]`, ascending."""
        assert self._chosen is not None, "nothing was chosen"
        return self._chosen

    def read_chosen(self) -> bool:
        """Read what was chosen and is not there. False: use the exact pages."""
        assert self._chosen is not None and len(self._read) == len(self._runs), "nothing was chosen, or all is read"
        is_wanted = np.zeros((*self._chosen.shape[:2], self.num_tokens), bool)
        np.put_along_axis(is_wanted, self._chosen, True, axis=-1)
        for some in self._read:
            np.put_along_axis(is_wanted, some.tokens, False, axis=-1)
        for run in self._runs:
            if not self._read_wanted(run, is_wanted[..., run.start : run.stop]):
                return self._fail()
        self.num_there = self.num_rows
        return True

    def close(self) -> None:
        """Close the files; may be called twice."""
        with suppress(OSError):
            self._files.close()

    def _prefetch(self, run: _Run) -> bool:
        """Have a run's probe keys and order in memory, for later requests, too. Not needed if all rows are read."""
        if run.known is None and self.num_rows < self.num_tokens:
            keys, heads = run.file.probe_keys(), run.file.block_heads()
            if keys is None or heads is None:
                return False
            run.known = self._cache.keep(run.file, heads, keys)
            return run.known is not None
        return True

    def _read_wanted(self, run: _Run, is_wanted: npt.NDArray[np.bool_]) -> bool:
        """Read the wanted tokens of a run: some layers and heads want more than others."""
        num_wanted = is_wanted.sum(axis=-1)
        widest, order = int(num_wanted.max()), run.file.order()
        if widest == 0 or order is None:
            return order is not None
        tokens = np.argsort(~is_wanted, axis=-1, kind="stable")[..., :widest]
        is_some = np.arange(widest) < num_wanted[..., None]
        # a head that wants fewer repeats its first one, or reads the one that ranks first: rarely a further read
        again = np.where(num_wanted[..., None] > 0, tokens[..., :1], order[..., :1])
        return self._take(run, run.file.at(np.where(is_some, tokens, again)), is_some)

    def _take(self, run: _Run, read: TokenRows | None, is_some: npt.NDArray[np.bool_]) -> bool:
        if read is None:
            return False
        self._read.append(_Rows(np.where(is_some, read.tokens.astype(np.int64) + run.start, _NOTHING), read.rows))
        return True

    def _fail(self) -> bool:
        """Drop all rows."""
        self._read, self._chosen, self.num_there = [], None, 0
        return False


def _open_runs(
    store: PageStore, heads: Sequence[PageKey], known: ProbeKeyCache, files: ExitStack
) -> list[tuple[OpenRun, KnownRun | None]]:
    """The runs that hold the pages `heads`, except for a few at the end, with what is known of each; or none."""
    runs: list[tuple[OpenRun, KnownRun | None]] = []
    first = 0
    while first < len(heads):
        rest = list(heads[first:])
        kept = known.find(rest)
        file = store.open_ordered(rest, block_heads=None if kept is None else kept.block_heads, chunks=known.chunks)
        if file is None:
            return runs if len(rest) <= MAX_REST_PAGES else []
        files.callback(file.close)
        if kept is not None and kept.block_heads.number != file.header.number:  # its order was written again since
            kept = None
        runs.append((file, kept))
        if len(runs) > MAX_RUNS or file.header.probe_head != runs[0][0].header.probe_head:
            return []
        first += file.header.num_pages
    return runs
