"""What Prometheus is told is what happened."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from radixlm.runtime.server import create_app
from starlette.testclient import TestClient

from ..thought_templates import OPENED
from .real_server import RealServer, real_engine, real_server, wait_until
from .scripted import Scripted

if TYPE_CHECKING:
    from .conftest import FakeEngine


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with real_server() as server:
        yield server


def values(text: str) -> dict[tuple[str, ...], float]:
    """Each sample by its name and the texts of its labels, sorted by the labels' names."""
    families = list(text_string_to_metric_families(text))
    assert all(family.documentation and family.type != "unknown" for family in families)
    samples = [sample for family in families for sample in family.samples]
    found = {(s.name.removeprefix("radixlm_"), *(s.labels[k] for k in sorted(s.labels))): s.value for s in samples}
    assert len(found) == len(samples)
    return found


def read(server: RealServer) -> dict[tuple[str, ...], float]:
    return values(server.get("/metrics").text)


def test_requests_tokens_and_latencies_are_counted(server: RealServer) -> None:
    before = read(server)
    for _ in range(2):
        usage = server.chat(max_tokens=5).json()["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0
    after = read(server)

    def rise(*key: str) -> float:
        return after[key] - before.get(key, 0.0)

    assert rise("requests_finished_total", "length") == 2
    assert rise("prefix_query_tokens_total") == 2 * usage["prompt_tokens"]
    assert sum(rise("prefix_hit_tokens_total", kind, "memory") for kind in ("exact", "seam", "text", "alias")) == cached
    assert rise("generated_tokens_total") == 10
    assert rise("computed_tokens_total") == 2 * usage["prompt_tokens"] - cached + 8  # the last token has no KV
    assert rise("time_to_first_token_seconds_count") == rise("request_duration_seconds_count") == 2
    assert rise("request_queue_time_seconds_count") == 2
    assert rise("request_queue_time_seconds_sum") <= rise("time_to_first_token_seconds_sum")
    assert rise("inter_token_latency_seconds_count") == 8
    assert rise("inter_token_latency_seconds_sum") > 0
    assert after["inter_token_latency_seconds_bucket", "+Inf"] == after["inter_token_latency_seconds_count",]
    assert rise("http_responses_total", "/v1/chat/completions", "200") == 2
    assert after["requests_running",] == after["requests_waiting",] == 0 and after["engine_up",] == 1


def test_idle_tokens_are_those_that_no_request_waited_for() -> None:
    """By its name: they are counted apart from those of requests."""
    with Scripted.serving(OPENED) as model:

        def read(name: str) -> float:
            return values(model.client.get("/metrics").text)[name,]

        assert read("idle_tokens_total") == 0
        model.ask(f"{'I think about it. ' * 9}</think>{'It rains in Oslo. ' * 9}", tools=None)
        wait_until(lambda: model.engine._loop.call(lambda core: core.expected is None or core.expected.is_done))
        assert read("idle_tokens_total") == model.engine.stats().num_idle_tokens > 36
        assert "\nradixlm_idle_tokens_total " in model.client.get("/metrics").text
        num_computed = read("computed_tokens_total")
        assert num_computed == model.engine.stats().num_computed_tokens


def test_pages_and_unused_rows_add_up(server: RealServer) -> None:
    server.chat(max_tokens=5)
    found = read(server)
    pages = [found["kv_pages", state] for state in ("free", "cached", "used")]
    assert sum(pages) == 100 and pages[1] > 0 and found["kv_used_ratio",] == 0
    assert found["kv_rows_reserved", "cache"] == pages[1] * 16 and found["kv_rows_reserved", "requests"] == 0
    assert 0 <= found["kv_rows_unused", "cache"] < 16 * pages[1]


def test_what_is_refused_and_what_fails_is_counted_by_its_kind(server: RealServer) -> None:
    before = read(server)
    assert httpx.post(f"{server.url}/v1/chat/completions", json={"messages": 5}).status_code == 400
    assert server.get("/never/heard/of").status_code == 404

    def broken(batch: object) -> None:
        server.model.before = lambda batch: None
        raise MemoryError("no room")

    server.model.before = broken
    assert server.chat(max_tokens=2, seed=9).status_code == 500
    after = read(server)
    assert after["http_responses_total", "/v1/chat/completions", "400"] >= 1
    assert after["http_responses_total", "other", "404"] == before.get(("http_responses_total", "other", "404"), 0) + 1
    assert after["requests_failed_total", "StepFailed"] == after["steps_failed_total",] == 1
    server.check()


def test_a_running_request_shows(server: RealServer) -> None:
    server.model.step_s = 0.02
    with server.send(max_tokens=100, stream=True) as connection:
        connection.recv(100)
        wait_until(lambda: read(server)["requests_running",] == 1)
        found = read(server)
        assert found["kv_pages", "used"] > 0 and found["kv_rows_reserved", "requests"] > 0
    server.model.step_s = 0.0
    server.check()


def slots(found: dict[tuple[str, ...], float]) -> list[float]:
    return [found["state_slots", state] for state in ("free", "cached", "used")]


def test_states_of_a_recurrent_model_add_up(tmp_path: Path) -> None:
    with real_server(num_states=9, store=tmp_path) as server:
        found = read(server)
        assert slots(found) == [9, 0, 0] and found["state_snapshots",] == found["store_states",] == 0
        server.chat(max_tokens=40)
        server.check()
        found = read(server)
        num_snapshots = found["state_snapshots",]
        assert num_snapshots == server.get("/v1/cache").json()["num_states"] >= 3, "in the prompt, and at both ends"
        assert found["state_snapshots_evicted_total",] == 0
        # what computing costs is measured while the engine is idle, in a slot of its own
        wait_until(lambda: slots(read(server)) == [9 - num_snapshots, num_snapshots, 0])
        wait_until(lambda: read(server)["store_states",] >= 2)  # at the ends of the last pages of prompt and reply
        found = read(server)
        assert found["store_states_saved_total",] == found["store_states",]
        assert found["store_states_dropped_total",] == 0
        for seed in range(4):
            server.chat(max_tokens=5, messages=[{"role": "user", "content": f"{seed} times"}])
        server.check()
        found = read(server)
        assert found["state_snapshots_evicted_total",] > 0 and sum(slots(found)) == 9
        assert found["state_snapshots",] == found["state_slots", "cached"]


def test_the_slot_of_a_running_request_shows() -> None:
    with real_server(num_states=9) as server:
        server.model.step_s = 0.02
        with server.send(max_tokens=100, stream=True) as connection:
            connection.recv(100)
            wait_until(lambda: slots(read(server))[2] > 0)
        server.model.step_s = 0.0
        server.check()
        assert slots(read(server))[2] == 0


def test_a_model_that_keeps_no_states_tells_of_none(server: RealServer) -> None:
    assert not [key for key in read(server) if "state_s" in key[0]]


def test_metrics_are_behind_the_key_and_openmetrics_is_spoken_too() -> None:
    engine, _ = real_engine()
    client = TestClient(create_app(engine, api_keys=["secret"]))
    assert client.get("/metrics").status_code == client.get("/prometheus/metrics").status_code == 401
    headers = {"authorization": "Bearer secret"}
    assert client.get("/metrics", headers=headers).headers["content-type"].startswith("text/plain")
    openmetrics = client.get("/metrics", headers=headers | {"accept": "application/openmetrics-text; version=1.0.0"})
    assert openmetrics.text.endswith("# EOF\n")
    engine.close()


def test_the_path_of_nvidias_servers_has_the_same_metrics(client: TestClient) -> None:
    """aiperf asks for it where the other is not to be read."""
    plain, other = client.get("/metrics"), client.get("/prometheus/metrics")
    assert other.status_code == 200 and other.headers["content-type"] == plain.headers["content-type"]
    families = [
        [(family.name, family.type, family.documentation) for family in text_string_to_metric_families(answer.text)]
        for answer in (plain, other)
    ]
    assert families[0] == families[1] and ("radixlm_engine_up", "gauge") in [family[:2] for family in families[1]]
    assert values(other.text) == values(plain.text) | {("http_responses_total", "/metrics", "200"): 1}


def test_two_applications_count_apart() -> None:
    engines = [real_engine()[0] for _ in range(2)]
    first, second = (TestClient(create_app(engine)) for engine in engines)
    first.get("/v1/models")
    assert values(first.get("/metrics").text)["http_responses_total", "/v1/models", "200"] == 1
    assert ("http_responses_total", "/v1/models", "200") not in values(second.get("/metrics").text)
    for engine in engines:
        engine.close()


def test_every_route_is_counted_by_its_own_path(engine: FakeEngine) -> None:
    """`/metrics` was among the others, and so was every model."""
    client = TestClient(create_app(engine))  # type: ignore[arg-type]
    for path in ("/metrics", "/v1/models/fake", "/v1/models/nobody/s", "/health", "/nothing", "/static/main.js"):
        client.get(path)
    found = {
        key[1:]: value for key, value in values(client.get("/metrics").text).items() if key[0] == "http_responses_total"
    }
    assert found == {
        ("/metrics", "200"): 1,
        ("/v1/models/{model_id}", "200"): 1,
        ("/v1/models/{model_id}", "404"): 1,
        ("/health", "200"): 1,
        ("other", "404"): 1,
        ("/static/main.js", "200"): 1,
    }
