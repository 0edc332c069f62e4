"""A prompt on the command line or on standard input is continued."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner
from radixlm.cli.main import cli

if TYPE_CHECKING:
    from .conftest import FakeEngine


def test_the_continuation_is_printed(runner: CliRunner, engine: type[FakeEngine]) -> None:
    result = runner.invoke(cli, ["generate", "x.radixlm", "Once", "--max-tokens", "5"])
    assert (result.exit_code, result.output) == (0, "Hello there\n")
    [(prompt, params)] = engine.asked
    assert (prompt, params.max_tokens, params.temperature) == ("Once", 5, 0.2)


def test_a_dash_reads_the_prompt_from_standard_input(runner: CliRunner, engine: type[FakeEngine]) -> None:
    runner.invoke(cli, ["generate", "x.radixlm", "-"], input="Twice\n")
    assert engine.asked[0][0] == "Twice\n"


def test_ctrl_c_is_exit_code_130(runner: CliRunner, engine: type[FakeEngine]) -> None:
    engine.words = ["Once", None]
    assert runner.invoke(cli, ["generate", "x.radixlm", "Once"]).exit_code == 130


def test_an_empty_prompt_is_bad_input_in_one_line(runner: CliRunner, tiny_artifact: Path) -> None:
    for arguments in ([""], ["-"]):
        result = runner.invoke(cli, ["generate", str(tiny_artifact), *arguments, "--kv-cache-gb", "0.1"], input="")
        assert (result.exit_code, result.output.count("\n")) == (2, 1), result.output
        assert "the prompt is empty" in result.output


@pytest.mark.parametrize("value", ["inf", "nan"])
def test_a_cache_without_a_size_is_bad_input(runner: CliRunner, engine: type[FakeEngine], value: str) -> None:
    result = runner.invoke(cli, ["generate", "x.radixlm", "Once", "--kv-cache-gb", value])
    assert (result.exit_code, result.output) == (2, f"Error: --kv-cache-gb is {value}; it must be a number of GB\n")
