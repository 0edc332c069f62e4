"""`/health` tells of progress, not of existence; and a full queue is told at once."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from radixlm.runtime.engine.engine import EngineStats
from radixlm.runtime.model.batch import Batch
from radixlm.runtime.server import Loading, create_app
from radixlm.runtime.server.health import MAX_FAILED_STEPS, Verdict
from starlette.testclient import TestClient

from .real_server import CHAT, WAIT_S, RealServer, real_server, wait_until

if TYPE_CHECKING:
    from .conftest import FakeEngine

FINE = EngineStats(
    alive=True,
    stalled_s=0.0,
    **{name: 0 for name in EngineStats.__annotations__ if name.startswith("num_")},
    uptime_s=1.0,
)


def test_the_systems_own_words_are_told_only_to_clients_with_a_key() -> None:
    tier = SimpleNamespace(off_because="OSError: No space left on device: '/home/me/store'")
    stats = replace(FINE, tier=tier)  # type: ignore[arg-type]
    assert "/home/me" in str(Verdict.of(stats, 60.0).reason)
    assert Verdict.of(stats, 60.0, tells_causes=False).reason == "the store is off; nothing is saved to disk"


@pytest.mark.parametrize(
    ("change", "serves", "reason"),
    [
        ({}, True, None),
        ({"stalled_s": 59.0}, True, None),
        ({"stalled_s": 61.0, "num_running": 2, "num_waiting": 7}, False, "61 s while 2 requests run and 7 wait"),
        ({"alive": False}, False, "stopping"),
        ({"alive": False, "crash": "SystemExit"}, False, "died of SystemExit"),
        ({"restarted_after": "SystemExit"}, True, "died of SystemExit; it was restarted with an empty cache"),
        ({"store_off_because": "/cache cannot hold a store: full"}, True, "the store is off (/cache cannot hold"),
        ({"num_failed_steps_in_a_row": 1, "last_failure": "MemoryError"}, True, "the last step failed of MemoryError"),
        ({"num_failed_steps_in_a_row": MAX_FAILED_STEPS, "last_failure": "X"}, False, "the last 3 steps failed of X"),
    ],
)
def test_what_is_wrong_has_a_reason(change: dict[str, Any], serves: bool, reason: str | None) -> None:
    verdict = Verdict.of(replace(FINE, **change), 60.0)
    assert verdict.serves == serves
    assert verdict.reason is None if reason is None else reason in str(verdict.reason)


def test_health_is_ready_and_counts(client: TestClient, engine: FakeEngine) -> None:
    response = client.get("/health")
    assert (response.status_code, response.json()["status"], response.json()["reason"]) == (200, "ready", None)
    assert response.json()["num_pages"] == 0 and "to_end" not in response.json()
    engine.engine_stats = replace(engine.engine_stats, stalled_s=1e3)
    response = client.get("/health")
    assert (response.status_code, response.json()["status"]) == (503, "degraded")


def test_a_cache_that_shortens_the_context_is_told_at_the_start_and_in_health(caplog: pytest.LogCaptureFixture) -> None:
    with real_server(num_pages=10, context_length=256) as server:
        body = server.get("/health").json()
        assert (body["status"], body["context_length"]) == ("ready", 144)
        assert "holds 144 tokens of the model's context of 256" in body["context_notice"]
        [warning] = [record for record in caplog.records if record.levelname == "WARNING"]
        assert warning.getMessage() == body["context_notice"]


def test_a_context_that_is_whole_needs_no_notice(caplog: pytest.LogCaptureFixture) -> None:
    with real_server() as server:
        body = server.get("/health").json()
        assert (body["context_length"], body["context_notice"]) == (256, None)
    assert not caplog.records


def ask_in_background(server: RealServer, **fields: Any) -> tuple[threading.Thread, list[Any]]:
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(server.chat(**fields)), daemon=True)
    thread.start()
    return thread, answers


def test_a_step_that_hangs_degrades_health_until_it_goes_on() -> None:
    go_on = threading.Event()
    with real_server(app={"max_stall_s": 0.05}) as server:
        assert server.get("/health").json()["status"] == "ready"

        def hang(batch: Batch) -> None:
            assert go_on.wait(WAIT_S)

        server.model.before = hang
        thread, answers = ask_in_background(server, max_tokens=3)
        wait_until(lambda: server.get("/health").status_code == 503)
        body = server.get("/health").json()
        assert body["status"] == "degraded" and "1 requests run" in body["reason"]
        go_on.set()
        thread.join(WAIT_S)
        assert answers[0].status_code == 200
        assert server.get("/health").json()["status"] == "ready"
        server.check()


def die(batch: Batch) -> None:
    raise SystemExit("out of everything")


def test_an_engine_whose_thread_is_killed_is_started_again_once() -> None:
    with real_server() as server:
        expected = server.chat(max_tokens=20).json()["choices"]

        def die_of_two(batch: Batch) -> None:
            if batch.shape[1] == 2:
                server.model.before = lambda batch: None
                die(batch)

        server.model.before, server.model.step_s = die_of_two, 0.005
        asked = [ask_in_background(server, max_tokens=200, stream=streams) for streams in (False, True)]
        for thread, _ in asked:
            thread.join(WAIT_S)
        whole, streamed = (answers[0] for _, answers in asked)
        assert whole.status_code == 500 and whole.headers["x-should-retry"] == "false"
        [event] = [line for line in streamed.text.splitlines() if "error" in line]
        for error in (whole.json()["error"], json.loads(event.removeprefix("data: "))["error"]):
            assert (error["type"], error["code"]) == ("server_error", "engine_died")
            assert "died of SystemExit (see the log); it was started again" in error["message"]

        health = server.get("/health")
        assert (health.status_code, health.json()["status"]) == (200, "degraded")
        assert "died of SystemExit; it was restarted with an empty cache" in health.json()["reason"]
        assert (health.json()["num_restarts"], health.json()["num_cached_pages"]) == (1, 0)
        assert server.chat(max_tokens=20).json()["choices"] == expected
        assert server.get("/health").json()["status"] == "ready"
        assert "radixlm_engine_restarts_total 1.0" in server.get("/metrics").text
        server.check()

        server.model.before = die
        assert server.chat(max_tokens=3).status_code == 500
        health = server.get("/health")
        assert health.status_code == 503 and "died of SystemExit; start the server again" in health.json()["reason"]
        assert server.chat(max_tokens=3).status_code == 500


def test_who_comes_too_late_is_429_with_retry_after_and_counted() -> None:
    go_on = threading.Event()
    with real_server(max_num_seqs=1, max_queue=1) as server:

        def hang(batch: Batch) -> None:
            assert go_on.wait(WAIT_S)

        server.model.before = hang
        asked = [ask_in_background(server, max_tokens=2, seed=seed) for seed in range(2)]
        wait_until(lambda: server.engine.stats().num_running + server.engine.stats().num_waiting == 2)
        refused = server.chat(max_tokens=2)
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        said = refused.json()["error"]
        assert (said["type"], said["code"]) == ("requests", "rate_limit_exceeded"), "as OpenAI has it"
        assert server.engine.stats().num_rejected == server.get("/health").json()["num_rejected"] == 1
        go_on.set()
        for thread, answers in asked:
            thread.join(WAIT_S)
            assert answers[0].status_code == 200
        assert server.chat(max_tokens=2).status_code == 200
        server.check()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT | {"n": 5, "max_tokens": 2}),
        ("/v1/completions", {"prompt": "once", "n": 5, "max_tokens": 2}),
        ("/v1/completions", {"prompt": ["once"] * 5, "max_tokens": 2}),
    ],
)
def test_more_replies_than_the_queue_ever_takes_are_400_and_not_to_be_sent_again(path: str, body: Any) -> None:
    with real_server(max_num_seqs=2, max_queue=2) as server:
        refused = server.client.post(server.url + path, json=body)
        assert refused.status_code == 400 and "retry-after" not in refused.headers
        assert "the request asks for 5 replies, and this server computes 4" in refused.json()["error"]["message"]
        assert server.engine.stats().num_rejected == 0, "nothing was handed to the engine"
        assert len(server.chat(max_tokens=2, n=4).json()["choices"]) == 4
        server.check()


def test_where_there_are_keys_health_counts_only_for_who_has_one(engine: FakeEngine) -> None:
    client = TestClient(create_app(engine, api_keys=("sk-one",)))  # type: ignore[arg-type]
    assert client.get("/health").json() == {"status": "ready", "reason": None}
    assert client.get("/health", headers={"authorization": "Bearer wrong"}).json() == {
        "status": "ready",
        "reason": None,
    }
    assert "num_prompt_tokens" in client.get("/health", headers={"authorization": "Bearer sk-one"}).json()


def test_while_the_model_loads_everything_is_503(engine: FakeEngine) -> None:
    loading = Loading()
    client = TestClient(loading)
    health = client.get("/health")
    assert (health.status_code, health.json()["status"], health.headers["retry-after"]) == (503, "loading", "2")
    asked = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}]})
    assert asked.status_code == 503 and asked.json()["error"]["type"] == "server_error"
    loading.app = create_app(engine)  # type: ignore[arg-type]
    assert client.get("/health").json()["status"] == "ready"
    assert client.get("/v1/models").status_code == 200


def test_while_a_model_is_compiled_health_has_the_stage_and_the_percentage() -> None:
    loading = Loading()
    client = TestClient(loading)
    loading.progressed("weights", 0.4)
    health = client.get("/health").json()
    assert (health["stage"], health["percent"]) == ("weights", 40) and "weights, 40 %" in health["reason"]
    loading.progressed("load", None)
    assert client.get("/health/ready").json()["percent"] is None


def test_probes_of_liveness_and_readiness_differ_while_the_model_loads(engine: FakeEngine) -> None:
    loading = Loading()
    client = TestClient(loading)
    assert [client.get(path).status_code for path in ("/health/live", "/health/ready")] == [200, 503]
    loading.app = create_app(engine, api_keys=("sk-one",))  # type: ignore[arg-type]
    assert [client.get(path).status_code for path in ("/health/live", "/health/ready")] == [200, 200]
    assert client.get("/health/live").json() == {"status": "live"}
