"""Several models behind one command: each in a process of its own, which comes, goes, and may be killed."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from click.testing import CliRunner
from radixlm.cli.serve import GIVEN, command
from radixlm.cli.several import serve_models
from radixlm.cli.several.model_list import ModelEntry
from radixlm.cli.several.worker_flags import WorkerFlags, shared_flags, worker_environment
from radixlm.runtime.artifact.lora import LoraGroup, LoraInfo, LoraMatrix, LoraSource
from radixlm.runtime.errors import InvalidParameter
from radixlm.runtime.router.model_row import ModelSpec

from ...runtime.server.real_server import open_fake_artifact

REPOSITORY = Path(__file__).resolve().parents[3]
HISTORY = [{"role": "user", "content": "once there was a tree, and in the tree there was a bird, and once it sang"}]
TOML = """
[[model]]
source = "one.radixlm"
aliases = ["uno"]
[[model]]
source = "two.radixlm"
pinned = true
[[model]]
source = "broken.radixlm"
max-num-batched-tokens = 65
[[model]]
source = "vast.radixlm"
kv-cache-gb = 999999
"""


def until(holds: Any) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


class Served:
    """The command in a process of its own."""

    def __init__(self, *arguments: str) -> None:
        start = [sys.executable, "-m", "tests.cli.serving_process", "serve", "--port", "0", "--max-num-seqs", "8"]
        self.process = subprocess.Popen([*start, *arguments], cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        self.lines = [self.process.stderr.readline()]
        found = re.search(r"http://[\d.:]+", self.lines[0])
        assert found is not None, self.lines[0] + self.process.stderr.read()
        threading.Thread(target=self.lines.extend, args=(self.process.stderr,), daemon=True).start()
        self.client = httpx.Client(base_url=found[0], timeout=60)

    def chat(self, model: str, **fields: Any) -> httpx.Response:
        body = {"model": model, "messages": HISTORY, "max_tokens": 4, "seed": 1, "ignore_eos": True, **fields}
        return self.client.post("/v1/chat/completions", json=body)

    def state(self, model: str) -> str:
        return str(self.client.get(f"/v1/models/{model}").json()["state"])

    def process_of(self, model: str) -> int:
        """The process that has a model's name among its arguments."""
        said = [line for line in self.lines if line.startswith(f"[{model}]") and "Started server process" in line]
        return int(re.findall(r"\d+", said[-1])[-1])

    def children(self) -> list[int]:
        listed = subprocess.run(["pgrep", "-P", str(self.process.pid)], capture_output=True, text=True, check=False)
        return [int(child) for child in listed.stdout.split()]


@contextmanager
def served(*arguments: str) -> Iterator[Served]:
    found = Served(*arguments)
    try:
        yield found
    finally:
        found.process.kill()
        found.process.wait()


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return bool(status.stdout.strip()) and not status.stdout.startswith("Z")


