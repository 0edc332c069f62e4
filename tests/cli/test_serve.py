"""How serving ends: replies get time, and then an answer in OpenAI's shape."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import uvicorn
from radixlm.runtime.errors import EngineClosed
from radixlm.runtime.kv_log.replay import replay
from radixlm.runtime.server.errors import answer
from radixlm.runtime.server.http.listener import listen
from radixlm.runtime.server.http.uvicorn_server import server
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..runtime.server.real_server import wait_until

REPOSITORY = Path(__file__).resolve().parents[2]
CERTIFICATE = str(REPOSITORY / "tests" / "data" / "localhost.pem")  # of `openssl req -x509`, with its key
FAKE, NOWHERE = "fake.radixlm", "nowhere.radixlm"  # artifacts that `serving_process` has, and has not


class Endless:
    """A server whose one reply ends when the engine is closed, told to stop as soon as it is asked."""

    def __init__(self, reply_s: float, grace_s: float) -> None:
        self._reply_s = reply_s
        self._closed = threading.Event()
        self._listener = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        app = Starlette(routes=[Route("/", self._reply)])
        app.add_exception_handler(EngineClosed, answer)
        config = uvicorn.Config(app, log_level="error", lifespan="off")
        self._server = server(config, self._closed.set, grace_s)
        self.thread = threading.Thread(target=self._server.run, args=([self._listener],), daemon=True)
        self.thread.start()

    async def _reply(self, request: Request) -> Response:
        self._server.should_exit = True
        deadline = time.monotonic() + self._reply_s
        while time.monotonic() < deadline:
            if self._closed.is_set():
                raise EngineClosed("the server is stopping; send the request again later")
            await asyncio.sleep(0.01)
        return JSONResponse("done")


def test_a_reply_that_ends_within_the_grace_is_whole() -> None:
    serving = Endless(reply_s=0.3, grace_s=5.0)
    assert httpx.get(serving.url).json() == "done"
    serving.thread.join(3)  # nor does it wait for the rest of the grace
    assert not serving.thread.is_alive()


def test_a_reply_that_does_not_is_503_in_openais_shape() -> None:
    serving = Endless(reply_s=60.0, grace_s=0.3)
    response = httpx.get(serving.url)
    assert response.status_code == 503
    assert "stopping" in json.loads(response.text)["error"]["message"]
    serving.thread.join(10)
    assert not serving.thread.is_alive()


def command(*arguments: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "tests.cli.serving_process",
        "serve",
        *arguments,
        "--port",
        "0",
        "--max-num-seqs",
        "8",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([NOWHERE], "nowhere"),
        ([FAKE, "--kv-cache-gb", "999999"], "a KV cache of 999999000000000 bytes and the model's 0 bytes do not fit"),
        ([FAKE, "--kv-cache-gb", "0.000001"], "raise kv_cache_bytes (--kv-cache-gb)"),
        ([FAKE, "--context-length", "257"], "context_length is 257; this artifact allows 128 to 256"),
        ([FAKE, "--max-num-batched-tokens", "65"], "max_num_batched_tokens is 65; this artifact allows 1 to 64"),
    ],
)
def test_what_cannot_be_opened_ends_the_process_with_the_reason(arguments: list[str], message: str) -> None:
    ended = subprocess.run(command(*arguments), cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert message in ended.stderr and "Traceback" not in ended.stderr
    assert "serving" not in ended.stderr


def test_what_is_no_artifact_is_said_before_anything_listens() -> None:
    ended = subprocess.run(command(NOWHERE), cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    [line] = ended.stderr.splitlines()
    assert "nowhere.radixlm does not exist" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([NOWHERE, "--log-format", "json"], "nowhere"),
        ([FAKE, "--log-format=json", "--max-queue", "many"], "'many' is not a valid integer"),
        ([FAKE, "--log-format", "json", "--host", "no.such.host.invalid"], "cannot listen"),
    ],
)
def test_who_reads_json_is_told_in_json_why_serving_does_not_begin(arguments: list[str], message: str) -> None:
    ended = subprocess.run(command(*arguments), cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    *_, last = [json.loads(line) for line in ended.stderr.splitlines()]
    assert (last["level"], last["logger"]) == ("error", "radixlm.serve") and message in last["message"]


class Serving:
    """The command in a process of its own, which serves now."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            command(FAKE, *arguments),
            cwd=REPOSITORY,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
            env=os.environ | environment,
        )
        assert self.process.stderr is not None
        self.lines: list[str] = []
        for line in self.process.stderr:
            self.lines.append(line)
            if line.startswith("serving ") or '"serving ' in line:
                break
        self.url = self.lines[-1].split()[-1].rstrip('"}')
        self.reader = threading.Thread(target=self.lines.extend, args=(self.process.stderr,), daemon=True)
        self.reader.start()

    def stream(self, max_tokens: int, **fields: object) -> Iterator[str]:
        """The events of a chat, as they come."""
        body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "ignore_eos": True, **fields}
        with httpx.stream(
            "POST", f"{self.url}/chat/completions", json=body | {"max_tokens": max_tokens}, timeout=60
        ) as answer:
            yield from (line for line in answer.iter_lines() if line)

    def end(self) -> int:
        """Wait for the end of the process: its exit code."""
        code = self.process.wait(60)
        self.reader.join(60)
        return code


