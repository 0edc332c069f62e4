"""What `radixlm serve` refuses before anything is loaded, and what it begins without."""

from __future__ import annotations

from typing import Any

import pytest
import radixlm.runtime
from click.testing import CliRunner
from radixlm.cli.serve import command
from radixlm.cli.serving import Serving


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--api-key-file", "nowhere"], "cannot read API keys from nowhere"),
        (["--cors-origin", "example.com"], "the origin 'example.com'"),
        (["--api-key", " "], "an API key is empty"),
        (["--log-kv-mb", "10"], "--log-kv-mb is given and --log-kv is not"),
    ],
)
def test_serve_says_what_is_wrong_before_it_loads_anything(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(command, ["nowhere.radixlm", "--port", "0", *arguments])
    assert result.exit_code != 0
    assert says in str(result.exception)
    assert "loading" not in result.output


def test_the_key_in_the_environment_is_one_whatever_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With spaces in it, it was as many keys as words, and each of them opened the server."""
    monkeypatch.setenv("RADIXLM_API_KEY", "correct horse battery")
    assert command.make_context("serve", ["a.radixlm"]).params["api_keys"] == ("correct horse battery",)
    keys = ["--api-key", "one", "--api-key", "two"]
    assert command.make_context("serve", ["a.radixlm", *keys]).params["api_keys"] == ("one", "two")
    monkeypatch.delenv("RADIXLM_API_KEY")
    assert command.make_context("serve", ["a.radixlm"]).params["api_keys"] == ()


@pytest.mark.parametrize("arguments", [[], ["--api-key-file", "keys"]])
def test_an_empty_key_in_the_environment_opens_no_server(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    monkeypatch.setenv("RADIXLM_API_KEY", "")
    result = CliRunner().invoke(command, ["nowhere.radixlm", "--port", "0", *arguments])
    assert result.exit_code != 0
    assert "RADIXLM_API_KEY is empty" in str(result.exception) + result.output
    assert "loading" not in result.output


def test_histories_are_truncated_by_default_where_the_server_is_told_so() -> None:
    assert command.make_context("serve", ["a.radixlm"]).params["truncation"] == "none"
    assert command.make_context("serve", ["a.radixlm", "--truncation", "middle"]).params["truncation"] == "middle"


@pytest.mark.parametrize(("arguments", "does"), [([], True), (["--no-idle-work"], False), (["--idle-work"], True)])
def test_the_engine_is_told_whether_to_work_while_it_idles(
    arguments: list[str], does: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[dict[str, Any]] = []
    monkeypatch.setattr(radixlm.runtime, "Engine", lambda artifact, **options: opened.append(options))
    monkeypatch.setattr(Serving, "run", lambda self, open_engine, told: open_engine())
    result = CliRunner().invoke(command, ["a.radixlm", *arguments])
    assert result.exit_code == 0, result.output
    assert [options["idle_work"] for options in opened] == [does]
