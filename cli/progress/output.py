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
    """The facts to show. The fraction, `elapsed_s` and `rest_s` are those of the whole compile.

    `stage` is None before the first stage. Other fields are None if unknown.
    """

    stage: str | None
    fraction: float
    bytes_per_s: float | None
    elapsed_s: float
    stage_s: float
    rest_s: float | None

    @property
    def rate(self) -> str:
        return "" if self.bytes_per_s is None else f"{self.bytes_per_s / 1e6:,.0f} MB/s"

    @property
    def rest(self) -> str:
        return "" if self.rest_s is None or self.rest_s < 1.0 else f"{minutes(self.rest_s)} left"


class Output(Protocol):
    """Writes a status. Without a new stage, it is called at most every `interval_s` seconds."""

    interval_s: float

    def show(self, status: Status) -> None: ...

    def end_stage(self, status: Status) -> None: ...

    def say(self, line: str) -> None: ...

    def close(self, status: Status, *, is_done: bool) -> None: ...


class ProgressLines:
    """Writes a line at the beginning and end of each stage, and every 5 s."""

    interval_s = 5.0

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def show(self, status: Status) -> None:
        if status.stage is not None:
            self._write(f"{status.stage}: {status.fraction:.0%}", status.rate, minutes(status.elapsed_s), status.rest)

    def end_stage(self, status: Status) -> None:
        done = f"{status.stage}: done in {status.stage_s:.1f} s"
        self._write(done, status.rate, f"{status.fraction:.0%}", minutes(status.elapsed_s))

    def say(self, line: str) -> None:
        self._write(line)

    def close(self, status: Status, *, is_done: bool) -> None: ...

    def _write(self, *parts: str) -> None:
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
        self._draw(status, status.stage or "start")

    def end_stage(self, status: Status) -> None: ...

    def close(self, status: Status, *, is_done: bool) -> None:
        """End the line; erase it if no stage has begun, because the error message follows."""
        if status.stage is None:
            self._erase()
        else:
            self._draw(dataclasses.replace(status, bytes_per_s=None, rest_s=None), "done" if is_done else status.stage)
            self._stream.write("\n")
        self._stream.flush()

    def say(self, line: str) -> None:
        self._erase()
        self._stream.write(line + "\n")
        self._stream.flush()

    def _erase(self) -> None:
        self._stream.write("\r" + " " * len(self._drawn) + "\r" if self._drawn else "")
        self._drawn = ""

    def _draw(self, status: Status, stage: str) -> None:
        num_full = int(status.fraction * _BAR_WIDTH)
        bar = self._bar[0] * num_full + self._bar[1] * (_BAR_WIDTH - num_full)
        name, percent, rate = f"{stage:<7}", f"{status.fraction:4.0%}", f"{status.rate:>10}"
        clock, rest = f"{minutes(status.elapsed_s):>6}", status.rest
        width = max(self._columns() - 1, 0)  # text in the last column may wrap
        for parts in (
            (name, bar, percent, rate, clock, rest),
            (name, percent, rate, clock, rest),
            (name, percent, clock, rest),
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
