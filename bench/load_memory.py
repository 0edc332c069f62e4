"""How a process's memory goes over time: sampled from outside, and drawn as a line by least squares.

Knows Linux's /proc, and bytes.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self

import numpy as np

from .processes import memory_of

EVERY_S = 0.5
NUM_POINTS = 20
WARM_UP = 0.3  # the share of the time in which pools, arenas and caches fill up


class MemoryWatch:
    """Samples a process's memory while the block runs."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._samples: list[tuple[float, int]] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def figures(self) -> dict[str, float | list[float]]:
        """Resident bytes that no file holds, when warm and at the end, the slope between in bytes a second, and the
        course of it all in some points.
        """
        times, sizes = np.array(self._samples, np.float64).T
        warm = times >= times[0] + WARM_UP * (times[-1] - times[0])
        slope, _ = np.polyfit(times[warm], sizes[warm], 1)
        few = max(1, int(warm.sum()) // 10)
        return {
            "start_bytes": float(sizes[0]),
            "warm_bytes": float(np.median(sizes[warm][:few])),
            "end_bytes": float(np.median(sizes[-few:])),
            "bytes_per_s": float(slope),
            "course": [float(part.mean()) for part in np.array_split(sizes, NUM_POINTS) if part.size],
        }

    def _look(self) -> None:
        while not self._done.wait(EVERY_S):
            self._samples.append((time.monotonic(), memory_of(self._pid).anonymous))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
