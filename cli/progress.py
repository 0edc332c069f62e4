"""Show how far a command is, on the error stream: a bar per stage on a terminal, else a line per stage."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Protocol, Self, TextIO


class Progress(Protocol):
    """`done` of `total` units of a stage."""

    @property
    def stage(self) -> str: ...

    @property
    def done(self) -> int: ...

    @property
    def total(self) -> int: ...


_BAR_WIDTH = 30  # characters
_REDRAW_S = 0.05


class ProgressDisplay:
    """Call it with each step of a stage; leave it as a context manager when nothing more comes.

    >>> import sys
    >>> from types import SimpleNamespace as Progress
    >>> with ProgressDisplay(sys.stdout) as display:
    ...     display(Progress(stage="read", done=1, total=2))
    ...     display(Progress(stage="read", done=2, total=2))
    ...     display(Progress(stage="build", done=0, total=1))
    read
    build
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._terminal = stream.isatty()
        self._stage: str | None = None
        self._fraction = 0.0
        self._started = 0.0  # when the stage began, by time.monotonic()
        self._drawn = 0.0  # when the bar was last drawn

    def __call__(self, progress: Progress) -> None:
        """Show `progress`; a new stage ends the one before."""
        if progress.stage != self._stage:
            self._end_stage(1.0)
            self._stage = progress.stage
            self._started = time.monotonic()
            self._drawn = 0.0
            if not self._terminal:
                self._stream.write(f"{progress.stage}\n")
                self._stream.flush()
        self._fraction = min(1.0, progress.done / progress.total) if progress.total > 0 else 0.0
        if self._terminal and time.monotonic() - self._drawn >= _REDRAW_S:
            self._draw(self._fraction)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The bar is full only if the stage ended well."""
        self._end_stage(1.0 if error is None else self._fraction)

    def _end_stage(self, fraction: float) -> None:
        if self._terminal and self._stage is not None:
            self._draw(fraction)
            self._stream.write("\n")
            self._stream.flush()

    def _draw(self, fraction: float) -> None:
        self._drawn = time.monotonic()
        num_full = int(fraction * _BAR_WIDTH)
        bar = "█" * num_full + "░" * (_BAR_WIDTH - num_full)
        elapsed_s = self._drawn - self._started
        self._stream.write(f"\r{self._stage or '':<12.12} {bar} {fraction:4.0%} {elapsed_s:6.1f} s")
        self._stream.flush()
