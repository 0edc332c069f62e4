"""Sort a node's children by the text of their first page, to find those that continue a given text.

Made when a text is first searched for below a node with many children, and kept up to date. Knows bytes, not tokens.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar


class ChildNode(Protocol):
    """A child of a node."""

    node_id: int

    def spelled_page(self, spell: Callable[[int], bytes]) -> tuple[bytes, int]:
        """Return the text of its first page, and the ends of its tokens: bit `n` is set for an end after `n` bytes."""


Child = TypeVar("Child", bound=ChildNode)
NEIGHBOURS = 8  # tried on each side, if they continue the text for a while only: some can be other ids of clients
MAX_NEIGHBOURS = 256  # tried on each side, while one can still have the longest tokens before its text differs


class SpelledChildren(Generic[Child]):
    """Children of one node, sorted by the bytes of their first page."""

    def __init__(self, spell: Callable[[int], bytes]) -> None:
        self._spell = spell
        self._entries: list[tuple[bytes, int, int, Child]] = []  # with node_id and ends

    def add(self, child: Child) -> None:
        """Insert a child in order."""
        spelled, ends = child.spelled_page(self._spell)
        insort(self._entries, (spelled, child.node_id, ends, child))

    def remove(self, child: Child) -> None:
        """Remove a child."""
        spelled, ends = child.spelled_page(self._spell)
        place = bisect_right(self._entries, (spelled, child.node_id, ends, child)) - 1
        assert self._entries[place][3] is child
        del self._entries[place]

    def like(self, text: bytes) -> Iterator[tuple[Child, int | None]]:
        """Yield children that can spell the beginning of `text`, the likeliest last, each with a bound in bytes.

        The bound is the most bytes of `text` that the child can spell. It is None for children whose whole first page
        begins `text`. Of the other children only the nearest to where `text` sorts are tried.
        """
        place = self._place(text, len(self._entries))
        near = [
            *self._nearest_on_side(text, range(place - 1, -1, -1)),
            *self._nearest_on_side(text, range(place, len(self._entries))),
        ]
        yield from sorted((entry for entry in near if entry[1]), key=lambda entry: entry[1])
        # a page that `text` begins with sorts before it; the common bytes say where the next one can be
        while place > 0:
            spelled, _, _, child = self._entries[place - 1]
            common = _num_common(spelled, text)
            if common == len(spelled):
                yield child, None
                place -= 1
            else:
                place = self._place(text[:common], place)

    def _nearest_on_side(self, text: bytes, places: range) -> Iterator[tuple[Child, int]]:
        """Yield the children at `places`, the nearest first, each with how many bytes of `text` it can spell."""
        common, best = len(text), 0
        for count, place in enumerate(places[:MAX_NEIGHBOURS]):
            spelled, _, ends, child = self._entries[place]
            if not spelled.startswith(text[:common]):  # the farther away, the less is common
                common = _num_common(spelled, text)
            if count >= NEIGHBOURS and common <= best:
                break
            most = (ends & ((2 << common) - 1)).bit_length() - 1
            best = max(best, most)
            yield child, most

    def _place(self, text: bytes, stop: int) -> int:
        return bisect_right(self._entries, text, 0, stop, key=lambda entry: entry[0])


def _num_common(left: bytes, right: bytes) -> int:
    """Return how many first bytes both have in common, by bisection: each comparison is one memcmp."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left.startswith(right[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low
