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
    >>> stops.stopped
    True
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._stopped

    def push(self, text: str) -> str:
        """Take the next piece and return what can be released."""
        if self._stopped:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self._stopped, self._held = True, ""
            return text[: min(found)[1]]
        num_held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def finish(self) -> str:
        """Return what is still held back: no more text comes, so it is no stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that `stop` begins with, less than all of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
