"""Write the status of a compile to a stream: as lines, or as one line that a terminal redraws.

Knows streams and widths, not how a status is measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TextIO

_BAR_WIDTH = 24  # characters


@dataclass(frozen=True)
class Status:
    """The facts to show. The fraction, `elapsed_s` and `remaining_s` are those of the whole compile.

    `stage` is None before the first stage. Other fields are None if unknown.
    """

    stage: str | None
    fraction: float
    bytes_per_s: float | None
    elapsed_s: float
    stage_s: float
    remaining_s: float | None

    @property
    def rate(self) -> str:
        """The rate as text, such as `120 MB/s`; empty if unknown."""
        return "" if self.bytes_per_s is None else f"{self.bytes_per_s / 1e6:,.0f} MB/s"

    @property
    def remaining(self) -> str:
        """The remaining time as text, such as `1:05 left`; empty if unknown or below a second."""
        return "" if self.remaining_s is None or self.remaining_s < 1.0 else f"{minutes(self.remaining_s)} left"


class Output(Protocol):
    """Writes a status. Without a new stage, it is called at most every `interval_s` seconds."""

    interval_s: float

    def show(self, status: Status) -> None:
        """Show the status at the beginning of a stage or during it."""
        ...

    def end_stage(self, status: Status) -> None:
        """Show that the stage of `status` is complete."""
        ...

    def say(self, line: str) -> None:
        """Write a line above the progress."""
        ...

    def close(self, status: Status, *, is_done: bool) -> None:
        """End the output. `is_done` is false after an error."""
        ...


class ProgressLines:
    """Writes a line at the beginning and end of each stage, and every 5 s."""

    interval_s = 5.0

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def show(self, status: Status) -> None:
        """Write a line with the finished fraction, unless no stage has begun."""
        if status.stage is not None:
            self._write(
                f"{status.stage}: {status.fraction:.0%}", status.rate, minutes(status.elapsed_s), status.remaining
            )

    def end_stage(self, status: Status) -> None:
        """Write a line with the duration of the stage that ended."""
        done = f"{status.stage}: done in {status.stage_s:.1f} s"
        self._write(done, status.rate, f"{status.fraction:.0%}", minutes(status.elapsed_s))

    def say(self, line: str) -> None:
        """Write the line, because each line stands alone."""
        self._write(line)

    def close(self, status: Status, *, is_done: bool) -> None:
        """Do nothing, because each line is complete."""

    def _write(self, *parts: str) -> None:
        """Write the parts that are not empty as one line."""
        self._stream.write(", ".join(part for part in parts if part) + "\n")
        self._stream.flush()


class TerminalLine:
    """Redraws one line for the whole compile, never wider than the terminal."""

    interval_s = 0.1

    def __init__(self, stream: TextIO, columns: Callable[[], int]) -> None:
        self._stream = stream
        self._columns = columns
        self._drawn = ""
        self._bar = "█░" if "utf" in (stream.encoding or "").lower() else "#."

    def show(self, status: Status) -> None:
        """Redraw the line."""
        self._draw(status, status.stage or "start")

    def end_stage(self, status: Status) -> None:
        """Do nothing, because the next stage redraws the line."""

    def close(self, status: Status, *, is_done: bool) -> None:
        """End the line; erase it if no stage has begun, because the error message follows.

        `is_done` replaces the stage's name by `done`.
        """
        if status.stage is None:
            self._erase()
        else:
            self._draw(
                dataclasses.replace(status, bytes_per_s=None, remaining_s=None), "done" if is_done else status.stage
            )
            self._stream.write("\n")
        self._stream.flush()

    def say(self, line: str) -> None:
        """Write a line in the place of the progress, which is drawn again below it."""
        self._erase()
        self._stream.write(line + "\n")
        self._stream.flush()

    def _erase(self) -> None:
        """Erase the line that is drawn."""
        self._stream.write("\r" + " " * len(self._drawn) + "\r" if self._drawn else "")
        self._drawn = ""

    def _draw(self, status: Status, stage: str) -> None:
        """Redraw the line, as much of it as fits into the terminal. `stage` is the word at its beginning."""
        num_full = int(status.fraction * _BAR_WIDTH)
        bar = self._bar[0] * num_full + self._bar[1] * (_BAR_WIDTH - num_full)
        name, percent, rate = f"{stage:<7}", f"{status.fraction:4.0%}", f"{status.rate:>10}"
        clock, remaining = f"{minutes(status.elapsed_s):>6}", status.remaining
        width = max(self._columns() - 1, 0)  # text in the last column may wrap
        for parts in (
            (name, bar, percent, rate, clock, remaining),
            (name, percent, rate, clock, remaining),
            (name, percent, clock, remaining),
            (name, percent, clock),
        ):
            line = "  ".join(parts).rstrip()
            if len(line) <= width:
                break
        line = line[:width]
        self._stream.write("\r" + line.ljust(min(len(self._drawn), width)))
        self._stream.flush()
        self._drawn = line


def minutes(seconds: float) -> str:
    """Return a duration as minutes and seconds.

    >>> minutes(9.6), minutes(75), minutes(3661)
    ('0:09', '1:15', '1:01:01')
    """
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"
