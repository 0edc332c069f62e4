"""Hold snapshots that no sequence uses by how much they are worth: the next one to go is found without a look at all.

Knows slots and credits. Not what these are made of.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable

Entry = tuple[int, int]
"""A credit and the slot that has it, the least first."""


class SnapshotQueue:
    """A heap of entries in which outdated ones stay until they are met: O(log n) amortised.

    Args:
        is_now: whether a slot holds a snapshot of this credit that no sequence uses. Whatever makes that true pushes
            the entry.
    """

    def __init__(self, is_now: Callable[[Entry], bool]) -> None:
        self._is_now = is_now
        self._heap: list[Entry] = []

    def __len__(self) -> int:
        """Entries, outdated ones included."""
        return len(self._heap)

    def push(self, entry: Entry, most: int) -> None:
        """Add an entry; `most` are true at most."""
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * most + 64:
            self._heap = [each for each in set(self._heap) if self._is_now(each)]
            heapq.heapify(self._heap)

    def pop(self) -> Entry | None:
        """Take out the least entry that is true; None if none is."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            if self._is_now(entry):
                return entry
        return None

    def missing(self, entries: Iterable[Entry]) -> Collection[Entry]:
        """Those of these that are not in it: none, ever."""
        return set(entries) - set(self._heap)
