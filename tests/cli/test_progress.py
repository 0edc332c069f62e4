"""A compile shows stage, percent, MB/s, clock and estimated rest: on one line of a terminal, elsewhere on lines."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import pytest
from radixlm.cli.progress import ProgressDisplay
from radixlm.runtime.progress import Progress, Stage

STAGES = (
    Stage("read", "steps", 1.0),
    Stage("build", "kernels", 4.0),
    Stage("weights", "bytes", 3.0),
    Stage("verify", "bytes", 2.0),
)
MB = 1_000_000


class Terminal(io.StringIO):
    encoding = "utf-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True

    @property
    def lines(self) -> list[str]:
        """Each line as it was drawn."""
        return [line.rstrip() for line in re.split("[\r\n]", self.getvalue()) if line.strip()]


class Compile:
    """A display and its clock; time passes when the test says so."""

    def __init__(self, stream: io.StringIO, columns: int = 80) -> None:
        self.now = 0.0
        self.stream = stream
        self.display = ProgressDisplay(stream, clock=lambda: self.now, columns=lambda: columns, ticks=False)

    def at(self, now: float, stage: str, done: int, total: int) -> None:
        self.now = now
        self.display(Progress(stage, done, total, STAGES if stage != "read" or done else ()))

    def tick(self, now: float) -> None:
        self.now = now
        self.display.tick()

    def run(self) -> None:
        """Ten seconds of work, which take eleven: weights are written at 100 MB/s, and verified at 75."""
        with self.display:
            self.at(0.0, "read", 0, 1)
            self.at(1.0, "read", 1, 1)
            self.at(1.0, "build", 0, 2)
            self.at(3.0, "build", 1, 2)
            self.at(5.0, "build", 2, 2)
            for second in range(4):
                self.at(5.0 + second, "weights", 100 * MB * second, 300 * MB)
            for second in range(4):
                self.at(8.0 + second, "verify", 100 * MB * second, 300 * MB)


def test_elsewhere_each_stage_has_a_line_at_its_beginning_and_its_end() -> None:
    compiling = Compile(io.StringIO())
    compiling.run()
    assert compiling.stream.getvalue().splitlines() == [
        "read: 0%, 0:00",
        "read: done in 1.0 s, 10%, 0:01",
        "build: 10%, 0:01",
        "build: done in 4.0 s, 50%, 0:05",
        "weights: 50%, 0:05",
        "weights: done in 3.0 s, 100 MB/s, 80%, 0:08",
        "verify: 80%, 0:08, 0:02 left",
        "verify: done in 3.0 s, 100 MB/s, 100%, 0:11",
    ]


def test_elsewhere_a_line_comes_each_five_seconds_with_news_and_without() -> None:
    compiling = Compile(io.StringIO())
    compiling.at(0.0, "weights", 0, 300 * MB)
    for tenth in range(1, 101):
        compiling.at(tenth / 10, "weights", tenth * MB, 300 * MB)
    for tenth in range(101, 201):
        compiling.tick(tenth / 10)
    assert compiling.stream.getvalue().splitlines() == [
        "weights: 50%, 0:00",
        "weights: 55%, 10 MB/s, 0:05, 0:45 left",
        "weights: 60%, 10 MB/s, 0:10, 0:40 left",
        "weights: 60%, 5 MB/s, 0:15, 0:35 left",
        "weights: 60%, 3 MB/s, 0:20, 0:30 left",
    ]


def test_a_terminal_has_one_line_that_is_drawn_again() -> None:
    terminal = Terminal()
    Compile(terminal).run()
    assert terminal.getvalue().count("\n") == 1 and terminal.getvalue().endswith("\n")
    assert terminal.lines[-3:] == [
        "verify   ██████████████████████░░   93%    100 MB/s    0:10  0:01 left",
        "verify   ████████████████████████  100%    100 MB/s    0:11",
        "done     ████████████████████████  100%                0:11",
    ]


@pytest.mark.parametrize("columns", [1, 8, 20, 24, 30, 40, 60, 80, 200])
def test_a_narrow_terminal_does_not_wrap(columns: int) -> None:
    terminal = Terminal()
    Compile(terminal, columns).run()
    assert max(map(len, re.split("[\r\n]", terminal.getvalue()))) < columns
    if columns >= 24:
        assert terminal.lines[-1].startswith("done") and "100%" in terminal.lines[-1] and "0:11" in terminal.lines[-1]


def test_a_terminal_that_has_no_blocks_gets_ascii() -> None:
    terminal = Terminal()
    terminal.encoding = "ANSI_X3.4-1968"
    Compile(terminal).run()
    assert terminal.getvalue().isascii() and "####" in terminal.getvalue()


def test_the_clock_ticks_before_the_first_stage_and_an_error_leaves_nothing() -> None:
    terminal = Terminal()
    compiling = Compile(terminal)
    with pytest.raises(OSError, match="full"), compiling.display:
        compiling.tick(1.0)
        compiling.tick(2.0)
        raise OSError("disk full")
    assert [line.split()[0] for line in terminal.lines] == ["start", "start"]
    assert terminal.getvalue().endswith("\r" + " " * len(terminal.lines[-1]) + "\r")


def test_a_stage_that_failed_does_not_claim_to_be_done() -> None:
    terminal, lines = Terminal(), io.StringIO()
    for stream in (terminal, lines):
        compiling = Compile(stream)
        with pytest.raises(OSError, match="full"), compiling.display:
            compiling.at(0.0, "build", 1, 2)
            raise OSError("disk full")
    assert terminal.lines[-1].split()[0] == "build" and "30%" in terminal.lines[-1]
    assert lines.getvalue() == "build: 30%, 0:00\n"


def rest(compiling: Compile) -> str:
    """What is said to be left."""
    line = compiling.stream.getvalue().splitlines()[-1]
    return line.split(", ")[-1] if line.endswith(" left") else ""


def test_the_rest_of_the_compile_is_unknown_until_there_is_evidence_of_each_unit() -> None:
    compiling = Compile(io.StringIO())
    compiling.at(0.0, "build", 0, 40)
    compiling.at(30.0, "build", 20, 40)
    assert rest(compiling) == "", "how fast kernels are built says nothing about the disk"
    compiling.at(60.0, "weights", 0, 300 * MB)
    assert rest(compiling) == ""
    compiling.at(66.0, "weights", 100 * MB, 300 * MB)  # six times as long as expected
    assert rest(compiling) == "0:24 left", "12 s of weights, and 12 s of verifying at the same pace"
    compiling.tick(71.0)
    assert rest(compiling) == "0:19 left"


def test_a_stage_with_evidence_of_its_own_ignores_the_pace_of_others() -> None:
    compiling = Compile(io.StringIO())
    compiling.at(0.0, "weights", 0, 300 * MB)
    compiling.at(30.0, "weights", 300 * MB, 300 * MB)
    compiling.at(30.0, "verify", 0, 300 * MB)
    assert rest(compiling) == "0:20 left"
    compiling.at(35.0, "verify", 100 * MB, 300 * MB)
    assert rest(compiling) == "0:10 left"


def test_percents_never_go_back() -> None:
    fractions = [Progress(stage.name, done, 4, STAGES).fraction for stage in STAGES for done in range(5)]
    assert fractions == sorted(fractions) and fractions[-1] == 1.0
    assert Progress("read", 0, 1).fraction == Progress("download", 1, 2, STAGES).fraction == 0.0


class RealTerminal:
    """A pseudo-terminal; what is written to it is collected."""

    def __init__(self, columns: int) -> None:
        self._master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.written = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                self.written += os.read(self._master, 4096)
            except OSError:  # the other end is closed
                return

    def text(self) -> str:
        """All that was written, once the other end is closed."""
        self._reader.join(10)
        os.close(self._master)
        return self.written.decode()


def test_the_clock_of_a_real_terminal_ticks_without_news() -> None:
    terminal = RealTerminal(columns=40)
    with os.fdopen(terminal.slave, "w", encoding="utf-8") as stream, ProgressDisplay(stream) as display:
        display(Progress("build", 0, 1, STAGES))
        time.sleep(2.5)
    drawn = re.split("[\r\n]+", terminal.text())
    clocks = [line.split()[-1] for line in drawn if line.strip()]
    assert list(dict.fromkeys(clocks))[:3] == ["0:00", "0:01", "0:02"]
    assert max(map(len, drawn)) < 40


def test_a_compile_on_a_real_terminal_is_one_line(tiny_source: Path, tmp_path: Path) -> None:
    terminal = RealTerminal(columns=64)
    command = [sys.executable, "-c", "from radixlm.cli.main import main; main()", "compile"]
    arguments = [str(tiny_source), "-o", str(tmp_path / "tiny.radixlm")]
    done = subprocess.run(
        [*command, *arguments], stdout=subprocess.PIPE, stderr=terminal.slave, timeout=300, check=True
    )
    os.close(terminal.slave)
    text = terminal.text()
    assert "is ready" in done.stdout.decode()
    assert text.count("\n") == 1 and max(map(len, re.split("[\r\n]", text))) < 64
    drawn = [line.split() for line in re.split("[\r\n]+", text) if line.strip()]
    assert list(dict.fromkeys(parts[0] for parts in drawn)) == [
        *("start", "read", "build", "weights", "verify", "publish", "done")
    ]
    assert "100%" in drawn[-1]


@pytest.mark.parametrize("fails", [OSError(32, "Broken pipe"), ValueError("I/O operation on closed file")])
def test_a_stream_that_nobody_reads_ends_the_display_and_not_the_work(fails: Exception) -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise fails

    with ProgressDisplay(Broken()) as display:
        display(Progress("read", 0, 1))
        display(Progress("build", 0, 1, STAGES))


def test_without_a_stream_nothing_is_shown() -> None:
    with ProgressDisplay(None) as display:
        display(Progress("read", 0, 1))
