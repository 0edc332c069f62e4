"""Order snapshots that no sequence uses by their credit, so that the next one to evict is found without a search.

Knows slots and credits. Not how credits are computed.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable

Entry = tuple[int, int]
"""A credit and the slot that has it; the least is evicted first."""


class SnapshotQueue:
    """A heap of unused snapshots. Outdated entries stay until they are reached: O(log n) amortised.

    Args:
        is_now: returns whether a slot holds an unused snapshot of this credit. Any code that makes this true pushes the
            entry.
    """

    def __init__(self, is_now: Callable[[Entry], bool]) -> None:
        self._is_now = is_now
        self._heap: list[Entry] = []

    def __len__(self) -> int:
        """Return the number of entries, outdated ones included."""
        return len(self._heap)

    def push(self, entry: Entry, num_snapshots: int) -> None:
        """Add a snapshot whose credit is new, or that became unused; older entries of its slot are then outdated.

        Args:
            num_snapshots: the number of snapshots. If the heap is much longer, its outdated entries are removed.
        """
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * num_snapshots + 64:
            self._heap = [each for each in set(self._heap) if self._is_now(each)]
            heapq.heapify(self._heap)

    def pop(self) -> Entry | None:
        """Remove and return the entry with the least credit that is not outdated; None if there is none."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            if self._is_now(entry):
                return entry
        return None

    def missing(self, entries: Iterable[Entry]) -> Collection[Entry]:
        """Return those of these entries that are not in the queue. A correct queue has all."""
        return set(entries) - set(self._heap)
