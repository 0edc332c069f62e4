"""Sort a node's children by what their first page spells, to find those that go on as a text does.

Made when a text is first looked for below a node with many children, and kept up to date. Knows bytes, not tokens.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar


class Spelled(Protocol):
    """A child."""

    node_id: int

    def spelled_page(self, spell: Callable[[int], bytes]) -> tuple[bytes, int]:
        """What its first page spells, and where its tokens end: bit `n` is set for an end after `n` bytes."""


Child = TypeVar("Child", bound=Spelled)
NEIGHBOURS = 8  # on each side, of those that go on like the text for a while only: some may be other ids of clients
MAX_NEIGHBOURS = 256  # the same, while one may yet have the longest tokens before its text differs


class SpelledChildren(Generic[Child]):
    """Children by the bytes of their first page."""

    def __init__(self, spell: Callable[[int], bytes]) -> None:
        self._spell = spell
        self._entries: list[tuple[bytes, int, int, Child]] = []  # with node_id and ends

    def add(self, child: Child) -> None:
        """Put a child at its place."""
        spelled, ends = child.spelled_page(self._spell)
        insort(self._entries, (spelled, child.node_id, ends, child))

    def remove(self, child: Child) -> None:
        """Take a child out."""
        spelled, ends = child.spelled_page(self._spell)
        place = bisect_right(self._entries, (spelled, child.node_id, ends, child)) - 1
        assert self._entries[place][3] is child
        del self._entries[place]

    def like(self, text: bytes) -> Iterator[tuple[Child, int | None]]:
        """Children that may spell what `text` begins with, the likeliest last, and how many bytes of it at most.

        The bound is None for children whose whole first page `text` begins with. Of the other children only the nearest
        to where `text` belongs are tried.
        """
        place = self._place(text, len(self._entries))
        near = [*self._near(text, range(place - 1, -1, -1)), *self._near(text, range(place, len(self._entries)))]
        yield from sorted((entry for entry in near if entry[1]), key=lambda entry: entry[1])
        # a page that `text` begins with sorts before it; what a page has in common with it says where the next may be
        while place > 0:
            spelled, _, _, child = self._entries[place - 1]
            common = _num_common(spelled, text)
            if common == len(spelled):
                yield child, None
                place -= 1
            else:
                place = self._place(text[:common], place)

    def _near(self, text: bytes, places: range) -> Iterator[tuple[Child, int]]:
        """Children on one side, the nearest first, and up to which byte of `text` their tokens may go."""
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
    """In how many bytes both begin alike, by bisection: each comparison is one memcmp."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left.startswith(right[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low
