"""What readers of lenient shapes have in common: values of JSON, and one that is not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

MISSING: Final = object()
"""In place of a value that is not there, and of one that is to be left out."""

Object = dict[str, Any]
Read = Callable[[Any, Object], Any]
"""Returns what a value of an object means, which may be the value itself."""


def each(value: Any, read: Callable[[Any], Any]) -> Any:
    """A list with what `read` makes of its entries; itself if that is nothing new."""
    if not isinstance(value, list):
        return value
    new = [read(entry) for entry in value]
    return new if any(mine is not theirs for mine, theirs in zip(new, value, strict=True)) else value
