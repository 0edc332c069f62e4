"""The command line itself: what it loads, and how it fails."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner
from radixlm.cli import main
from radixlm.runtime.errors import SourceNotFound


def test_every_file_of_a_command_is_listed_with_help_and_an_example(runner: CliRunner) -> None:
    for name in main.COMMANDS:
        result = runner.invoke(main.cli, [name, "--help"])
        assert result.exit_code == 0
        assert f"\n  radixlm {name} " in result.output  # the example


def test_an_unknown_command_is_bad_input(runner: CliRunner) -> None:
    result = runner.invoke(main.cli, ["fly"])
    assert result.exit_code == 2
    assert "No such command 'fly'" in result.output


def test_the_help_of_sampling_says_what_is_usual(runner: CliRunner) -> None:
    for command in ("chat", "generate"):
        said = " ".join(runner.invoke(main.cli, [command, "--help"]).output.split())
        for usual in ("0.8; from 0 to 100", "40; 0 or more", "0.95; from 0 to 1", "0.05; from 0 to 1"):
            assert f"[default: the model's, else {usual}]" in said


@pytest.mark.parametrize("arguments", [["--help"], ["compile", "--help"], ["chat", "--help"], ["chat", "no"]])
def test_neither_help_nor_chat_loads_the_compiler(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from radixlm.cli.main import cli\n"
        f"try: cli({arguments!r})\n"
        "except SystemExit: pass\n"
        "print([name for name in ('tvm', 'radixlm.compile') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_help_loads_no_arrays() -> None:
    code = (
        "import sys\n"
        "from radixlm.cli.main import cli\n"
        "try: cli(['--help'])\n"
        "except SystemExit: pass\n"
        "print('numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "False", done.stderr


@pytest.mark.parametrize(
    "error",
    [
        SourceNotFound("there is no model at x; give a .gguf file"),
        ValueError("context_length is 3; it must be at least 16"),
        PermissionError(13, "Permission denied", "x.radixlm"),
    ],
)
def test_what_was_foreseen_is_one_line_and_exit_code_2(
    runner: CliRunner, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    result = runner.invoke(_failing_with(error, monkeypatch), ["inspect", "x"])
    assert result.exit_code == 2
    assert result.output == f"Error: {error}\n"


def test_debug_shows_where_an_error_comes_from(runner: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    error = SourceNotFound("nothing there")
    result = runner.invoke(_failing_with(error, monkeypatch), ["--debug", "inspect", "x"])
    assert result.exception is error


def test_our_own_mistakes_are_not_hidden(runner: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    error = AssertionError("impossible")
    assert runner.invoke(_failing_with(error, monkeypatch), ["inspect", "x"]).exception is error


def test_an_interrupt_is_exit_code_130(runner: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    result = runner.invoke(_failing_with(KeyboardInterrupt(), monkeypatch), ["inspect", "x"])
    assert (result.exit_code, result.output) == (130, "\n")


def _failing_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> click.Command:
    """The command line, with an `inspect` that raises `error`."""

    @click.command()
    @click.argument("artifact")
    def failing(artifact: str) -> None:
        raise error

    monkeypatch.setattr("radixlm.cli.inspect.command", failing)
    return main.cli
