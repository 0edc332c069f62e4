"""What `radixlm serve` refuses before anything is loaded, and what it begins without."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import click
import httpx
import pytest
import radixlm.runtime
from click.testing import CliRunner
from radixlm.cli import serving
from radixlm.cli.environment import OTHER_VARIABLES
from radixlm.cli.main import cli
from radixlm.cli.serve import command
from radixlm.cli.serving import Serving
from radixlm.cli.several.worker_flags import worker_environment
from radixlm.runtime.engine.engine import Engine
from radixlm.runtime.server.http.uvicorn_server import Address
from radixlm.runtime.server.server_options import ServerOptions

from ..runtime.server.real_server import real_engine

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--api-key-file", "nowhere"], "cannot read API keys from nowhere"),
        (["--cors-origin", "example.com"], "the origin 'example.com'"),
        (["--api-key", " "], "an API key is empty"),
        (["--metrics-key", ""], "--metrics-key is empty"),
        (["--metrics-key", " "], "an API key is empty"),
        (["--allowed-host", ""], "--allowed-host is empty"),
        (["--record", "/nowhere/file"], "--record /nowhere/file cannot be written"),
        (["--root-path", "llm"], "the root path 'llm' is not of the form /path"),
        (["--ssl-keyfile", __file__], "--ssl-keyfile is given and --ssl-certfile is not"),
        (["--log-kv-mb", "10"], "--log-kv-mb is given and --log-kv is not"),
        (["--record-mb", "10"], "--record-mb is given and --record is not"),
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


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        ([], {}),
        (["--model-id", "a", "--model-id", "*"], {"model_ids": ("a", "*")}),
        (["--api-key", "one", "--cors-origin", "*"], {"api_keys": ("one",), "cors_origins": ("*",)}),
        (["--ignore-prompt-cache-key", "--strict"], {"ignores_prompt_cache_key": True, "is_strict": True}),
        (["--heed-prompt-cache-key"], {}),
        (["--metrics-key", "prometheus"], {"metrics_key": "prometheus"}),
        (["--allowed-host", "a.lan", "--allowed-host", "b.lan"], {"hosts": ("a.lan", "b.lan")}),
        (["--truncation", "middle", "--log-prompts"], {"truncation": "middle", "logs_prompts": True}),
    ],
)
def test_the_server_gets_the_options_that_its_flags_say(
    arguments: list[str], asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[ServerOptions] = []
    monkeypatch.setattr(Serving, "run", lambda self, *others: told.append(self.options))
    result = CliRunner().invoke(command, ["a.radixlm", *arguments])
    assert result.exit_code == 0, result.output
    assert told == [ServerOptions(**asked)]


@pytest.mark.parametrize(("arguments", "does"), [([], True), (["--no-idle-work"], False), (["--idle-work"], True)])
def test_the_engine_is_told_whether_to_work_while_it_idles(
    arguments: list[str], does: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[dict[str, Any]] = []
    monkeypatch.setattr(radixlm.runtime, "Engine", lambda artifact, **options: opened.append(options))
    monkeypatch.setattr(Serving, "run", lambda self, find_artifact, open_engine, told: open_engine("a.radixlm"))
    result = CliRunner().invoke(command, ["a.radixlm", *arguments])
    assert result.exit_code == 0, result.output
    assert [options["idle_work"] for options in opened] == [does]


class Seen(Exception):
    """There is nothing more to see: the server may end."""


def test_the_server_is_ready_once_a_first_step_was_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was ready before: the first prompt took four times as long, and the next reply decoded at a fifth."""
    said: list[str] = []
    health: list[tuple[str, int]] = []

    def look(when: str) -> None:
        [url] = [word for word in said[0].split() if word.endswith("/health")]
        health.append((when, httpx.get(url).status_code))

    def open_engine(artifact: Path) -> Engine:
        engine, model = real_engine()
        model.before = lambda batch: look("a step")
        return engine

    def opened(engine: Engine) -> None:
        look("opened")
        raise Seen

    monkeypatch.setattr(serving, "read_manifest", lambda path: None)
    monkeypatch.setattr(Serving, "_say", lambda self, text: said.append(text))
    with pytest.raises(Seen):
        Serving("fake.radixlm", Address("127.0.0.1", 0), ServerOptions(), log_format="text", grace_s=0.0).run(
            lambda meanwhile, written, progressed: Path("fake.radixlm"), open_engine, opened
        )
    assert health == [("a step", 503), ("a step", 503), ("opened", 200)]  # the second step tells what one costs


