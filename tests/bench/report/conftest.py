"""What the tests of sections share."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

Lines = Callable[[Iterable[object]], list[str]]


@pytest.fixture
def lines() -> Lines:
    """The lines of a section's tables, without headers and rules."""

    def found(section: Iterable[object]) -> list[str]:
        tables = [part.splitlines() for part in section if isinstance(part, str) and part.startswith("|")]
        return [line for table in tables for line in table[2:]]

    return found
