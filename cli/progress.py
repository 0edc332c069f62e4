"""Show the progress of a compile: a line that is redrawn in a terminal, or a line every 5 s.

Knows streams and clocks, not what is compiled.
"""

from __future__ import annotations

import dataclasses
import io
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TextIO

if TYPE_CHECKING:
    from radixlm.runtime.progress import Progress, Stage, Unit

_TICK_S = 0.25  # interval at which the thread updates the time
_EVIDENCE_S = 1.0  # time after which a pace counts as known
_RATE_S = 5.0  # MB/s is the rate of the last seconds
_BYTES = ("bytes", "received bytes")
_BAR_WIDTH = 24  # characters
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
        self._output: _Output = (
            _TerminalLine(stream, columns or partial(_columns_of, stream)) if stream.isatty() else _Lines(stream)
        )
        self._pace = _Pace()
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

    def tick(self) -> None:
        """Update the time, if the last line is old enough."""
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
        while not self._ended.wait(_TICK_S):
            self.tick()

    def _show(self, now: float) -> None:
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
        if self._progress is not None:
            self._progress = dataclasses.replace(self._progress, done=self._progress.total)
            self._shown = now
            status = dataclasses.replace(self._status(now), bytes_per_s=self._pace.mean_bytes_per_s(now))
            self._write(lambda: self._output.end_stage(status))

    def _status(self, now: float) -> _Status:
        progress = self._progress
        if progress is not None:
            self._fraction = max(self._fraction, progress.fraction)
        return _Status(
            stage=None if progress is None else progress.stage,
            fraction=self._fraction,
            bytes_per_s=self._pace.bytes_per_s(now),
            elapsed_s=now - self._started,
            stage_s=now - self._stage_started,
            rest_s=self._pace.rest_s(now),
        )


@dataclass(frozen=True)
class _Status:
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


class _Output(Protocol):
    """Writes a status. Without a new stage, it is called at most every `interval_s` seconds."""

    interval_s: float

    def show(self, status: _Status) -> None: ...

    def end_stage(self, status: _Status) -> None: ...

    def close(self, status: _Status, *, is_done: bool) -> None: ...


class _Lines:
    """Writes a line at the beginning and end of each stage, and every 5 s."""

    interval_s = 5.0

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def show(self, status: _Status) -> None:
        if status.stage is not None:
            self._write(f"{status.stage}: {status.fraction:.0%}", status.rate, minutes(status.elapsed_s), status.rest)

    def end_stage(self, status: _Status) -> None:
        done = f"{status.stage}: done in {status.stage_s:.1f} s"
        self._write(done, status.rate, f"{status.fraction:.0%}", minutes(status.elapsed_s))

    def close(self, status: _Status, *, is_done: bool) -> None: ...

    def _write(self, *parts: str) -> None:
        self._stream.write(", ".join(part for part in parts if part) + "\n")
        self._stream.flush()


class _TerminalLine:
    """Redraws one line for the whole compile, never wider than the terminal."""

    interval_s = 0.1

    def __init__(self, stream: TextIO, columns: Callable[[], int]) -> None:
        self._stream = stream
        self._columns = columns
        self._drawn = ""
        self._bar = "█░" if "utf" in (stream.encoding or "").lower() else "#."

    def show(self, status: _Status) -> None:
        self._draw(status, status.stage or "start")

    def end_stage(self, status: _Status) -> None: ...

    def close(self, status: _Status, *, is_done: bool) -> None:
        """End the line; erase it if no stage has begun, because the error message follows."""
        if status.stage is None:
            self._stream.write("\r" + " " * len(self._drawn) + "\r" if self._drawn else "")
        else:
            self._draw(dataclasses.replace(status, bytes_per_s=None, rest_s=None), "done" if is_done else status.stage)
            self._stream.write("\n")
        self._stream.flush()

    def _draw(self, status: _Status, stage: str) -> None:
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


class _Pace:
    """Estimates the remaining time from the seconds per expected second, measured for each unit of work.

    The pace of kernels says nothing about that of bytes, because caches and disks differ. So the remaining time is
    unknown until all remaining units were measured.
    """

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._stage_started = 0.0
        self._updated = 0.0
        self._spent: dict[Unit, float] = {}  # seconds spent in earlier stages
        self._expected: dict[Unit, float] = {}  # expected seconds of the same work
        self._recent: deque[tuple[float, int]] = deque()  # times and units done in this stage, over at least _RATE_S

    def update(self, progress: Progress, now: float) -> None:
        """Record the progress at the time `now`."""
        before = self._progress
        if before is None or progress.stage != before.stage:
            if before is not None and (stage := _stage_of(before)) is not None:
                self._spent[stage.unit] = self._spent.get(stage.unit, 0.0) + now - self._stage_started
                self._expected[stage.unit] = self._expected.get(stage.unit, 0.0) + stage.seconds
            self._stage_started = now
            self._recent.clear()
        self._progress = progress
        self._updated = now
        self._recent.append((now, progress.done))
        while len(self._recent) > 1 and self._recent[1][0] <= now - _RATE_S:
            self._recent.popleft()

    def bytes_per_s(self, now: float) -> float | None:
        """Return the rate of the last seconds; None if the stage does not count bytes, or has just begun."""
        if self._progress is None or self._progress.unit not in _BYTES:
            return None
        (began, done), passed = self._recent[0], now - self._recent[0][0]
        return (self._progress.done - done) / passed if passed >= _EVIDENCE_S and began < self._updated else None

    def mean_bytes_per_s(self, now: float) -> float | None:
        """Return the rate of the whole stage, which ends now; None if it does not count bytes."""
        if self._progress is None or self._progress.unit not in _BYTES or now <= self._stage_started:
            return None
        return self._progress.total / (now - self._stage_started)

    def rest_s(self, now: float) -> float | None:
        """Return the remaining seconds of the compile; None if unknown."""
        progress = self._progress
        current = None if progress is None else _stage_of(progress)
        if progress is None or current is None:
            return None
        rest = self._updated - now
        for stage in progress.stages[progress.stages.index(current) :]:
            done = progress.stage_fraction if stage == current else 0.0
            pace = 1.0 if stage.unit == "steps" else self._pace_of(stage, current, progress.stage_fraction)
            if pace is None:
                return None
            rest += stage.seconds * (1.0 - done) * pace
        return max(rest, 0.0)

    def _pace_of(self, stage: Stage, current: Stage, done: float) -> float | None:
        """Return the seconds per expected second of a stage; None if unknown.

        They are those of the stage itself if it is the current one and has lasted long enough, else those of all work
        with its unit. `done` is the fraction of the current stage that is done.
        """
        now_spent, now_expected = self._updated - self._stage_started, current.seconds * done
        measured = [(now_spent, now_expected)] if stage == current else []
        spent, expected = self._spent.get(stage.unit, 0.0), self._expected.get(stage.unit, 0.0)
        if stage.unit == current.unit:
            spent, expected = spent + now_spent, expected + now_expected
        measured.append((spent, expected))
        return next((spent / expected for spent, expected in measured if spent >= _EVIDENCE_S and expected > 0), None)


def minutes(seconds: float) -> str:
    """Return a duration as minutes and seconds.

    >>> minutes(9.6), minutes(75), minutes(3661)
    ('0:09', '1:15', '1:01:01')
    """
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def _stage_of(progress: Progress) -> Stage | None:
    return next((stage for stage in progress.stages if stage.name == progress.stage), None)


def _columns_of(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or _DEFAULT_COLUMNS
    except (OSError, ValueError):
        return _DEFAULT_COLUMNS
