"""Show the progress of a compile: a line that is redrawn in a terminal, or a line every 5 s.

Knows streams and clocks, not what is compiled.
"""

from __future__ import annotations

import dataclasses
import io
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

from .output import Output, ProgressLines, Status, TerminalLine
from .pace import Pace

if TYPE_CHECKING:
    from radixlm.runtime.progress import Progress

_TICK_S = 0.25  # interval at which the thread updates the time
_DEFAULT_COLUMNS = 80


class ProgressDisplay:
    """Shows the progress of a compile. A context manager to call with each `Progress`; a thread updates the time.

    Args:
        clock: returns seconds, as `time.monotonic` does.
        columns: returns the terminal's width; by default that of the stream.
        ticks: run the thread; otherwise call `tick`.

    >>> import sys
    >>> from radixlm.runtime.progress import Progress, Stage
    >>> stages = (Stage("read", "steps", 1.0), Stage("build", "kernels", 3.0))
    >>> with ProgressDisplay(sys.stdout, clock=lambda: 0.0) as display:
    ...     display(Progress("read", 0, 1))
    ...     display(Progress("read", 1, 1, stages))
    ...     display(Progress("build", 0, 2, stages))
    read: 0%, 0:00
    read: done in 0.0 s, 25%, 0:00
    build: 25%, 0:00
    build: done in 0.0 s, 100%, 0:00
    """

    def __init__(
        self,
        stream: TextIO | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        columns: Callable[[], int] | None = None,
        ticks: bool = True,
    ) -> None:
        self._clock = clock
        self._is_read = stream is not None  # false after writing failed: progress must not cause errors
        stream = stream or io.StringIO()
        self._output: Output = (
            TerminalLine(stream, columns or partial(_columns_of, stream)) if stream.isatty() else ProgressLines(stream)
        )
        self._pace = Pace()
        self._progress: Progress | None = None
        self._fraction = 0.0  # never decreases, even if more work becomes known
        self._started = clock()
        self._stage_started = self._started
        self._shown = self._started
        self._lock = threading.RLock()  # reentrant, because a signal handler may run while the main thread holds it
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="radixlm-progress", daemon=True) if ticks else None

    def __call__(self, progress: Progress) -> None:
        """Show `progress`. A new stage ends the one before."""
        with self._lock:
            now = self._clock()
            begins = self._progress is None or progress.stage != self._progress.stage
            if begins:
                self._end_stage(now)
                self._stage_started = now
            self._progress = progress
            self._pace.update(progress, now)
            if begins or now - self._shown >= self._output.interval_s:
                self._show(now)

    def say(self, line: str) -> None:
        """Write a line above the progress."""
        with self._lock:
            self._write(lambda: self._output.say(line))

    def tick(self) -> None:
        """Redraw the line with the elapsed time, unless it was written less than `interval_s` ago."""
        with self._lock:
            now = self._clock()
            if now - self._shown >= self._output.interval_s:
                self._show(now)

    def __enter__(self) -> Self:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the display. The last stage is complete unless there was an error."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            now = self._clock()
            if error is None:
                self._end_stage(now)
            status = self._status(now)
            self._write(lambda: self._output.close(status, is_done=error is None))

    def _run(self) -> None:
        """Call `tick` regularly until the display ends; the thread's function."""
        while not self._ended.wait(_TICK_S):
            self.tick()

    def _show(self, now: float) -> None:
        """Write the status at the time `now`."""
        self._shown = now
        status = self._status(now)
        self._write(lambda: self._output.show(status))

    def _write(self, write: Callable[[], None]) -> None:
        """Write to the stream, unless writing failed before."""
        if self._is_read:
            try:
                write()
            except (OSError, ValueError):
                self._is_read = False

    def _end_stage(self, now: float) -> None:
        """Show the current stage as complete, with its duration and mean rate. Does nothing before the first stage."""
        if self._progress is not None:
            self._progress = dataclasses.replace(self._progress, done=self._progress.total)
            self._shown = now
            status = dataclasses.replace(self._status(now), bytes_per_s=self._pace.mean_bytes_per_s(now))
            self._write(lambda: self._output.end_stage(status))

    def _status(self, now: float) -> Status:
        """Return what to show now: the stage, the finished fraction, the rate, elapsed and remaining seconds."""
        progress = self._progress
        if progress is not None:
            self._fraction = max(self._fraction, progress.fraction)
        return Status(
            stage=None if progress is None else progress.stage,
            fraction=self._fraction,
            bytes_per_s=self._pace.bytes_per_s(now),
            elapsed_s=now - self._started,
            stage_s=now - self._stage_started,
            remaining_s=self._pace.remaining_s(now),
        )


def _columns_of(stream: TextIO) -> int:
    """Return the width of a stream's terminal in characters; `_DEFAULT_COLUMNS` if it is unknown."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or _DEFAULT_COLUMNS
    except (OSError, ValueError):
        return _DEFAULT_COLUMNS
