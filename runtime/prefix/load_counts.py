"""Count what became of loads from disk. Numbers only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LoadCounts:
    """What became of loads since the start."""

    num_loads: int = 0  # begun
    num_from_end: int = 0  # of those, beside who computed the beginning
    num_late: int = 0  # that were not there in time: the rest was computed
    num_cut: int = 0  # that turned out slower than computing
    num_broken: int = 0  # that met a page which was not right, or found no room
    num_refused: int = 0  # prefixes on disk that computing had as quickly
    num_pages: int = 0  # put into memory
