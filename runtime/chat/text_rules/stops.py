"""End a reply's text before the first stop string, or the first match of a stop expression.

Knows text in pieces; not tokens, nor what ends a reply beside its text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from .pattern_scan import PatternScan
from .string_scan import Found, StringScan


class Scan(Protocol):
    """Reads a text until one of its rules is complete."""

    @property
    def open_from(self) -> int: ...

    def push(self, text: str, *, may_stop: bool = True) -> Found | None: ...

    def state(self) -> Any: ...

    def restore(self, state: Any) -> None: ...


class Stops:
    """Passes text through until a stop string or expression is complete; neither it nor what follows is ever released.

    The one that is completed first wins, and of those completed by the same character the longest; so how the text was
    cut into pieces does not matter.

    >>> stops = Stops(["\\nUser:"])
    >>> stops.push("Hello.\\nUs"), stops.push("er"), stops.push(": hi")
    ('Hello.', '', '')
    >>> stops.matched
    '\\nUser:'
    """

    def __init__(self, strings: Sequence[str] = (), patterns: Sequence[str] = ()) -> None:
        self._scans: list[Scan] = []
        if strings:
            self._scans.append(StringScan(strings))
        if patterns:
            self._scans.append(PatternScan(patterns))
        self._held, self._num_released = "", 0
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string or expression that was found, as it was asked for; None: none was."""
        return self._matched

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Take the next piece and return what can be released.

        What a piece completes where it may not stop is text; a later piece may complete what begins in this.
        """
        if self._matched is not None:
            return ""
        if not self._scans:
            return text
        self._held += text
        found = [each for scan in self._scans if (each := scan.push(text, may_stop=may_stop)) is not None]
        if found:
            first = min(found)
            self._matched = first.rule
            released, self._held = self._released(first.start), ""
            return released
        return self._released(min(scan.open_from for scan in self._scans))

    def finish(self) -> str:
        """Return what is still held back: no more text comes, so it is no stop."""
        return self._released(self._num_released + len(self._held))

    def state(self) -> Any:
        """What `restore` needs to go on from here."""
        return [scan.state() for scan in self._scans], self._held, self._num_released, self._matched

    def restore(self, state: Any) -> None:
        """Go on from where `state` was asked for."""
        states, self._held, self._num_released, self._matched = state
        for scan, each in zip(self._scans, states, strict=True):
            scan.restore(each)

    def _released(self, stop: int) -> str:
        """The text up to a place that nothing is held back before any more."""
        released = self._held[: stop - self._num_released]
        self._held = self._held[len(released) :]
        self._num_released += len(released)
        return released
