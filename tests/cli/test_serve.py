"""How serving ends: replies get time, and then an answer in OpenAI's shape."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import uvicorn
from radixlm.cli.serving import server
from radixlm.runtime.errors import EngineClosed
from radixlm.runtime.kv_log.replay import replay
from radixlm.runtime.server.errors import answer
from radixlm.runtime.server.http.listener import listen
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

REPOSITORY = Path(__file__).resolve().parents[2]
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
        ([FAKE, "--kv-cache-gb", "0.000001"], "raise --kv-cache-gb"),
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
    assert "nowhere.radixlm is not an artifact" in line


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
    assert {"radixlm.serve", "uvicorn.error"} < {line["logger"] for line in lines}
    said = [line for line in lines if line["logger"] == "radixlm.requests"]
    assert [(each["path"], each["error"], each["finish_reason"]) for each in said] == [
        ("/v1/chat/completions", "EngineClosed", "cancelled")
    ]
    replayed = replay(log)
    assert not replayed.sequences, "pages were never given back"
