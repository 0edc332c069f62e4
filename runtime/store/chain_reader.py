"""Find the pages of a prompt in the index and read them, while somebody else moves and removes pages.

Knows index and records, for one thread at a time; reads them again where they moved in between.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .files import Files
from .index import Index
from .page_head import PageHead, StoreIdentity
from .page_reader import PageReader
from .record import MissKind, Place
from .recovery import INDEX


@dataclass(frozen=True)
class ChainRead:
    """How many of the first pages are right, and why the next one is not."""

    num_read: int
    num_bytes: int  # asked of the disk
    miss: MissKind | None
    bad_key: bytes | None  # of a page that is in the index, and wrong


class ChainReader:
    """Raises OSError and sqlite3.Error where the disk fails."""

    def __init__(self, directory: Path, files: Files, identity: StoreIdentity) -> None:
        self._index = Index.open_to_read(directory / INDEX)
        self._pages = PageReader(directory, files, identity)

    def read(self, heads: Sequence[PageHead], out: NDArray[np.uint8], bad: Set[bytes]) -> ChainRead:
        """Fill `out` with pages up to the first that cannot be had.

        Args:
            bad: keys that the index still has and must not have.
        """
        num_read, num_bytes, places = 0, 0, self._places(heads, bad)
        while True:
            result = self._pages.read(heads[num_read:], places, out[num_read:])
            num_read, num_bytes = num_read + result.num_read, num_bytes + result.num_bytes
            if result.miss is None or result.miss == "absent":
                return ChainRead(num_read, num_bytes, result.miss, None)
            was = places[result.num_read]
            places = self._places(heads[num_read:], bad)
            if not places:  # evicted or discarded while we read
                return ChainRead(num_read, num_bytes, "gone", None)
            if places[0] == was:  # not moved: the page itself is wrong
                return ChainRead(num_read, num_bytes, result.miss, heads[num_read].key)

    def forget(self, segments: Sequence[int]) -> None:
        """Close the files of segments that are no more."""
        for segment in segments:
            self._pages.forget(segment)

    def close(self) -> None:
        """Close files and index."""
        self._pages.close()
        self._index.close()

    def _places(self, heads: Sequence[PageHead], bad: Set[bytes]) -> list[Place]:
        """Where the first of `heads` lie, up to one that is not there."""
        found = self._index.find([head.key for head in heads])
        places = (None if head.key in bad else found.get(head.key) for head in heads)
        return [place for place in takewhile(lambda place: place is not None, places) if place is not None]
