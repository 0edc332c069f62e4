"""Open an engine in a thread, while the server already responds, or the artifact is still verified.

Knows threads, and that engines must be closed, not what they do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Generic, Protocol, Self, TypeVar

if TYPE_CHECKING:
    from radixlm.runtime import Engine


class Closable(Protocol):
    """An object that must be closed."""

    def close(self) -> None:
        """Free its resources."""
        ...


T = TypeVar("T", bound=Closable)


class Early:
    """Opens an engine and runs a first step, possibly before the artifact is verified.

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
        """Start to open the engine in another thread."""
        self._begun = Future()
        threading.Thread(target=self._run, args=(artifact, self._begun), name="radixlm-early", daemon=True).start()

    def result(self, artifact: Path) -> Engine:
        """Return the engine. Opens it now if `begin` was not called. Raises the error of opening."""
        return self._opened(artifact) if self._begun is None else self._begun.result()

    def close(self) -> None:
        """Close the engine if it was opened, because the artifact is wrong."""
        if self._begun is not None and self._begun.exception() is None:
            self._begun.result().close()

    def _run(self, artifact: Path, begun: Future[Engine]) -> None:
        """Open the engine, and put it or the error into the future. The thread's main function."""
        try:
            begun.set_result(self._opened(artifact))
        except BaseException as error:
            begun.set_exception(error)

    def _opened(self, artifact: Path) -> Engine:
        """Open the engine, and compute its first step."""
        engine = self._open_engine(artifact)
        try:
            engine.warm_up()
        except BaseException:
            engine.close()
            raise
        return engine


class Opening(Generic[T]):
    """Runs a slow `open` in a thread within the block, and closes its result when the block ends.

    Calls `opened` with the result, or `failed` if one of them raised an error. Leaving the block waits for the thread
    and raises that error, unless the block itself raised one, such as that of a signal.

    >>> import io
    >>> texts = []
    >>> with Opening(lambda: io.StringIO("text"), opened=lambda file: texts.append(file.read()), failed=print) as file:
    ...     file.wait()
    >>> texts
    ['text']
    """

    def __init__(self, open: Callable[[], T], *, opened: Callable[[T], None], failed: Callable[[], None]) -> None:
        self._open, self._opened, self._failed = open, opened, failed
        self._value: T | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="radixlm-opening", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.wait()
        self.close_value()
        if self._error is not None and error is None:
            raise self._error

    def wait(self) -> None:
        """Wait until `open` and `opened` have returned, or one of them has failed."""
        self._thread.join()

    def close_value(self) -> None:
        """Close the result if there is one yet. For any thread; can be called twice."""
        if self._value is not None:
            self._value.close()

    def _run(self) -> None:
        """Open the value and call `opened` with it, or keep the error and call `failed`. The thread's main function."""
        try:
            self._value = self._open()
            self._opened(self._value)
        except BaseException as error:
            self._error = error
            self._failed()