def test_models_come_and_go_lose_no_prefix_and_one_that_is_killed_harms_no_other(tmp_path: Path) -> None:
    (tmp_path / "models.toml").write_text(TOML)
    with served("--models", str(tmp_path / "models.toml"), "--store", str(tmp_path / "store")) as server:
        until(lambda: server.client.get("/health").status_code == 200)
        assert [server.state(name) for name in ("one", "uno", "two")] == ["unloaded", "unloaded", "loaded"]
        cold = server.chat("uno").json()
        assert cold["model"] == "uno" and cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        first = server.process_of("one")
        assert server.client.post("/models/unload", json={"model": "one"}).json()["state"] == "unloaded"
        assert not is_alive(first)
        warm = server.chat("one").json()
        assert warm["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]["disk"] > 0
        assert warm["choices"][0]["message"] == cold["choices"][0]["message"]
        # A model that fails says why, and one that cannot fit is refused before it is loaded.
        broken = server.chat("broken")
        assert broken.status_code == 503
        assert "max_num_batched_tokens is 65; this artifact allows 1 to 64" in broken.json()["error"]["message"]
        vast = server.chat("vast")
        assert vast.status_code == 507 and "lower --kv-cache-gb" in vast.json()["error"]["message"]
        # A killed process ends its own stream with an error, and no other.
        ends: dict[str, str] = {}
        threads = [
            threading.Thread(target=lambda name=name: ends.update({name: server.chat(name, **STREAM).text}))
            for name in ("one", "two")
        ]
        for thread in threads:
            thread.start()
        until(lambda: all(server.client.get("/v1/models/" + name).json()["num_requests"] for name in ("one", "two")))
        time.sleep(0.3)
        os.kill(server.process_of("one"), signal.SIGKILL)
        for thread in threads:
            thread.join()
        assert "model_gone" in ends["one"] and ends["two"].endswith("data: [DONE]\n\n")
        until(lambda: server.state("one") == "unloaded")
        assert "SIGKILL" in server.client.get("/v1/models/one").json()["error"]
        assert server.chat("one").status_code == 200
        # Killed itself, it leaves no process behind.
        workers = server.children()
        assert len(workers) == 3, "two models, and a process that is ready"
        server.process.kill()
        until(lambda: not any(map(is_alive, workers)))


def test_the_adapters_of_a_model_are_checked_and_counted_before_anything_listens(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    entry = ModelEntry("one.radixlm", loras={"sql": str(tmp_path), "law": str(tmp_path)}, place="models.toml, model 3")
    manifest = open_fake_artifact().manifest
    room = LoraInfo(max_loras=2, max_rank=16, dtype="f16", groups=(LoraGroup(num_inputs=64, matrices=(MATRIX,)),))
    found = []
    for lora in (room, msgspec.UNSET):
        monkeypatch.setattr(
            serve_models, "read_manifest", lambda path, lora=lora: msgspec.structs.replace(manifest, lora=lora)
        )
        if not lora:
            with pytest.raises(InvalidParameter, match=r"models.toml, model 3: the artifact has no room .* are 2"):
                serve_models._spec(command, entry, [], None, BUDGET)
            entry = dataclasses.replace(entry, loras={})
        found.append(serve_models._spec(command, entry, ["--kv-cache-gb", "0.001"], None, BUDGET))
    assert found[0].listed == ("one", "one:sql", "one:law") and found[1].listed == ("one",)
    assert found[0].needed_bytes == found[1].needed_bytes + 2 * room.adapter_bytes


BUDGET = 1_000_000_000
MATRIX = LoraMatrix(name="q_proj.weight", num_outputs=64, huggingface=LoraSource(name="q_proj.weight"))
STREAM = {"stream": True, "max_tokens": 200}


def test_it_stops_when_it_is_told_to_with_all_its_processes() -> None:
    with served("--models", "one.radixlm", "two.radixlm", "--unload-after", "0.5", "--api-key", "sk-one") as server:
        server.client.headers["Authorization"] = "Bearer sk-one"
        assert server.chat("two").status_code == 200
        until(lambda: server.state("two") == "unloaded")
        assert server.chat("two").json()["model"] == "two"
        workers = server.children()
        assert workers
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 143
        assert not any(map(is_alive, workers))


def test_a_model_is_loaded_after_the_folder_of_sockets_and_keys_was_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with served("--models", "one.radixlm", "--api-key", "sk-one") as server:
        server.client.headers["Authorization"] = "Bearer sk-one"
        for _ in range(2):
            [folder] = tmp_path.glob("radixlm-*")
            shutil.rmtree(folder)
            assert server.chat("one").status_code == 200
            assert server.client.post("/models/unload", json={"model": "one"}).status_code == 200
        [folder] = tmp_path.glob("radixlm-*")
        assert folder.stat().st_mode & 0o777 == 0o700
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 143
        assert not [*tmp_path.glob("radixlm-*")]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_while_a_model_loads_is_a_clean_stop(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int
) -> None:
    monkeypatch.setenv("RADIXLM_OPENS_IN_S", "60")
    with served("--models", "one.radixlm", "two.radixlm", "--shutdown-timeout", "0.1") as server:
        replies: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: replies.append(server.chat("one")))
        asking.start()
        until(lambda: any("[one] loading" in line for line in server.lines))
        workers = server.children()
        assert workers
        server.process.send_signal(number)
        assert server.process.wait(30) == code
        asking.join(30)
        assert replies[0].status_code == 503 and "stopping" in replies[0].json()["error"]["message"]
        assert not any(map(is_alive, workers))
        said = "".join(server.lines)
        assert f"received {number.name}" in said and "Traceback" not in said and "Error" not in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--models", "a.radixlm", "--record", "file"], "--record is for one model"),
        (["a.radixlm", "b.radixlm", "--draft", "."], "--draft is for one model"),
        (["--models", "a.radixlm", "--lora", "a=b"], "--lora is for one model; set lora = ... in a TOML file"),
        (["--models", "nowhere"], "nowhere does not exist"),
        (["a.radixlm", "--unload-after", "5"], "--unload-after is for several models"),
        ([], "give a MODEL to serve"),
    ],
)
def test_what_is_wrong_is_said_before_anything_listens(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(command, [*arguments, "--port", "0"])
    assert result.exit_code != 0 and says in str(result.exception)
    assert "serving" not in result.output


def test_the_processes_get_the_flags_that_are_not_the_routers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = [
        *("--models", "a.radixlm", "--port", "9", "--kv-cache-gb", "2", "--no-idle-work", "--strict"),
        *("--cors-origin", "https://a.example", "--store", "s", "--store-gb", "5", "--api-key", "x"),
    ]
    monkeypatch.setenv("RADIXLM_PORT", "7")
    monkeypatch.setenv("RADIXLM_MAX_QUEUE", "7")
    context = command.make_context("serve", [*given])
    shared = shared_flags(context, context.meta[GIVEN])
    assert sorted(shared) == sorted(["--kv-cache-gb", "2", "--no-idle-work", "--strict", "--store-gb", "5"])
    environment = worker_environment(context)
    assert "RADIXLM_PORT" not in environment and environment["RADIXLM_MAX_QUEUE"] == "7"
    flags = WorkerFlags(shared, 8_000_000_000, "json", keys=("sk-1", "sk-2"), hides_cached_text=True)
    spec = ModelSpec("a", "a.radixlm", aliases=("*",), flags=("--kv-cache-gb", "1"), store="s/a")
    socket, keys = tmp_path / "a.sock", tmp_path / "keys"
    params = command.make_context("serve", flags.arguments(spec, socket)[1:]).params
    assert (params["model"], params["unix_socket"], params["model_ids"]) == ("a.radixlm", socket, ("a", "*"))
    assert (params["memory_bytes"], params["kv_cache_bytes"]) == (8_000_000_000, 1_000_000_000)
    assert (params["store"], params["api_key_files"], params["is_strict"]) == ("s/a", (keys,), True)
    for _ in range(2):
        assert keys.read_text() == "sk-1\nsk-2\n" and keys.stat().st_mode & 0o777 == 0o600
        keys.unlink()
        flags.arguments(spec, socket)
    assert params["hide_cached_text"] and params["log_format"] == "json" and params["shutdown_timeout"] == 0
    with pytest.raises(InvalidParameter, match="--model-id is for one model"):
        context = command.make_context("serve", ["--models", "a.radixlm", "--model-id", "x"])
        shared_flags(context, context.meta[GIVEN])
