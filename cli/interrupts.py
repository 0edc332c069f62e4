"""What Ctrl-C does for a while, instead of raising KeyboardInterrupt at whatever is being done.

An exception hits cleaning up too, so that two quick ones would end the program. Knows signals only.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def interrupts(action: Callable[[], None]) -> Iterator[None]:
    """Call `action` for each SIGINT within the block; it runs in the main thread, which must enter it."""
    previous = signal.signal(signal.SIGINT, lambda signum, frame: action())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