def test_serving_this_machine_without_a_key_answers_to_no_name_that_a_web_page_may_have_made_up() -> None:
    serving = Serving()
    statuses = [
        httpx.get(f"{serving.url}/cache", headers={"host": host}).status_code for host in ("evil.example", "localhost")
    ]
    serving.process.send_signal(signal.SIGTERM)
    assert statuses == [403, 200]
    assert serving.end() == 143


def children_of(process: subprocess.Popen[str]) -> list[str]:
    tasks = Path(f"/proc/{process.pid}/task").iterdir()
    return [child for task in tasks for child in (task / "children").read_text().split()]


def test_nothing_that_no_request_asked_for_runs_beside_requests() -> None:
    """Two processes that try grammars took both processors from the first prompt: it took twice as long."""
    serving = Serving()
    for _ in serving.stream(100):  # two seconds: a step takes 20 ms
        assert children_of(serving.process) == []
    for _ in serving.stream(1, tools=[{"type": "function", "function": {"name": "f"}}], tool_choice="none"):
        pass  # a client that may want grammars
    while not children_of(serving.process):  # what tries grammars; for slow ones a second is started when one comes
        time.sleep(0.05)
        assert serving.process.poll() is None
    serving.process.send_signal(signal.SIGTERM)
    assert serving.end() == 143


def test_no_answer_of_a_kept_open_connection_waits_for_an_acknowledgement() -> None:
    """Clients acknowledge after 40 ms; a second packet leaves without waiting for that."""
    serving = Serving(RADIXLM_TELL_CONNECTIONS="1")
    assert httpx.get(f"{serving.url}/models").status_code == 200
    serving.process.send_signal(signal.SIGTERM)
    assert serving.end() == 143
    options = [line.strip() for line in serving.lines if line.startswith("accepted ")]
    assert options == ["accepted TCP_NODELAY=1"]


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_cache_that_shortens_the_context_is_told_on_stderr_and_in_health(log_format: str) -> None:
    serving = Serving("--kv-cache-gb", "0.00000512", "--log-format", log_format)
    health = httpx.get(serving.url.removesuffix("/v1") + "/health").json()
    serving.process.send_signal(signal.SIGTERM)
    assert serving.end() == 143
    assert health["context_length"] == 144
    assert any(health["context_notice"] in line for line in serving.lines)
    assert log_format == "text" or all(json.loads(line) for line in serving.lines)


def test_the_context_and_the_tokens_of_a_step_are_what_serve_was_told() -> None:
    serving = Serving("--context-length", "160", "--max-num-batched-tokens", "8")
    served = httpx.get(f"{serving.url}/models").json()["data"][0]
    asked = {"prompt": [5] * 40, "max_tokens": 1, "ignore_eos": True}
    httpx.post(f"{serving.url}/completions", json=asked).raise_for_status()
    health = httpx.get(serving.url.removesuffix("/v1") + "/health").json()
    serving.process.send_signal(signal.SIGTERM)
    assert serving.end() == 143
    assert served["max_model_len"] == health["context_length"] == 160 and health["context_notice"] is None
    assert health["num_steps"] == 5, "forty tokens, eight a step"


@pytest.mark.parametrize("admission", ["optimistic", "conservative"])
def test_serve_reserves_max_tokens_if_it_was_told_to(admission: str) -> None:
    serving = Serving(
        "--kv-cache-gb", "0.00000512", "--admission", admission
    )  # ten pages, of which each would fill seven
    asked = {"prompt": [[n] * 5 for n in (3, 4, 5)], "max_tokens": 100, "ignore_eos": True}
    httpx.post(f"{serving.url}/completions", json=asked, timeout=60).raise_for_status()
    health = httpx.get(serving.url.removesuffix("/v1") + "/health").json()
    serving.process.send_signal(signal.SIGTERM)
    assert serving.end() == 143
    assert (health["num_preemptions"] > 0) == (admission == "optimistic")


