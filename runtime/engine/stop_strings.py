"""Find stop strings in text that arrives in pieces, and hold back what may become one.

Knows text only.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes text through until a stop string is complete; neither it nor what follows is ever released.

    The stop string that is completed first wins, and of those completed by the same character the longest; so
    how the text was cut into pieces does not matter.

    >>> stops = StopStrings(["\\nUser:"])
    >>> stops.push("Hello.\\nUs"), stops.push("er"), stops.push(": hi")
    ('Hello.', '', '')
    >>> stops.matched
    '\\nUser:'
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that was found; None: none was."""
        return self._matched

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Take the next piece and return what can be released.

        A stop string that a piece completes where it may not stop is text; a later piece may complete one that begins
        in this.
        """
        if self._matched is not None:
            return ""
        if not self._stops:
            return text
        num_held, text = len(self._held), self._held + text
        if may_stop and (found := self._first(text, num_held)) is not None:
            start, end = found
            self._matched, self._held = text[start:end], ""
            return text[:start]
        num_held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def finish(self) -> str:
        """Return what is still held back: no more text comes, so it is no stop string."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str, num_held: int) -> tuple[int, int] | None:
        """Where the stop string is that is complete first beyond the first `num_held` characters."""
        begins = ((stop, text.find(stop, max(0, num_held - len(stop) + 1))) for stop in self._stops)
        found = [(start + len(stop), start) for stop, start in begins if start >= 0]
        if not found:
            return None
        end, start = min(found)
        return start, end


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that `stop` begins with, less than all of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
