"""Let Ctrl-C, SIGTERM and SIGHUP end a compile soon, with their own exceptions. Knows signals, nothing else."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def interrupts_kept() -> Iterator[Callable[[], None]]:
    """Raise a signal handler's exception again if other code lost it. Yields a check to call regularly.

    TVM turns an exception in a callback into a RuntimeError. Python drops one that is raised in a destructor or in a
    callback from C. Only the main thread gets signals; in other threads this does nothing.
    """
    arrived: list[int] = []
    previous = _handlers() if threading.current_thread() is threading.main_thread() else {}

    def remembering(handler: Callable[[int, FrameType | None], object]) -> Callable[[int, FrameType | None], object]:
        def handle(number: int, frame: FrameType | None) -> None:
            arrived.append(number)
            handler(number, frame)

        return handle

    def check() -> None:
        if arrived:
            _restore(previous)
            for number in arrived:
                signal.raise_signal(number)

    for number, handler in previous.items():
        signal.signal(number, remembering(handler))
    try:
        yield check
    except Exception:
        check()
        raise
    finally:
        _restore(previous)


def _handlers() -> dict[int, Callable[[int, FrameType | None], object]]:
    """Return the handlers that are Python functions; SIGTERM's default ends the process without them."""
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    return {number: handler for number, handler in handlers.items() if callable(handler)}


def _restore(handlers: dict[int, Callable[[int, FrameType | None], object]]) -> None:
    """Set the signals' handlers."""
    for number, handler in handlers.items():
        signal.signal(number, handler)
