"""The command line itself: what it loads, and how it fails."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner
from radixlm.cli import main
from radixlm.cli.help_sections import FLAGS_ELSEWHERE, SECTIONS
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


def test_only_options_with_a_similar_name_are_suggested(runner: CliRunner) -> None:
    def error(*arguments: str) -> str:
        return runner.invoke(main.cli, arguments).output.splitlines()[-1]

    assert "'--model-id', '--models'" in error("serve", "--model", "smollm2") and "--help" in error("serve", "--hel")
    for command in ("serve", "chat", "compile", "inspect"):
        assert "--help" not in error(command, "--model", "smollm2")


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
    ("error", "line"),
    [
        (SourceNotFound("there is no model at x; give a .gguf file"), "there is no model at x; give a .gguf file"),
        (ValueError("context_length is 3; it must be 16"), "context_length is 3; it must be 16"),
        (PermissionError(13, "Permission denied", "x.radixlm"), "x.radixlm: Permission denied"),
        (OSError("the disk is gone"), "the disk is gone"),
        (
            OSError(12, "Cannot allocate memory"),
            "out of memory; end other programs, lower --kv-cache-gb, or choose a smaller model",
        ),
    ],
)
def test_what_was_foreseen_is_one_line_and_exit_code_2(
    runner: CliRunner, monkeypatch: pytest.MonkeyPatch, error: Exception, line: str
) -> None:
    result = runner.invoke(_failing_with(error, monkeypatch), ["inspect", "x"])
    assert result.exit_code == 2
    assert result.output == f"Error: {line}\n"


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


@pytest.mark.parametrize("name", ["serve", "chat", "generate"])
def test_every_option_is_under_a_heading(runner: CliRunner, name: str) -> None:
    command = main.cli.get_command(click.Context(main.cli), name)
    assert command is not None
    command.get_params(click.Context(command))  # without the group; click keeps the option for help that it makes here
    said = runner.invoke(main.cli, [name, "-h"]).output
    _, *rest = said.partition("\nOptions:\n")[2].split()
    assert rest[:1] == ["--help"] or rest[:2] == ["-h,", "--help"] or rest[0] == "--help", rest[:4]
    headings = [line.rstrip(":") for line in said.splitlines() if line.rstrip(":") in SECTIONS]
    assert headings == [each for each in SECTIONS if each in headings] and len(headings) >= 3


def test_each_command_has_one_whole_line_and_an_unknown_one_a_suggestion(runner: CliRunner) -> None:
    said = runner.invoke(main.cli, ["-h"], terminal_width=100).output
    for name, summary in main.COMMANDS.items():
        assert f"{name} " in said and summary in said and summary.endswith(".")
    assert "did you mean models?" in runner.invoke(main.cli, ["modles"]).output


@pytest.mark.parametrize(
    ("arguments", "instead"),
    [
        *(([name], f"use {instead}") for name, instead in main.COMMANDS_ELSEWHERE.items()),
        (["chat", "x", "--temp", "0"], "use --temperature\n"),
        (["generate", "x", "Hi", "-n", "5"], "use --max-tokens\n"),
        (["serve", "x", "--ctx-size=4096"], "use --context-length\n"),
        (["run", "x", "-c", "4096"], "use --context-length\n"),
        (["run", "-m", "x"], "give MODEL without a flag\n"),
        (["run", "x", "-ngl", "99"], "models run on the CPU\n"),
        (["serve", "x", "-t", "2"], "use --threads\n"),
        (["serve", "x", "-n", "5"], "use --max-tokens of another command, such as radixlm generate\n"),
        (["bench", "x", "-np", "4"], "use --max-num-seqs of another command, such as radixlm serve\n"),
    ],
)
def test_words_of_other_tools_are_answered_with_ours(runner: CliRunner, arguments: list[str], instead: str) -> None:
    refused = runner.invoke(main.cli, arguments)
    assert refused.exit_code == 2 and instead in refused.output


def test_every_flag_for_one_of_another_tool_exists(runner: CliRunner) -> None:
    said = "".join(runner.invoke(main.cli, [name, "-h"]).output for name in ("serve", "generate"))
    flags = {flag for flag in FLAGS_ELSEWHERE.values() if flag.startswith("--")}
    assert flags and not [flag for flag in flags if f"{flag} " not in said]
    assert not main.COMMANDS.keys() & main.COMMANDS_ELSEWHERE


@pytest.mark.parametrize("command", ["chat", "run", "generate", "serve"])
def test_the_context_can_be_limited(runner: CliRunner, command: str) -> None:
    assert "--context-length TOKENS" in runner.invoke(main.cli, [command, "-h"]).output
