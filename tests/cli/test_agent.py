"""`radixlm agent`: what it tells each client, what it writes, and what it keeps."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.request import Request, urlopen

import msgspec
import pytest
from click.testing import CliRunner
from radixlm.cli.agent.clients import CLIENTS, NO_KEY, Client, Served, write_file
from radixlm.cli.agent.running_server import ask_server
from radixlm.cli.main import cli
from radixlm.runtime.artifact import CHAT_TEMPLATE, Artifact, read_manifest, write_manifest

from ..serve_process import free_port

ROOT = Path(__file__).resolve().parents[2]
SERVED = Served("http://127.0.0.1:8000", "qwen", 32768)
ODD = Served("http://127.0.0.1:8000", 'a "model": #1\\x', 4096, api_key='k"1: é')


def parsed(client: Client, served: Served) -> Any:
    text = client.text(served)
    if client.file.endswith(".toml"):
        return tomllib.loads(text)
    if client.file.endswith(".json"):
        return json.loads(text)
    # PyYAML is not among what tests need: lines of `name: value` are YAML, and their values are JSON
    return {name: json.loads(value) for name, value in (line.split(": ", 1) for line in text.splitlines())}


def told(name: str, served: Served) -> tuple[Any, Any, Any]:
    """The address, the model and the key in a client's file."""
    file = parsed(CLIENTS[name], served)
    match name:
        case "codex":
            provider = file["model_providers"][file["model_provider"]]
            return provider["base_url"], file["model"], provider["experimental_bearer_token"]
        case "opencode":
            options = file["provider"]["radixlm"]["options"]
            [model] = file["provider"]["radixlm"]["models"]
            assert file["model"] == file["small_model"] == f"radixlm/{model}"
            return options["baseURL"], model, options["apiKey"]
        case "claude":
            env = file["env"]
            return env["ANTHROPIC_BASE_URL"] + "/v1", env["ANTHROPIC_MODEL"], env["ANTHROPIC_AUTH_TOKEN"]
        case _:
            return file["openai-api-base"], file["model"].removeprefix("openai/"), file["openai-api-key"]


@pytest.mark.parametrize("name", CLIENTS)
@pytest.mark.parametrize("served", [SERVED, ODD], ids=["plain", "odd"])
def test_a_client_is_told_address_model_and_key(name: str, served: Served) -> None:
    assert told(name, served) == ("http://127.0.0.1:8000/v1", served.model, served.api_key or NO_KEY)


def test_claude_code_asks_for_no_model_of_another_name() -> None:
    """Its subagents asked for Sonnet, and got 404."""
    env = parsed(CLIENTS["claude"], SERVED)["env"]
    names = {name for name in env if name.endswith("_MODEL")}
    kinds = {f"ANTHROPIC_DEFAULT_{kind}_MODEL" for kind in ("HAIKU", "SONNET", "OPUS")}
    assert names == {"ANTHROPIC_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL", *kinds}
    assert {env[name] for name in names} == {"qwen"}


