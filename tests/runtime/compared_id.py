"""An id that counts how often it is compared: what looks each one up compares few."""

from __future__ import annotations


class Id(str):
    """Counts how often it is compared."""

    num_compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Id.num_compared += 1
        return str(self) == str(other)
