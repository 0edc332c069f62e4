"""Open something slow while something else answers in its place.

Knows a thread and what it brings back, not what that is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class Closable(Protocol):
    """What is opened."""

    def close(self) -> None:
        """Free it."""
        ...


T = TypeVar("T", bound=Closable)


class Opening(Generic[T]):
    """Runs `open` in a thread, and then `opened` or, if it raised, `failed`; the thread is this one's own.

    >>> import io
    >>> texts = []
    >>> opening = Opening(lambda: io.StringIO("text"), opened=lambda file: texts.append(file.read()), failed=print)
    >>> opening.close()
    >>> texts
    ['text']
    """

    def __init__(self, open: Callable[[], T], *, opened: Callable[[T], None], failed: Callable[[], None]) -> None:
        self._open, self._opened, self._failed = open, opened, failed
        self._value: T | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="radixlm-opening", daemon=True)
        self._thread.start()

    def close_value(self) -> None:
        """Close what was opened, if it was by now; harmless twice, and from any thread."""
        if self._value is not None:
            self._value.close()

    def close(self) -> None:
        """Wait for the end of opening, close what was opened, and raise what opening raised."""
        self._thread.join()
        self.close_value()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._value = self._open()
            self._opened(self._value)
        except BaseException as error:
            self._error = error
            self._failed()