def test_a_certificate_that_cannot_be_used_is_refused_before_anything_listens() -> None:
    result = CliRunner().invoke(command, ["nowhere.radixlm", "--port", "0", "--ssl-certfile", __file__])
    assert "cannot be used" in str(result.exception) and "loading" not in result.output


def test_every_option_has_a_variable_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    context = command.make_context("serve", ["a.radixlm"])
    options = [
        param for param in command.get_params(context) if param.param_type_name == "option" and not param.is_eager
    ]
    variables = [param.envvar for param in options]
    assert len(set(variables)) == len(variables) > 40 and None not in variables
    for name, value in {
        "PORT": "9",
        "KV_CACHE_GB": "2",
        "CORS_ORIGIN": "https://a.b https://c.d",
        "STRICT": "1",
    }.items():
        monkeypatch.setenv(f"RADIXLM_{name}", value)
    params = command.make_context("serve", ["a.radixlm"]).params
    assert (params["port"], params["kv_cache_bytes"], params["is_strict"]) == (9, 2_000_000_000, True)
    assert params["cors_origins"] == ("https://a.b", "https://c.d")
    assert command.make_context("serve", ["a.radixlm", "--port", "7"]).params["port"] == 7, "a flag is stronger"


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("PORT", "abc", "'RADIXLM_PORT': 'abc' is not a valid integer"),
        ("KV_CACHE_GB", "-1", "RADIXLM_KV_CACHE_GB is -1.0; it must be"),
        ("RECORD_MB", "5", "RADIXLM_RECORD_MB is given and --record is not"),
        ("STORE_GB", "5", "RADIXLM_STORE_GB is given and --store is not"),
    ],
)
def test_an_error_names_the_variable_that_has_the_value(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, says: str
) -> None:
    def message(*arguments: str) -> str:
        result = CliRunner().invoke(cli, ["serve", "nowhere.gguf", "--uds", "s", *arguments])
        assert result.exit_code == 2
        return result.output

    monkeypatch.setenv(f"RADIXLM_{name}", value)
    assert says in message()
    flag = f"--{name.lower().replace('_', '-')}"
    said = message(flag, value)
    assert flag in said and "RADIXLM_" not in said, "a flag wins"


def test_an_unknown_variable_is_warned_about_once_and_kept_from_other_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RADIXLM_KV_CACHE", "2")
    monkeypatch.setenv("RADIXLM_XYZZY", "2")
    for name in ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT_8000_TCP", "PORT_8000_TCP_ADDR"):
        monkeypatch.setenv(f"RADIXLM_{name}", "10.0.0.1")  # as Kubernetes does for a service that is called radixlm
    monkeypatch.setenv("RADIXLM_PORT", "tcp://10.0.0.1:8000")
    result = CliRunner().invoke(cli, ["serve", "nowhere.gguf"])
    first, second, error = result.stderr.splitlines()
    assert first == "warning: RADIXLM_KV_CACHE is no option, and is ignored; did you mean RADIXLM_KV_CACHE_GB?"
    assert second == "warning: RADIXLM_XYZZY is no option, and is ignored; radixlm serve --help lists the options"
    assert "nowhere.gguf does not exist" in error
    lines = CliRunner().invoke(cli, ["serve", "nowhere.gguf", "--log-format", "json"]).stderr.splitlines()
    assert [json.loads(line)["level"] for line in lines] == ["warning", "warning", "error"]
    context = command.make_context("serve", ["a.gguf"])
    assert "RADIXLM_XYZZY" not in worker_environment(context) and "PATH" in worker_environment(context)


def test_every_variable_of_the_code_and_the_tests_is_known() -> None:
    context = command.make_context("serve", ["a.gguf"])
    known = {param.envvar for param in command.get_params(context) if isinstance(param, click.Option)}
    folders = ("bench", "cli", "compile", "docs", "examples", "package", "runtime", "tests", "tokenizer_fix")
    files = [ROOT / "Makefile", *(file for folder in folders for file in (ROOT / folder).rglob("*.[pm][yd]"))]
    texts = [file.read_text(encoding="utf-8") for file in files if file != Path(__file__)]
    found = {name for text in texts for name in re.findall(r"\bRADIXLM_[A-Z0-9_]*[A-Z0-9]\b", text)}
    assert found - known == OTHER_VARIABLES & found
    assert {name for name in OTHER_VARIABLES if name not in found} <= {"RADIXLM_COMPLETE"}
