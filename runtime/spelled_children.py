"""Sort a node's children by what their first page spells, to find those that go on as a text does.

Made where a node has many children and a text is looked for; kept up to date from then on. Knows bytes, not tokens.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar


class Spelled(Protocol):
    """A child."""

    node_id: int

    def spelled_page(self, spell: Callable[[int], bytes]) -> bytes:
        """What its first page spells."""


Child = TypeVar("Child", bound=Spelled)
NEIGHBOURS = 8  # on each side, of those that go on like the text for a while only: some may be other ids of clients


class SpelledChildren(Generic[Child]):
    """Children by the bytes of their first page."""

    def __init__(self, spell: Callable[[int], bytes]) -> None:
        self._spell = spell
        self._entries: list[tuple[bytes, int, Child]] = []

    def add(self, child: Child) -> None:
        """Put a child at its place."""
        insort(self._entries, (child.spelled_page(self._spell), child.node_id, child))

    def remove(self, child: Child) -> None:
        """Take a child out."""
        place = bisect_right(self._entries, (child.spelled_page(self._spell), child.node_id, child)) - 1
        assert self._entries[place][2] is child
        del self._entries[place]

    def like(self, text: bytes) -> Iterator[tuple[Child, int | None]]:
        """Children that may spell what `text` begins with, the likeliest last, and how many bytes of it at most.

        None of those whose whole page it begins with; the others are the nearest to where `text` belongs.
        """
        place = self._place(text, len(self._entries))
        near = [(child, _num_common(spelled, text)) for spelled, _, child in self._near(place)]
        yield from sorted((entry for entry in near if entry[1]), key=lambda entry: entry[1])
        # whoever begins `text` sorts before it; from one that does not, what they have in common says who may
        while place > 0:
            spelled, _, child = self._entries[place - 1]
            common = _num_common(spelled, text)
            if common == len(spelled):
                yield child, None
                place -= 1
            else:
                place = self._place(text[:common], place)

    def _near(self, place: int) -> list[tuple[bytes, int, Child]]:
        return self._entries[max(place - NEIGHBOURS, 0) : place + NEIGHBOURS]

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