def test_sigterm_in_the_middle_of_a_stream_lets_it_end_within_the_deadline() -> None:
    serving = Serving()
    events = []
    for number, event in enumerate(serving.stream(max_tokens=40)):
        events.append(event)
        if number == 3:
            serving.process.send_signal(signal.SIGTERM)
    assert events[-1] == "data: [DONE]" and len(events) > 30
    assert serving.end() == 143
    assert not any("Traceback" in line for line in serving.lines)


def test_sigterm_cancels_a_stream_at_the_deadline_and_says_so(tmp_path: Path) -> None:
    log = tmp_path / "kv.jsonl"
    serving = Serving("--shutdown-timeout", "0.2", "--log-format", "json", "--log-kv", str(log))
    events = []
    for number, event in enumerate(serving.stream(max_tokens=200)):
        events.append(event)
        if number == 3:
            serving.process.send_signal(signal.SIGTERM)
    assert "stopping" in json.loads(events[-1].removeprefix("data: "))["error"]["message"]
    assert len(events) < 150
    assert serving.end() == 143
    assert not any("Traceback" in line for line in serving.lines)
    lines = [json.loads(line) for line in serving.lines]
    assert {"radixlm.serve", "radixlm.http"} < {line["logger"] for line in lines}
    said = [line for line in lines if line["logger"] == "radixlm.requests"]
    assert [(each["path"], each["error"], each["finish_reason"]) for each in said] == [
        ("/v1/chat/completions", "server_error", "cancelled")
    ]
    replayed = replay(log)
    assert not replayed.sequences, "pages were never given back"


def test_a_server_with_a_certificate_speaks_https_under_its_root_path() -> None:
    serving = Serving("--ssl-certfile", CERTIFICATE, "--root-path", "/llm")
    assert serving.url.startswith("https://127.0.0.1:") and serving.url.endswith("/llm/v1")
    trusted = ssl.create_default_context(cafile=CERTIFICATE)
    with httpx.Client(verify=trusted) as client:
        origin = {"origin": serving.url.removesuffix("/llm/v1")}
        chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        asked = client.post(f"{serving.url}/chat/completions", json=chat, headers=origin)
    serving.process.send_signal(signal.SIGTERM)
    assert asked.status_code == 200, asked.text
    assert serving.end() == 143


def test_only_allowed_hosts_and_this_machines_are_answered() -> None:
    serving = Serving("--allowed-host", "my-laptop.lan", "--api-key", "sk-one")
    key = {"authorization": "Bearer sk-one"}
    hosts = ("my-laptop.lan", "localhost", "evil.example")
    statuses = [httpx.get(f"{serving.url}/models", headers={**key, "host": host}).status_code for host in hosts]
    serving.process.send_signal(signal.SIGTERM)
    assert statuses == [200, 200, 403]
    assert serving.end() == 143


def test_the_environment_sets_options_and_the_ready_lines_say_what_clients_need() -> None:
    serving = Serving("--model-id", "mine", RADIXLM_CONTEXT_LENGTH="192", RADIXLM_LOG_FORMAT="text")
    wait_until(lambda: len(serving.lines) >= 4)
    serving.process.send_signal(signal.SIGTERM)
    assert serving.end() == 143
    said = "".join(serving.lines)
    assert "web UI: http://127.0.0.1:" in said and "model name: mine; context: 192 tokens" in said


def test_what_serve_records_is_replayed_to_the_same_bits_and_a_changed_token_is_named(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    serving = Serving("--record", str(file))
    events = [event for temperature in (0, 1) for event in serving.stream(max_tokens=5, temperature=temperature)]
    assert not any('"logprobs":{' in event for event in events), "nobody asked for them"
    serving.process.send_signal(signal.SIGTERM)
    assert serving.end() == 143
    begin, *lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert (begin["event"], begin["model"], begin["name"]) == ("begin", FAKE, "fake")
    assert [len(line["reply_ids"]) for line in lines] == [5, 5] and "seed" in lines[1]["params"]

    def replayed(*arguments: str) -> subprocess.CompletedProcess[str]:
        replay_command = [sys.executable, "-m", "tests.cli.serving_process", "replay", str(file), *arguments]
        return subprocess.run(replay_command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)

    again = replayed("--artifact", "other.radixlm")
    assert again.returncode == 0, again.stderr
    assert "2 equal (10 tokens), 0 different" in again.stdout
    was = lines[1]["reply_ids"][2]
    lines[1]["reply_ids"][2] = was + 1
    file.write_text("".join(json.dumps(line) + "\n" for line in (begin, *lines)))
    again = replayed()
    assert again.returncode == 1, again.stderr
    assert f"request 2 ({lines[1]['id']}), token 2: is {was}, and was {was + 1}" in again.stdout
    file.write_text("")
    assert (replayed().returncode, replayed().stdout) == (2, "")
