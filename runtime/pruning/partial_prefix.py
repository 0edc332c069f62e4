"""Read a part of a prefix from its ordered runs on disk: first by stored order, then what the query looks at.

Knows runs and rows, not requests, pools or engines. Whatever is missing or not right ends it: the exact pages must do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from ..artifact.manifest import PAGE_SIZE
from ..model.batch import Float32Array, UInt8Array
from ..model.kv_rows import KVRows
from .row_selection import (
    Tokens,
    always,
    dropped_mass,
    look,
    num_rows,
    stored_rows,
    stored_shares,
    with_probed,
)
from .run_cache import KnownRun, ProbeKeys, RunCache

if TYPE_CHECKING:
    from ..store import PageKey, PageStore
    from ..store.ordered_reader import OpenRun, TokenRows

MAX_DROPPED_MASS: Final = 0.15  # above it 10 % of SmolLM2's rows lose facts; no query at 25 % is (bench/LOG.md)
MAX_REST_PAGES: Final = 3  # at the end of a prefix: so short a node has no run, and is computed with the query
MAX_RUNS: Final = 32  # of a prefix: each has a file open, and so many reads are no quicker than the exact pages
_SCATTER: Final = 1.1  # bytes read for a byte that a probe picks: whole chunks, and what fills up units (bench/LOG.md)
_NOTHING: Final = 1 << 30  # a token that is none


@dataclass(frozen=True)
class Choice:
    """What came of a look."""

    dropped_mass: float  # estimated share of the query's attention on the prefix that falls on rows which are not read
    is_enough: bool  # False: too much; read the prefix in full


@dataclass(eq=False)
class _Part:
    """One run of the prefix."""

    run: OpenRun
    start: int  # its first token in the prefix
    share: int  # rows by stored order
    known: KnownRun | None

    @property
    def stop(self) -> int:
        return self.start + self.run.layout.num_tokens


@dataclass(frozen=True)
class _Rows:
    """Rows that were read: tokens of the prefix `[layers, kv_heads, n]`, or `_NOTHING`."""

    tokens: Tokens
    rows: KVRows


class PartialPrefix:
    """A share of the rows of whole pages, the same number in each layer and KV head, for one request.

    Not thread-safe, but any thread may call it after another. Reads are the reader thread's; `choose` is numpy only.

    >>> partial = PartialPrefix.open(store, heads, budget=0.25, num_before=0, known=cache)
    >>> if partial is not None and partial.read_stored():
    ...     look_over(partial.rows())  # a forward of the query, over these rows
    ...     if partial.choose(queries).is_enough and partial.read_chosen():
    ...         admit_over(partial.rows())

    Attributes:
        num_tokens: of the prefix.
        num_rows: in each layer and head, when all is read.
        num_there: in each layer and head now.
        num_stored: in each layer and head after `read_stored`.
        probe_head: the KV head whose group's queries `choose` needs.
    """

    def __init__(self, parts: list[_Part], *, budget: float, num_before: int, known: RunCache) -> None:
        """Use `open`."""
        self._parts, self._cache = parts, known
        self._kv = parts[0].run.layout.kv
        self.probe_head = parts[0].run.header.probe_head
        self.num_tokens = parts[-1].stop
        self.num_rows = num_rows(self.num_tokens, budget)
        self._always = always(self.num_tokens, num_before)
        lengths = [part.run.layout.num_tokens for part in parts]
        shares = stored_shares(lengths, [len(self._always_of(part)) for part in parts], self.num_rows)
        for part, share in zip(parts, shares, strict=True):
            part.share = share
        self.num_stored = sum(shares)
        self._chosen: Tokens | None = None  # [layers, kv_heads, num_stored], then num_rows
        self._read: list[_Rows] = []
        self._is_closed = False

    @classmethod
    def open(
        cls, store: PageStore, heads: Sequence[PageKey], *, budget: float, num_before: int, known: RunCache
    ) -> PartialPrefix | None:
        """Find the runs that together are the pages `heads`, one behind the other, but for a few at the end, which are
        left out: `num_tokens` says how far it goes. None if there is a gap before, a run is not right, or there are
        more than `MAX_RUNS`. Reads their headers only.

        Args:
            budget: share of the rows to read, above 0 and at most 1.
            num_before: tokens of the prompt before `heads`, of which all rows are there.
            known: of this store.
        """
        parts: list[_Part] = []
        try:
            if _find(store, heads, known, parts):
                return cls(parts, budget=budget, num_before=num_before, known=known)
        except BaseException:
            _close(parts)
            raise
        _close(parts)
        return None

    @property
    def num_there(self) -> int:
        """Rows of each layer and head that `rows` has now."""
        if not self._read:
            return 0
        return int((self._read_tokens()[0, 0] != _NOTHING).sum())

    @property
    def bytes_to_read(self) -> int:
        """About what the disk will be asked for in all, for whoever plans."""
        num_bytes = 0
        for part in self._parts:
            layout = part.run.layout
            num_blocks = -(-part.share // layout.chunk_size)
            num_bytes += layout.blocks(0, num_blocks).num_bytes
            num_bytes += len(self._always_of(part)) * self._token_bytes
        num_bytes += self.bytes_to_learn
        num_picked = self.num_rows - self.num_stored
        scattered = min(_SCATTER * num_picked, self.num_tokens - self.num_stored)
        return num_bytes + int(scattered * self._token_bytes)

    @property
    def bytes_to_learn(self) -> int:
        """Of these, what is read once and kept in memory for the next: probe keys and orders."""
        num_bytes = 0
        for part in self._parts:
            if part.known is None and self.num_rows < self.num_tokens:
                layout = part.run.layout
                num_blocks = -(-part.share // layout.chunk_size)
                num_bytes += layout.probe.num_bytes
                num_bytes += sum(layout.block_head_bytes(block) for block in range(num_blocks, layout.num_blocks))
        return num_bytes

    @property
    def bytes_read(self) -> int:
        """What the disk was asked for so far, in whole units of 4 KiB."""
        return sum(part.run.counts.num_bytes for part in self._parts)

    @property
    def num_reads(self) -> int:
        """Reads so far."""
        return sum(part.run.counts.num_reads for part in self._parts)

    @property
    def num_chunks(self) -> int:
        """Chunks read so far."""
        return sum(part.run.counts.num_chunks for part in self._parts)

    def learn(self) -> bool:
        """Read no more than what is kept in memory for the next; False: a run is not right."""
        return all([self._learn(part) for part in self._parts])

    def read_stored(self) -> bool:
        """Read the rows that matter to most queries, and what a look needs; False: use the exact pages."""
        chosen = []
        for part in self._parts:
            order = part.run.order() if self._learn(part) and part.run.first(part.share) is not None else None
            if order is None:
                return self._fail()
            mine = stored_rows(order, self._always_of(part), part.share)
            if not self._take(part, part.run.at(mine), np.ones(mine.shape, bool)):
                return self._fail()
            chosen.append(mine + part.start)
        self._chosen = np.concatenate(chosen, axis=-1)
        return True

    def rows(self) -> UInt8Array:
        """The `num_there` rows that were read so far, in the order of the text, as pages `[N, page_bytes]`."""
        assert self._read, "nothing was read"
        tokens = self._read_tokens()
        order = np.argsort(tokens, axis=-1, kind="stable")[..., : self.num_there]
        return KVRows.pages_of([some.rows for some in self._read], order)

    def choose(self, queries: Float32Array) -> Choice:
        """Look for the rest with the query's own `queries`, `[layers, rows, group, head_dim]`, of the heads that share
        the probe's keys, from a run of the query over `rows()`."""
        assert self._chosen is not None, "nothing was read"
        if self.num_rows == self.num_tokens:
            self._chosen = np.broadcast_to(np.arange(self.num_tokens), (*self._chosen.shape[:2], self.num_tokens))
            return Choice(0.0, True)
        seen = look(queries, self._probe_keys(), self._chosen[:, self.probe_head])
        orders = [part.run.order() for part in self._parts]  # which `read_stored` has seen to
        order = [mine + part.start for mine, part in zip(orders, self._parts, strict=True) if mine is not None]
        self._chosen = with_probed(self._chosen, seen.largest, self.num_rows, np.concatenate(order, axis=-1))
        dropped = dropped_mass(seen.mean, self._chosen[:, self.probe_head])
        return Choice(dropped, dropped <= MAX_DROPPED_MASS)

    def read_chosen(self) -> bool:
        """Read what was chosen and is not there; False: use the exact pages."""
        assert self._chosen is not None and len(self._read) == len(self._parts), "nothing was chosen, or all is read"
        is_wanted = np.zeros((*self._chosen.shape[:2], self.num_tokens), bool)
        np.put_along_axis(is_wanted, self._chosen, True, axis=-1)
        for some in self._read:
            np.put_along_axis(is_wanted, some.tokens, False, axis=-1)
        for part in self._parts:
            if not self._read_wanted(part, is_wanted[..., part.start : part.stop]):
                return self._fail()
        return True

    def close(self) -> None:
        """Close the files; may be called twice."""
        if not self._is_closed:
            self._is_closed = True
            _close(self._parts)

    @property
    def _token_bytes(self) -> int:
        return self._kv.page_bytes // PAGE_SIZE

    def _always_of(self, part: _Part) -> Tokens:
        mine = self._always[(self._always >= part.start) & (self._always < part.stop)]
        return np.asarray(mine - part.start)

    def _learn(self, part: _Part) -> bool:
        """Have the probe's keys and the order of a run in memory, for the next, too; if all is read, neither."""
        if part.known is None and self.num_rows < self.num_tokens:
            keys, heads = part.run.probe_keys(), part.run.block_heads()
            if keys is None or heads is None:
                return False
            part.known = self._cache.keep(part.run, heads, keys)
        return True

    def _probe_keys(self) -> ProbeKeys:
        keys = [part.known.probe_keys for part in self._parts if part.known is not None]
        return np.concatenate(keys, axis=1) if len(keys) > 1 else keys[0]

    def _read_wanted(self, part: _Part, is_wanted: npt.NDArray[np.bool_]) -> bool:
        """Read the tokens of a run that are wanted: of some layers and heads more than of others."""
        num_wanted = is_wanted.sum(axis=-1)
        widest, order = int(num_wanted.max()), part.run.order()
        if widest == 0 or order is None:
            return order is not None
        tokens = np.argsort(~is_wanted, axis=-1, kind="stable")[..., :widest]
        is_some = np.arange(widest) < num_wanted[..., None]
        # who wants fewer has one of its own again, or the one that ranks first, which mostly is no further read
        again = np.where(num_wanted[..., None] > 0, tokens[..., :1], order[..., :1])
        return self._take(part, part.run.at(np.where(is_some, tokens, again)), is_some)

    def _take(self, part: _Part, read: TokenRows | None, is_some: npt.NDArray[np.bool_]) -> bool:
        if read is None:
            return False
        self._read.append(_Rows(np.where(is_some, read.tokens.astype(np.int64) + part.start, _NOTHING), read.rows))
        return True

    def _fail(self) -> bool:
        """There are no rows any more."""
        self._read, self._chosen = [], None
        return False

    def _read_tokens(self) -> Tokens:
        return np.concatenate([some.tokens for some in self._read], axis=-1)


def _find(store: PageStore, heads: Sequence[PageKey], known: RunCache, parts: list[_Part]) -> bool:
    """Add the runs that are the pages `heads`; whether they are, but for a few at the end."""
    first = 0
    while first < len(heads):
        rest = list(heads[first:])
        found = known.find(rest)
        block_heads = None if found is None else found.block_heads
        run = store.open_ordered(rest, block_heads=block_heads, chunks=known.chunks)
        if run is None:
            return bool(parts) and len(rest) <= MAX_REST_PAGES
        is_known = found is not None and found.block_heads.number == run.header.number
        parts.append(_Part(run, first * PAGE_SIZE, 0, found if is_known else None))
        if len(parts) > MAX_RUNS or run.header.probe_head != parts[0].run.header.probe_head:
            return False
        first += run.header.num_pages
    return bool(parts)


def _close(parts: Sequence[_Part]) -> None:
    for part in parts:
        with contextlib.suppress(OSError):
            part.run.close()
