"""Load the end of a prefix while its beginning is computed: from its last page on, until both meet.

Whoever computes waits for nothing, so nothing that happens here makes a request later than without a disk. What was
read lies in memory of its own, bounded, until everything before it is in the tree. Knows requests by name only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from ..artifact.manifest import PAGE_SIZE
from ..cache.prefix_match import MatchKind, PrefixMatch
from .disk_index import StoredPrefix
from .disk_reader import DiskReader, ReadJob, ReadPiece
from .load_counts import LoadCounts
from .loaded_prefix import LoadedPrefix
from .page_inserter import PageInserter
from .prefix_plan import meet
from .rates import Rates

STAGED_BYTES = 128 << 20  # read and not yet in the tree, of all loads together
_MIN_COMPUTED = 4 * PAGE_SIZE  # tokens of a step that is cut short because the disk has the rest: fewer are dear
_PIECE_S = 0.05  # a piece is what the disk reads in this time: the last one may be read in vain


@dataclass(frozen=True)
class LoadedEnd:
    """What was put into the tree for a request that computes, or waits to: not known when it was admitted.

    `match` is what the disk had of its prompt.
    """

    name: str
    prefix: LoadedPrefix
    match: PrefixMatch

    def by_kind(self, num_computed: int) -> dict[MatchKind, int]:
        """How many tokens came from disk, of each kind, for who had computed so many."""
        rest = replace(self.prefix, start=max(self.prefix.start, num_computed))
        return rest.by_kind(self.match.tokens_by_kind, self.match.num_tokens)


@dataclass(frozen=True)
class _Follower:
    """A request whose prompt goes on like a load, and what memory had of it before."""

    memory_by_kind: Mapping[MatchKind, int]
    match: PrefixMatch


@dataclass(eq=False)
class _EndLoad:
    prefix: StoredPrefix
    first: int  # the page that the job's room begins with
    job: ReadJob
    read: int  # pages [read, len(prefix.heads)) are there, in the job's room
    there: int  # pages [0, there) are in the tree
    followers: dict[str, _Follower] = field(default_factory=dict)


class EndLoader:
    """`begin` a load beside who computes; between two steps `advance` puts in what has been met."""

    def __init__(
        self,
        inserter: PageInserter,
        reader: DiskReader,
        rates: Rates,
        counts: LoadCounts,
        *,
        page_bytes: int,
        lost: Callable[[list[bytes]], None],
    ) -> None:
        """A loader that begins nothing by itself.

        Args:
            lost: told of the keys of pages that are on disk no more, and of all behind them.
        """
        self._inserter, self._reader, self._rates, self._counts = inserter, reader, rates, counts
        self._page_bytes, self._lost = page_bytes, lost
        self._loads: dict[ReadJob, _EndLoad] = {}
        self._loaded: list[LoadedEnd] = []

    @property
    def names(self) -> list[str]:
        """The requests that a load is for."""
        return [name for load in self._loads.values() for name in load.followers]

    @property
    def room_bytes(self) -> int:
        """How much another load may read before it is met."""
        return STAGED_BYTES - sum(len(load.job.heads) for load in self._loads.values()) * self._page_bytes

    def begin(self, name: str, prefix: StoredPrefix, start: int, memory: PrefixMatch, match: PrefixMatch) -> None:
        """Load what there is room for of the end of a prefix, of which memory has `start` pages.

        Args:
            memory, match: what memory and disk have of the request's prompt.
        """
        first = max(start, len(prefix.heads) - self.room_bytes // self._page_bytes)
        heads = prefix.heads[first:]
        assert heads, "there is no room to read into"
        rate = self._rates.disk_bytes_per_s
        piece_pages = 1 if rate is None else max(1, int(rate * _PIECE_S) // self._page_bytes)
        room = np.empty((len(heads), self._page_bytes), np.uint8)
        job = ReadJob(heads, into=room, piece_pages=piece_pages)
        followers = {name: _Follower(memory.tokens_by_kind, match)}
        self._loads[job] = _EndLoad(prefix, first, job, len(prefix.heads), start, followers)
        self._reader.submit(job)
        self._counts.num_loads += 1
        self._counts.num_from_end += 1

    def join(self, name: str, prefix: StoredPrefix, memory: PrefixMatch, match: PrefixMatch) -> bool:
        """Let a request have of a load what it is loaded for another; False: there is no such load."""
        last = len(prefix.heads) - 1
        for load in self._loads.values():
            if last < len(load.prefix.heads) and load.prefix.heads[last].key == prefix.heads[last].key:
                load.followers[name] = _Follower(memory.tokens_by_kind, match)
                return True
        return False

    def take(self, piece: ReadPiece) -> None:
        """A piece came, of this loader's or of another's."""
        load = self._loads.get(piece.job)
        if load is None:
            return
        if piece.num_right < len(piece.pages):
            self._counts.num_broken += 1
            self._lost([piece.job.heads[piece.start + piece.num_right].key])
            self._end(load)
        else:
            load.read = load.first + piece.start

    def advance(self) -> None:
        """Put in what everything before is there of by now; end what is not needed any more."""
        for load in list(self._loads.values()):
            load.there = self._inserter.num_there(load.prefix)
            if load.there == len(load.prefix.heads):  # the disk was the slower one, all the way
                self._counts.num_cut += 1
                self._end(load)
            elif load.read <= load.there:
                self._put_in(load)
                self._end(load)

    def take_loaded(self) -> list[LoadedEnd]:
        """What was put in since this was asked last: for whom, and how much."""
        loaded, self._loaded = self._loaded, []
        return loaded

    def stops(self) -> dict[str, int]:
        """By name, before which position the next step had better stop: what is behind comes from disk meanwhile."""
        stops: dict[str, int] = {}
        for load in self._loads.values():
            start, stop = load.there * PAGE_SIZE, load.read * PAGE_SIZE
            met = meet(start, stop, self._rates, token_bytes=self._page_bytes / PAGE_SIZE)
            met = min(max(met, load.first * PAGE_SIZE, start + _MIN_COMPUTED), stop)
            stops |= dict.fromkeys(load.followers, met)
        return stops

    def abandon(self, name: str) -> None:
        """The request has ended, or has its prompt."""
        for load in list(self._loads.values()):
            if load.followers.pop(name, None) is not None and not load.followers:
                self._end(load)

    def end(self, namespace: bytes | None = None) -> None:
        """End all loads, or a namespace's."""
        for load in list(self._loads.values()):
            if namespace is None or load.prefix.namespace == namespace:
                self._end(load)

    def _put_in(self, load: _EndLoad) -> None:
        there, stop, room = load.there, len(load.prefix.heads), load.job.into
        assert room is not None
        if not self._inserter.insert(load.prefix, there, room[there - load.first :]):
            self._counts.num_broken += 1
            return
        self._counts.num_pages += stop - there
        for name, follower in load.followers.items():
            num_tokens = min(stop, len(follower.match.pages)) * PAGE_SIZE
            prefix = LoadedPrefix(there * PAGE_SIZE, num_tokens, follower.memory_by_kind)
            self._loaded.append(LoadedEnd(name, prefix, follower.match))

    def _end(self, load: _EndLoad) -> None:
        load.job.is_cancelled = True
        del self._loads[load.job]
