"""Replicas that are busy, that die, and that keep clients apart; over HTTP, as clients see them."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import Client, events, place_of, wait_until
from .engines import SlowEngine

TALK = "A question that is longer than a block of text, so that it is known again when it comes back. " * 2
KEYS = ("key-of-alice", "key-of-bob")


@pytest.fixture(scope="module")
def pids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pids")


@pytest.fixture(scope="module")
def client(run_app: Callable[..., Client], pids: Path) -> Client:
    from radixlm.runtime.extras.ray.prefix_router import RouterPolicy

    client = run_app(SlowEngine(pids, 0.02), num_replicas=2, api_keys=KEYS, policy=RouterPolicy(max_lead=2))
    client.key = KEYS[0]
    return client


def is_idle(client: Client) -> bool:
    """Return whether all replicas are ready, and no request is counted."""
    health = client.json("GET", "/health")
    return health["status"] == "ready" and not any(one["num_requests"] for one in health["replicas"].values())


@pytest.fixture(autouse=True)
def all_ready(client: Client) -> None:
    wait_until(lambda: is_idle(client), "ready")


def test_a_whole_answer_and_a_stream_say_the_same(client: Client) -> None:
    whole = json.loads(client.chat(TALK, max_tokens=10).read())
    *chunks, done = events(client.chat(TALK, max_tokens=10, stream=True))
    text = "".join(json.loads(chunk)["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert done == b"[DONE]" and text == whole["choices"][0]["message"]["content"]


def test_pages_of_other_sites_may_not_send_requests(client: Client) -> None:
    for method, path in (("POST", "/v1/completions"), ("DELETE", "/v1/cache")):
        refused = client.ask(method, path, {"prompt": "x"}, origin="https://evil.example")
        assert refused.status == 403 and json.loads(refused.read())["error"]["code"] == "origin_not_allowed"


def test_a_conversation_stays_unless_its_replica_is_overloaded(client: Client) -> None:
    home = place_of(client.chat(TALK, max_tokens=1))
    assert place_of(client.chat(TALK + "And now?", max_tokens=1)) == home
    wait_until(lambda: is_idle(client), "idle")  # an answer is read before its replica counts as free
    busy = [client.chat(TALK, max_tokens=400, stream=True) for _ in range(2)]
    assert [place_of(answer) for answer in busy] == [home, home]
    assert place_of(client.chat(TALK, max_tokens=1)) != home
    for answer in busy:  # clients that leave are no load any more: the fixture of the next test waits for it
        answer.connection.close()  # type: ignore[attr-defined]
        answer.close()


def test_a_key_finds_nothing_of_anothers_cache_on_any_replica(client: Client) -> None:
    def num_cached(key: str) -> int:
        usage = json.loads(Client(client.port, key).chat(text, max_tokens=1).read())["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    text = f"A secret. {TALK}"
    assert num_cached(KEYS[0]) < 16 < num_cached(KEYS[0])  # the template begins as in other talks of hers
    assert num_cached(KEYS[1]) == 0
    assert num_cached(KEYS[1]) > 16
    refused = Client(client.port, "nobody's").chat(text)
    assert refused.status == 401 and json.loads(refused.read())["error"]["code"] == "invalid_api_key"


def test_clients_of_a_replica_that_dies_are_answered_or_told(client: Client, pids: Path) -> None:
    text = f"Long. {TALK}"
    streaming = client.chat(text, max_tokens=1500, stream=True)
    home = place_of(streaming)
    received = events(streaming)
    next(received)
    answers: list[object] = []

    def ask_whole() -> None:
        answer = client.chat(text, max_tokens=400)
        answers.append((answer.status, answer.headers["x-radixlm-replica"], json.loads(answer.read())["usage"]))

    waiting = threading.Thread(target=ask_whole)
    waiting.start()
    # Of the front, /health counts a request that is still on its way: Ray would give it to the next process of home.
    wait_until(lambda: (pids / f"{home}.requests").read_text() == "2", "both there")
    os.kill(int((pids / home).read_text()), signal.SIGKILL)
    *_, last = received
    assert json.loads(last)["error"]["code"] == "replica_gone"
    other = ({"engine-0", "engine-1"} - {home}).pop()
    assert place_of(client.chat(text, max_tokens=1)) == other  # at once, while the dead one is started anew
    waiting.join(60)
    assert [(status, name) for status, name, _ in answers] == [(200, other)]  # type: ignore[misc]
    wait_until(lambda: client.json("GET", "/health")["status"] == "ready", "started anew")
    forgotten = json.loads(client.ask("POST", "/v1/completions", {"prompt": "x", "max_tokens": 1}).read())
    assert forgotten["usage"]["completion_tokens"] == 1
