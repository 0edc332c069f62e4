"""Open an engine in a thread of its own, while something else answers or is checked.

Knows threads, and that engines are closed; not what they do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from radixlm.runtime import Engine


class Closable(Protocol):
    """Something that has to be closed."""

    def close(self) -> None:
        """Free it."""
        ...


T = TypeVar("T", bound=Closable)


class Early:
    """Opens an engine and computes a first step, perhaps while it is not sure yet that the artifact is right.

    >>> class Model:
    ...     warm_up = close = lambda self: None
    >>> early = Early(lambda path: Model())
    >>> early.begin(Path("one"))
    >>> type(early.result(Path("one"))).__name__
    'Model'
    """

    def __init__(self, open_engine: Callable[[Path], Engine]) -> None:
        self._open_engine = open_engine
        self._begun: Future[Engine] | None = None

    def begin(self, artifact: Path) -> None:
        """Open it in another thread."""
        self._begun = Future()
        threading.Thread(target=self._run, args=(artifact, self._begun), name="radixlm-early", daemon=True).start()

    def result(self, artifact: Path) -> Engine:
        """The engine, which is opened now if that was not begun. Raises what opening raised."""
        return self._opened(artifact) if self._begun is None else self._begun.result()

    def close(self) -> None:
        """Close what was begun: the artifact is wrong."""
        if self._begun is not None and self._begun.exception() is None:
            self._begun.result().close()

    def _run(self, artifact: Path, begun: Future[Engine]) -> None:
        try:
            begun.set_result(self._opened(artifact))
        except BaseException as error:
            begun.set_exception(error)

    def _opened(self, artifact: Path) -> Engine:
        engine = self._open_engine(artifact)
        try:
            engine.warm_up()
        except BaseException:
            engine.close()
            raise
        return engine


class Opening(Generic[T]):
    """Opens something slow in a thread of its own, while something else answers in its place.

    Runs `open`, and then `opened` with what it returned, or `failed` if one of them raised.

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
