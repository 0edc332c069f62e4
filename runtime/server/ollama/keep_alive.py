"""Parse `keep_alive`, the time that a model stays loaded: seconds, or a duration in Go's format.

Knows durations, not what loads and unloads models.
"""

from __future__ import annotations

import math
import re

from ...errors import InvalidParameter

_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)", re.ASCII)
_LONGEST = 64  # characters: the patterns take time that grows with the square of a text's length
_NUMBER = re.compile(r"[-+]?\d+(\.\d+)?", re.ASCII)


def keep_alive_s(value: float | str) -> float:
    """Return the seconds that a model stays loaded after a request; infinity for a negative value.

    A text with a number only is seconds, too, which Ollama refuses, but some clients send.

    Raises:
        InvalidParameter: it is not a duration.

    >>> keep_alive_s(300), keep_alive_s("1h30m"), keep_alive_s("0"), keep_alive_s(-1), keep_alive_s("-1m")
    (300.0, 5400.0, 0.0, inf, inf)
    """
    try:
        seconds = _seconds(value) if isinstance(value, str) else float(value)
    except OverflowError:  # an integer that no float holds
        seconds = None
    if seconds is None or math.isnan(seconds):
        message = f"keep_alive is {value!r:.60}; it must be seconds, or a duration such as 5m or 1h30m"
        raise InvalidParameter(message, param="keep_alive")
    return math.inf if seconds < 0 else seconds


def _seconds(text: str) -> float | None:
    """Return the seconds of a duration; None if it is invalid."""
    if len(text) > _LONGEST:
        return None
    if _NUMBER.fullmatch(text):
        return float(text)
    sign, rest = (-1.0, text[1:]) if text.startswith("-") else (1.0, text.removeprefix("+"))
    parts = list(_PART.finditer(rest))
    if not parts or "".join(part[0] for part in parts) != rest:
        return None
    return sign * math.fsum(float(part[1]) * _UNITS_S[part[2]] for part in parts)
