"""Read each layer's part of a run's pages, from the pages themselves.

A part with the right checksum is valid, wherever it is stored. A page that was moved meanwhile is
looked up again. Knows places and files, not the content of a part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ....store.files import Files, read_all
from ....store.page_key import StoreIdentity
from ....store.record import BlockRange
from ....store.segment import Segment
from .ordered_layout import Extent, OrderedLayout, units
from .ordered_record import Checksums, chunk_checksum
from .ordered_run import UInt8Array


@dataclass
class ReadCounts:
    """The counts of reads from disk."""

    num_bytes: int = 0  # whole units
    num_reads: int = 0
    num_chunks: int = 0  # and parts of pages


@dataclass
class PageParts:
    """The parts of one run's pages, for one thread at a time; keeps the files open that it reads.

    Args:
        layout: layout of the run.
        keys: keys of its pages.
        find: returns the places of pages by key, without missing ones.
    """

    directory: Path
    files: Files
    identity: StoreIdentity
    layout: OrderedLayout
    keys: Sequence[bytes]
    find: Callable[[Sequence[bytes]], Mapping[bytes, BlockRange]]
    _places: dict[int, BlockRange] = field(default_factory=dict)  # by the page's number
    _fds: dict[int, int] = field(default_factory=dict)  # by the segment's

    def __post_init__(self) -> None:
        self._look_for(range(len(self.keys)))

    def read(
        self, parts: Sequence[tuple[int, int]], checksums: Checksums, counts: ReadCounts
    ) -> list[UInt8Array | None]:
        """Read parts by page and layer, all different; None for invalid ones.

        Raises:
            OSError, sqlite3.Error: the disk failed.
        """
        found: list[UInt8Array | None] = [None] * len(parts)
        missing = list(range(len(parts)))
        while missing:
            for i, part in self._read([(i, *parts[i]) for i in missing], counts):
                found[i] = part if chunk_checksum(part) == int(checksums[i]) else None
            missing = [i for i in missing if found[i] is None]
            if not self._look_for({parts[i][0] for i in missing}):
                break
        return found

    def close(self) -> None:
        """Close the files."""
        while self._fds:
            self.files.close(self._fds.popitem()[1])

    def _look_for(self, numbers: Iterable[int]) -> bool:
        """Look up the places of these pages; return whether one of them has moved."""
        wanted = list(numbers)
        places = self.find([self.keys[number] for number in wanted]) if wanted else {}
        now = {number: places[self.keys[number]] for number in wanted if self.keys[number] in places}
        have_moved = any(self._places.get(number) != place for number, place in now.items())
        self._places |= now
        return have_moved

    def _read(self, wanted: Iterable[tuple[int, int, int]], counts: ReadCounts) -> Iterable[tuple[int, UInt8Array]]:
        """Read these parts, given by number, page and layer, where they should be; adjacent parts are one read."""
        by_segment: dict[int, list[tuple[Extent, int]]] = {}
        for i, page, layer in wanted:
            if (place := self._places.get(page)) is not None:
                part = self.layout.part(layer)
                extent = Extent(place.offset + part.start, place.offset + part.stop)
                by_segment.setdefault(place.segment, []).append((extent, i))
        for segment, mine in by_segment.items():
            if (fd := self._fd(segment)) is None:
                continue
            mine.sort(key=lambda one: one[0].start)
            read = read_extents(self.files, fd, [extent for extent, _ in mine], counts)
            yield from zip([i for _, i in mine], read, strict=True)

    def _fd(self, segment: int) -> int | None:
        """Return the descriptor of a segment's file; None if it was removed."""
        if segment not in self._fds:
            try:
                path = self.directory / Segment(segment, self.identity).name
                self._fds[segment] = self.files.open(path, is_scattered=True)
            except FileNotFoundError:
                return None
        return self._fds[segment]


def read_extents(files: Files, fd: int, extents: Sequence[Extent], counts: ReadCounts) -> list[UInt8Array]:
    """Read ascending `extents` of a file, as many bytes as it has, in whole units of 4 KiB.

    All extents are announced to the system first, because a disk can read several at once.

    Raises:
        OSError: the disk failed.
    """
    parts: list[UInt8Array] = []
    wholes = list(units(extents))
    for whole in wholes[1:]:
        files.will_need(fd, whole.start, whole.num_bytes)
    for whole in wholes:
        buffer = np.empty(whole.num_bytes, np.uint8)
        got = read_all(files, fd, [buffer.data], whole.start)
        files.drop_cache(fd, whole.start, whole.num_bytes)
        counts.num_bytes += whole.num_bytes
        counts.num_reads += 1
        while len(parts) < len(extents) and extents[len(parts)].stop <= whole.stop:
            extent = extents[len(parts)]
            parts.append(buffer[extent.start - whole.start : min(extent.stop - whole.start, got)])
    return parts
