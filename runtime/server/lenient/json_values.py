"""Types and functions shared by the conversions of malformed requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

MISSING: Final = object()
"""Stands for a missing value, and as a result for one to remove."""

Object = dict[str, Any]
Read = Callable[[Any, Object], Any]
"""Converts a value, given the object around it; returns the same value if there is nothing to convert."""


def each(value: Any, read: Callable[[Any], Any]) -> Any:
    """Convert the entries of a list with `read`. Returns the same list if no entry changes."""
    if not isinstance(value, list):
        return value
    new = [read(entry) for entry in value]
    return new if any(mine is not theirs for mine, theirs in zip(new, value, strict=True)) else value
