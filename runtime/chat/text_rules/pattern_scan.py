"""Find regular expressions in a text that comes in pieces, and say from where on one may still become complete.

Knows an automaton, not how it was made, nor what is done where an expression is found.
"""

from __future__ import annotations

from collections.abc import Sequence

from .pattern import INSIDE, LINE_START, TEXT_START, automaton_of
from .string_scan import Found

_State = tuple[tuple[tuple[int, int], ...], int, int]


class PatternScan:
    """Reads a text until a match of one of `patterns` is complete.

    The match that is complete first is found, and of those that end there the longest; so how the text is cut into
    pieces does not matter, and a repetition at the end of an expression takes as little as it may.

    >>> scan = PatternScan([r"\\n\\d+\\."])
    >>> scan.push("One\\n1"), scan.open_from, scan.push("2. two")
    (None, 3, Found(stop=7, start=3, rule='\\\\n\\\\d+\\\\.'))

    Raises:
        InvalidParameter: as `automaton_of`.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self._automaton = automaton_of(tuple(patterns))
        # where matches begin that may become complete, and the positions that each may be at; the oldest first, and no
        # position twice: of two matches at the same one the longer is found
        self._open: list[tuple[int, int]] = []
        self._num_read, self._place = 0, TEXT_START

    @property
    def open_from(self) -> int:
        """Where the text begins that may still become a match; the end of what was read if none does."""
        return self._open[0][0] if self._open else self._num_read

    def push(self, text: str, *, may_stop: bool = True) -> Found | None:
        """Read the next piece, up to the first match that it completes.

        One that a piece completes where it may not stop is text, and may go on.
        """
        automaton = self._automaton
        for letter in text:
            taking, place = automaton.taking(letter), self._place
            left, still_open = taking, []
            for start, positions in self._open:
                if reached := automaton.behind(positions, place) & left:
                    still_open.append((start, reached))
                    left &= ~reached
            if begun := automaton.moves[place].first & left:
                still_open.append((self._num_read, begun))
            self._open, self._num_read = still_open, self._num_read + 1
            self._place = LINE_START if letter == "\n" else INSIDE
            if may_stop and still_open and (found := self._complete()) is not None:
                return found
        return None

    def state(self) -> _State:
        """What `restore` needs to go on from here."""
        return tuple(self._open), self._num_read, self._place

    def restore(self, state: _State) -> None:
        """Go on from where `state` was asked for."""
        still_open, self._num_read, self._place = state
        self._open = list(still_open)

    def _complete(self) -> Found | None:
        last = self._automaton.moves[self._place].last
        for start, positions in self._open:
            for rule, ends in zip(self._automaton.patterns, last, strict=True):
                if positions & ends:
                    return Found(self._num_read, start, rule)
        return None
