"""Each stage of a compile is named once; on a terminal it has a bar."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from radixlm.cli.progress import ProgressDisplay


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


STAGES = [("read", 0, 2), ("read", 1, 2), ("build", 0, 0), ("verify", 1, 4)]


def show(stream: io.StringIO, error: Exception | None = None) -> str:
    with ProgressDisplay(stream) as display:
        for stage, done, total in STAGES:
            display(SimpleNamespace(stage=stage, done=done, total=total))  # type: ignore[arg-type]
        if error is not None:
            raise error
    return stream.getvalue()


def test_without_a_terminal_each_stage_is_a_line() -> None:
    assert show(io.StringIO()) == "read\nbuild\nverify\n"


def test_on_a_terminal_each_stage_ends_with_a_full_bar() -> None:
    lines = [line.rsplit("\r", 1)[1] for line in show(Terminal()).split("\n") if line]
    assert [line.split()[0] for line in lines] == ["read", "build", "verify"]
    assert all("100%" in line for line in lines)


def test_a_stage_that_failed_does_not_claim_to_be_done() -> None:
    stream = Terminal()
    with pytest.raises(OSError, match="disk"):
        show(stream, OSError("disk full"))
    assert "25%" in stream.getvalue().rsplit("\r", 1)[1]