def test_those_that_shorten_conversations_are_told_the_context() -> None:
    codex, opencode, claude = (parsed(CLIENTS[name], SERVED) for name in ("codex", "opencode", "claude"))
    assert codex["model_context_window"] == 32768 > codex["model_auto_compact_token_limit"]
    assert opencode["provider"]["radixlm"]["models"]["qwen"]["limit"]["context"] == 32768
    assert claude["env"]["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] == "32768"


@pytest.mark.parametrize("client", CLIENTS.values(), ids=CLIENTS)
def test_the_page_shows_what_is_printed(client: Client) -> None:
    page = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(?:toml|json|yaml)\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert client.text(SERVED) in blocks
    where = str(client.path({}, Path("~")))
    assert f"`{where}`" in page
    assert client.run.format(file=where) in page


def test_a_folder_of_the_environment_goes_before_the_users() -> None:
    claude = CLIENTS["claude"]
    assert claude.path({"CLAUDE_CONFIG_DIR": "/c"}, Path("/me")) == Path("/c/radixlm.json")
    assert claude.path({"CLAUDE_CONFIG_DIR": ""}, Path("/me")) == Path("/me/.claude/radixlm.json")


def never(text: str) -> bool:
    return False


def test_what_a_file_held_is_kept_and_the_same_text_is_written_once(tmp_path: Path) -> None:
    path = tmp_path / "new" / "radixlm.json"
    assert write_file(path, "one", never) is None
    assert path.stat().st_mode & 0o777 == 0o600, "a key may be in it"
    assert write_file(path, "one", never) is None
    backup = write_file(path, "two", never)
    assert backup == path.with_name("radixlm.json.bak") and backup.read_text() == "one"
    assert write_file(path, "three", never) == path.with_name("radixlm.json.bak.1")
    assert {each.name: each.read_text() for each in path.parent.iterdir()} == {
        "radixlm.json": "three",
        "radixlm.json.bak": "one",
        "radixlm.json.bak.1": "two",
    }


@pytest.mark.parametrize("client", CLIENTS.values(), ids=lambda client: client.name)
def test_a_file_for_another_server_is_no_backup_and_one_with_a_change_is(client: Client, tmp_path: Path) -> None:
    servers = [Served("http://127.0.0.1:8000", "a", 32_768), Served('http://other/"x"', 'b\\"', 9, "sk-1")]
    path = tmp_path / client.file
    for served in servers * 2:
        assert write_file(path, client.text(served), client.has_written) is None
        assert path.read_text() == client.text(served)
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    changed = client.text(servers[0]) + "\n# mine\n"
    path.write_text(changed)
    backup = write_file(path, client.text(servers[1]), client.has_written)
    assert backup is not None and backup.read_text() == changed


def test_a_file_that_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "radixlm.json").mkdir()
    with pytest.raises(OSError, match=r"radixlm\.json"):
        write_file(tmp_path / "radixlm.json", "text", never)
    assert [each.name for each in tmp_path.iterdir()] == ["radixlm.json"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["vi", "a.radixlm"], "'vi' is not one of 'codex'"),
        (["codex", "a.radixlm", "--port", "0"], "--port is 0"),
        (["codex", "a.radixlm", "--no-store", "--store", "d"], "--no-store and --store"),
        (["codex", "a.radixlm", "--pot", "1"], "No such option '--pot'"),
        (["codex", "nowhere.radixlm"], "nowhere.radixlm does not exist"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_written(
    arguments: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    result = CliRunner().invoke(cli, ["agent", *arguments, "--write"])
    assert result.exit_code == 2 and says in result.output
    assert list(tmp_path.iterdir()) == []


@contextmanager
def serving(home: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`radixlm agent` with a model that is fake, once it has told its client."""
    environment = {**os.environ, "HOME": str(home), "PYTHONPATH": str(ROOT)}
    environment = {name: value for name, value in environment.items() if not name.startswith(("XDG_", "CLAUDE_"))}
    command = [sys.executable, "-m", "tests.cli.serving_process", "agent", *arguments, "--max-num-seqs", "8"]
    process = subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


def posted(port: int, path: str, body: dict[str, Any]) -> Any:
    headers = {"Content-Type": "application/json"}
    with urlopen(Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), headers), timeout=60) as response:
        return json.load(response)


def said_until(process: subprocess.Popen[str], wanted: str) -> str:
    assert process.stderr is not None
    said, deadline = "", time.monotonic() + 60
    for line in process.stderr:
        said += line
        assert time.monotonic() < deadline, said
        if wanted in line:
            return said
    raise AssertionError(said)


def test_a_key_a_name_and_a_store_of_the_users_own(tmp_path: Path) -> None:
    """The store was named by the first word behind the client, which may be an option of serve."""
    port = free_port()
    options = ("--port", str(port), "fake.radixlm", "--api-key", "sk-1", "--api-key", "sk-2", "--model-id", "mine")
    for _ in range(2):
        with serving(tmp_path, "claude", *options, "--write") as process:
            said = said_until(process, "run: claude --settings")
    file = tmp_path / ".claude" / "radixlm.json"
    assert f"{file} configures claude" in said and ".bak" not in said, "the second time it is the same"
    env = json.loads(file.read_text())["env"]
    assert env["ANTHROPIC_BASE_URL"] == f"http://127.0.0.1:{port}"
    assert (env["ANTHROPIC_AUTH_TOKEN"], env["ANTHROPIC_MODEL"]) == ("sk-1", "mine")
    assert (tmp_path / ".cache" / "radixlm" / "stores" / "fake" / "SECRET").is_file()


def test_the_model_answers_to_any_name_that_an_agent_asks_for(tmp_path: Path) -> None:
    """Its name for the agent stays its own."""
    port = free_port()
    options = ("--port", str(port), "fake.radixlm", "--no-store")
    with serving(tmp_path, "claude", *options, "--model-id", "mine") as process:
        said_until(process, "run: claude --settings")
        body = {"model": "claude-sonnet-4-5", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
        assert posted(port, "/v1/messages", body)["model"] == "claude-sonnet-4-5"
        process.terminate()
        assert process.stdout is not None
        assert json.loads(process.stdout.read())["env"]["ANTHROPIC_MODEL"] == "mine"


@pytest.mark.parametrize(("option", "is_found"), [((), True), (("--heed-prompt-cache-key",), False)])
def test_a_new_conversation_of_codex_finds_the_last_ones_instructions(
    option: tuple[str, ...], is_found: bool, tmp_path: Path
) -> None:
    port = free_port()
    with serving(tmp_path, "codex", "fake.radixlm", "--port", str(port), "--no-store", *option) as process:
        said_until(process, "run: codex --profile radixlm")
        num_cached = []
        for key in ("one", "two"):
            body = {"instructions": "once there was a tree " * 4, "input": "Hi", "prompt_cache_key": key}
            answer = posted(port, "/v1/responses", {**body, "max_output_tokens": 1})
            num_cached.append(answer["usage"]["input_tokens_details"]["cached_tokens"])
    assert num_cached[0] == 0 and (num_cached[1] > 16) is is_found


def test_without_write_the_file_is_all_that_is_printed(tmp_path: Path) -> None:
    with serving(tmp_path, "codex", "fake.radixlm", "--port", str(free_port()), "--no-store") as process:
        said_until(process, "run: codex --profile radixlm")
        process.terminate()
        assert process.stdout is not None
        assert tomllib.loads(process.stdout.read())["model_provider"] == "radixlm"
    assert list(tmp_path.iterdir()) == []


def fake_agent(folder: Path, name: str) -> Path:
    """A program of this name that writes its arguments to a file, which is returned, and what it asks a server for."""
    program, said = folder / name, folder / f"{name}.said"
    program.write_text(f'#!/bin/sh\necho "$@" > {said}\ncat "$2" >> {said} 2>/dev/null\nexit 0\n')
    program.chmod(0o755)
    return said


def agent_of(home: Path, port: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`radixlm agent` with a server that runs."""
    environment = {**os.environ, "HOME": str(home), "PATH": f"{home}:{os.environ['PATH']}"}
    command = [
        sys.executable,
        "-c",
        "from radixlm.cli.main import main; main()",
        "agent",
        *arguments,
        "--url",
        f"http://127.0.0.1:{port}/v1",
    ]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_several_agents_are_told_of_one_server_that_runs(tmp_path: Path) -> None:
    """A second agent was refused: the port was in use."""
    port = free_port()
    options = ("--port", str(port), "--no-store", "--model-id", "mine", "--api-key", "sk-1", "--write")
    with serving(tmp_path, "codex,claude", "fake.radixlm", *options) as process:
        said_until(process, "run: claude --settings")
        assert "requires a key" in agent_of(tmp_path, port, "opencode").stderr
        printed = agent_of(tmp_path, port, "opencode", "--api-key", "sk-1", "--print")
        told = json.loads(printed.stdout)["provider"]["radixlm"]
        assert told["options"] == {"baseURL": f"http://127.0.0.1:{port}/v1", "apiKey": "sk-1", "timeout": 3_600_000}
        assert told["models"]["mine"]["limit"]["context"] == 256
        *_, warning, last = printed.stderr.splitlines()
        assert "the context of 256 tokens; use a model with 16,000 or more" in warning and "then run: " in last
        said = fake_agent(tmp_path, "aider")
        assert agent_of(tmp_path, port, "aider", "--api-key", "sk-1", "--launch").returncode == 0
        assert f"--config {tmp_path}/.aider.radixlm.yml" in said.read_text() and "openai/mine" in said.read_text()
    assert (tmp_path / ".codex" / "radixlm.config.toml").is_file()
    assert (tmp_path / ".claude" / "radixlm.json").is_file()


class ServerOfModels(BaseHTTPRequestHandler):
    """Lists a model that is loaded, and one whose context is unknown until it is."""

    loads: ClassVar[list[object]] = []

    def do_GET(self) -> None:
        small = {"id": "small", "state": "loaded", "max_model_len": 512}
        self._answer({"data": [small, {"id": "large", "state": "unloaded"}]})

    def do_POST(self) -> None:
        self.loads.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self._answer({"id": "large", "state": "loaded", "max_model_len": 65536})

    def _answer(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """It says nothing."""


def test_an_agent_is_told_of_one_of_a_servers_models_which_is_loaded_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    with HTTPServer(("127.0.0.1", 0), ServerOfModels) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert ask_server(url, None) == Served(url, "small", 512)
        assert "using small; this server also has large (unloaded)" in capsys.readouterr().err
        assert ServerOfModels.loads == []
        assert ask_server(f"{url}/v1", None, "large") == Served(url, "large", 65536)
        assert ServerOfModels.loads == [{"model": "large"}]
        with pytest.raises(ValueError, match="has no model 'huge'; it has small, large"):
            ask_server(url, None, "huge")
        server.shutdown()


def test_a_model_that_cannot_chat_is_no_agents_choice() -> None:
    """Each request of the agent failed."""

    class Silent(ServerOfModels):
        silent: ClassVar[dict[str, object]] = {"id": "silent", "max_model_len": 512, "has_chat_template": False}
        others: ClassVar[list[dict[str, object]]] = []

        def do_GET(self) -> None:
            self._answer({"data": [self.silent, *self.others]})

        def do_POST(self) -> None:
            self._answer({"id": "late", "max_model_len": 512, "has_chat_template": False})

    with HTTPServer(("127.0.0.1", 0), Silent) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        for name in (None, "silent"):
            with pytest.raises(ValueError, match=r"^silent of the server at .* has no chat template"):
                ask_server(url, None, name)
        Silent.others = [{"id": "late"}]
        with pytest.raises(ValueError, match=r"^late of the server"):
            ask_server(url, None)
        Silent.others = [{"id": "chatty", "max_model_len": 9, "has_chat_template": True}]
        assert ask_server(url, None) == Served(url, "chatty", 9)
        server.shutdown()


def test_a_server_that_launches_an_agent_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = fake_agent(tmp_path, "claude")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with serving(tmp_path, "claude", "fake.radixlm", "--port", str(free_port()), "--no-store", "--launch") as process:
        process.wait(60)
    assert f"--settings {tmp_path}/.claude/radixlm.json" in said.read_text()


def test_a_missing_agent_and_a_model_that_cannot_chat_are_errors_before_loading(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_artifact: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    missing = CliRunner().invoke(cli, ["agent", "opencode", str(tiny_artifact), "--launch"])
    assert missing.exit_code == 2
    assert "opencode is not installed; install it: npm install -g opencode-ai" in missing.output
    silent = tmp_path / "silent.radixlm"
    shutil.copytree(tiny_artifact, silent)
    manifest = read_manifest(silent)
    files = {name: file for name, file in manifest.files.items() if name != CHAT_TEMPLATE}
    write_manifest(silent, msgspec.structs.replace(manifest, files=files))
    monkeypatch.setattr(Artifact, "open", None)
    options = ["--port", str(free_port()), "--no-store"]
    refused = CliRunner().invoke(cli, ["agent", "codex", str(silent), *options])
    assert refused.exit_code == 2 and f"{silent} has no chat template" in refused.output
    assert "then run" not in refused.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["codex"], "give a MODEL to serve, or the --url"),
        (["codex", "a.radixlm", "b.radixlm"], "an agent uses one model"),
        (["codex", "a.radixlm", "--models", "b.radixlm"], "an agent uses one model"),
        (["codex", "one", "two", "--url", "http://127.0.0.1:1"], "of serve's options only --api-key can be added"),
        (["codex,vi", "a.radixlm"], "'vi' is not one of 'codex'"),
        (["codex", "a.radixlm", "--print", "--write"], "--print cannot be combined"),
        (["codex,claude", "a.radixlm", "--launch"], "--launch starts one agent"),
        (["codex", "--url", "localhost:1"], "it must begin with http://"),
        (["codex", "--url", "http://127.0.0.1:1"], "no server responds at http://127.0.0.1:1"),
        (["codex", "--url", "http://127.0.0.1:1", "--store", "d"], "of serve's options only --api-key can be added"),
    ],
)
def test_options_of_agents_that_contradict_are_refused(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(cli, ["agent", *arguments])
    assert result.exit_code == 2 and says in result.output
