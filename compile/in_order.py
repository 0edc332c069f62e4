"""Work on all processors, and take its results in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from radixlm.runtime.artifact.cpu import default_num_threads

T = TypeVar("T")
R = TypeVar("R")

_MAX_WORKERS = 8  # they bound the memory, with what each has at once


def in_order(work: Callable[[T], R], items: Iterable[T]) -> Generator[tuple[T, R]]:
    """Each item and what `work` makes of it, in threads (NumPy lets go of the lock), a few ahead of what is taken."""
    num_workers = min(_MAX_WORKERS, default_num_threads())
    pool = ThreadPoolExecutor(num_workers)
    waiting = deque[tuple[T, Future[R]]]()
    try:
        for item in items:
            waiting.append((item, pool.submit(work, item)))
            if len(waiting) > num_workers + 1:
                first, future = waiting.popleft()
                yield first, future.result()
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()
    finally:  # an interrupt does not wait for what has not begun
        pool.shutdown(cancel_futures=True)
