"""Several models behind one address: each is answered as if it were alone, and one that dies harms no other."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from radixlm.runtime.router import background
from radixlm.runtime.router.app import router_app
from radixlm.runtime.router.model_row import ModelSpec
from radixlm.runtime.server import create_app
from radixlm.runtime.server.request_fields import MAX_VALUES
from radixlm.runtime.server.server_options import ServerOptions
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.testclient import TestClient

from .served_models import KEYS, Models, engine_of, models, until

SMALL, LARGE = ModelSpec("small", source="", context_length=512), ModelSpec("large", source="", aliases=("big",))
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "seed": 1}
REQUESTS: dict[str, Any] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": CHAT | {"max_tokens": 9},
    "/v1/messages/count_tokens": CHAT,
    "/tokenize": {"prompt": "one two"},
    "/detokenize": {"tokens": [0, 1]},
    "/v1/embeddings": {"input": "Hi"},
    "/v1/nothing": {},
}
ASIDE = {"id", "item_id", "created", "created_at", "completed_at", "timings"}
Play = Callable[[Models], Awaitable[None]]


def run(play: Play, *specs: ModelSpec, **options: Any) -> None:
    async def playing() -> None:
        async with models(*(specs or (SMALL, LARGE)), **options) as found:
            await play(found)

    asyncio.run(asyncio.wait_for(playing(), 60))


def plain(value: Any) -> Any:
    """A reply without ids and times."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items() if key not in ASIDE}
    return [plain(each) for each in value] if isinstance(value, list) else value


def said(answer: httpx.Response) -> Any:
    """What an answer says, without ids and times; events in a list."""
    if answer.headers["content-type"].startswith("text/event-stream"):
        lines = [line for line in answer.text.splitlines() if line]
        return [plain(json.loads(line[6:])) if line.startswith("data: {") else line for line in lines]
    return plain(answer.json())


@pytest.mark.parametrize("streams", [False, True])
def test_each_answer_is_that_of_a_server_of_this_model_alone(streams: bool) -> None:
    alone = {
        name: TestClient(create_app(engine_of(name), model_ids=names))  # type: ignore[arg-type]
        for names in (["small"], ["large", "big"])
        for name in names[:1]
    }

    async def play(found: Models) -> None:
        asked = [
            (path, name, body | {"model": name} | ({"stream": True} if streams and "token" not in path else {}))
            for path, body in REQUESTS.items()
            for name in ("small", "big", "large")
        ]
        answers = await asyncio.gather(*(found.client.post(path, json=body) for path, _, body in asked))
        for (path, name, body), answer in zip(asked, answers, strict=True):
            wanted = alone["large" if name == "big" else name].post(path, json=body)
            assert (answer.status_code, said(answer)) == (wanted.status_code, said(wanted)), path
            assert set(answer.headers) - {"transfer-encoding", "server", "date"} == set(wanted.headers)
            assert max(map(len, map(answer.headers.get_list, answer.headers))) == 1, "each header once"
        assert len(found.loaded) == 2

    run(play)


def test_a_name_that_no_model_has_is_404_and_loads_nothing() -> None:
    async def play(found: Models) -> None:
        for path, body in REQUESTS.items():
            answer = await found.client.post(path, json=body | {"model": "other"})
            says = "there is no endpoint" if path == "/v1/nothing" else "'small' and 'large' and 'big'"
            assert answer.status_code == 404 and says in answer.text
        assert found.states == ["unloaded"] * 2

    run(play)


def test_a_request_that_names_none_is_the_first_models() -> None:
    async def play(found: Models) -> None:
        for body in (CHAT, CHAT | {"model": 7}):
            answer = await found.client.post("/v1/chat/completions", json=body)
            assert answer.status_code == (404 if "model" in body else 200)
            assert found.states == ["loaded", "unloaded"]

    run(play)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat", "/models/load", "/api/pull"])
def test_a_body_that_is_no_json_is_refused_and_loads_nothing(path: str) -> None:
    async def play(found: Models) -> None:
        for body in (
            *(b"{", b"[]", b'"large"', b"\xff", b"[" * 50_000, b'{"model": "large", "x": NaN}', b'{"model": "a'),
            *(b'{"model": "large", "keep_alive": 1e999}', b'{"model": "large", "keep_alive": %s}' % (b"1" * 5000)),
        ):
            refused = await found.client.post(path, content=body)
            is_whole = path in ("/models/load", "/api/pull") and b"keep_alive" in body  # which does not read it
            assert is_whole or (refused.status_code == 400 and "error" in refused.json()), body
        assert found.states == ["unloaded", "unloaded"] or path in ("/models/load", "/api/pull")
        compressed = await found.client.post(path, content=b"x", headers={"content-encoding": "gzip"})
        assert compressed.status_code == 400 and "uncompressed" in compressed.text

    run(play)


def test_a_body_with_lone_surrogates_goes_to_the_model_that_it_names() -> None:
    async def play(found: Models) -> None:
        for half in (rb"\ud83d", rb"\udc00", b"\xed\xa0\xbd"):
            body = b'{"model": "small", "model": "large", "messages": [{"role": "user", "content": "%s"}]}' % half
            answer = await found.client.post("/v1/chat/completions", content=body)
            assert answer.status_code == 200 and answer.json()["model"] == "large"
            for path in ("/models/load", "/api/pull"):
                answer = await found.client.post(path, content=b'{"model": "%s"}' % half)
                assert answer.status_code == 400
        assert found.states == ["unloaded", "loaded"]

    run(play)


def test_a_form_is_the_first_models_and_has_any_number_of_values() -> None:
    async def play(found: Models) -> None:
        lines = b"[1,2]\n" * MAX_VALUES
        form = {"file": ("a.jsonl", lines), "purpose": (None, b"batch")}
        answer = await found.client.post("/v1/files", files=form)
        assert (answer.status_code, answer.json()["bytes"]) == (200, len(lines))
        assert found.states == ["loaded", "unloaded"]

    run(play)


def test_a_get_loads_nothing_and_asks_the_loaded_models_in_turn() -> None:
    async def play(found: Models) -> None:
        assert (await found.client.get("/tokenizer_info")).status_code == 404
        answer = await found.client.get("/v1/cache", params={"model": "large"})
        assert answer.status_code == 409 and answer.json()["error"]["code"] == "model_not_loaded"
        assert found.states == ["unloaded"] * 2
        await found.client.post("/models/load", json={"model": "big"})
        assert (await found.client.get("/v1/cache", params={"model": "big", "cache_salt": "a"})).json()[
            "num_pages"
        ] == 5
        assert (await found.client.get("/v1/cache")).json()["object"] == "cache"
        assert (await found.client.get("/v1/responses/resp_1")).status_code == 404

    run(play)


def test_a_path_that_no_model_has_is_404_and_loads_nothing() -> None:
    alone = TestClient(create_app(engine_of("small")))  # type: ignore[arg-type]

    async def play(found: Models) -> None:
        for path in (
            "/api/event_logging/batch",
            "/v1/nothing",
            "/v1/chat/completion",
            "/chat/completions",
            "/v1/files/a/b",
        ):
            for method in ("POST", "PUT", "GET"):
                answer, wanted = await found.client.request(method, path), alone.request(method, path)
                assert (answer.status_code, answer.json()) == (404, wanted.json())
        refused, wanted = await found.client.put("/v1/responses", json={}), alone.put("/v1/responses", json={})
        assert (refused.status_code, refused.json()) == (405, wanted.json())
        assert found.states == ["unloaded"] * 2

    run(play)


def test_the_router_has_every_path_and_method_of_a_models_server() -> None:
    def known(app: Starlette) -> set[tuple[str, str]]:
        routes = [route for route in app.routes if isinstance(route, Route)]
        return {(route.path, method) for route in routes for method in route.methods or ()}

    async def play(found: Models) -> None:
        alone, router = create_app(engine_of("small")), router_app(found.table, ServerOptions())  # type: ignore[arg-type]
        assert known(alone) <= known(router)

    run(play)


def test_a_post_to_an_id_asks_the_loaded_models_and_loads_none() -> None:
    paths = ("/v1/responses/resp_1/cancel", "/v1/batches/b/cancel", "/v1/conversations/c", "/v1/conversations/c/items")

    async def play(found: Models) -> None:
        for path in paths:
            answer = await found.client.post(path, json={})
            assert answer.status_code == 404 and "no model is loaded that could answer" in answer.text
            assert (await found.client.post(path, json={}, params={"model": "large"})).status_code == 409
        assert found.states == ["unloaded"] * 2
        made = await found.client.post("/v1/conversations", json={}, params={"model": "large"})
        changed = {"metadata": {"a": "b"}}
        answer = await found.client.post(f"/v1/conversations/{made.json()['id']}", json=changed)
        assert answer.json() == made.json() | changed
        for path in paths:
            assert (await found.client.post(path, json={})).status_code in (400, 404)
        assert found.states == ["unloaded", "loaded"]

    run(play)


def test_a_response_that_keeps_its_model_from_being_unloaded_can_be_read_and_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(background, "LOOKS_S", 0.01)

    async def play(found: Models) -> None:
        engine = found.engines["large"]
        engine.go_on.clear()
        engine.engine_stats = replace(engine.engine_stats, num_running=1)
        body = {"model": "large", "input": "Hi", "background": True}
        path = f"/v1/responses/{(await found.client.post('/v1/responses', json=body)).json()['id']}"
        chat = asyncio.create_task(found.client.post("/v1/chat/completions", json=CHAT))
        await until(lambda: found.states[1] == "unloading")
        for params in ({}, {"model": "large"}):
            assert (await found.client.get(path, params=params)).json()["status"] == "in_progress"
        assert (await found.client.post(path + "/cancel")).json()["status"] == "cancelled"
        engine.engine_stats = replace(engine.engine_stats, num_running=0)
        assert (await chat).status_code == 200
        assert found.states == ["loaded", "unloaded"]

    specs = (replace(spec, needed_bytes=10) for spec in (SMALL, LARGE))
    run(play, *specs, memory_bytes=15)


def test_models_are_listed_with_their_states_and_loaded_and_unloaded_by_hand() -> None:
    async def play(found: Models) -> None:
        listed = (await found.client.get("/v1/models")).json()
        assert [model["id"] for model in listed["data"]] == ["small", "large", "big"]
        assert [model["state"] for model in listed["data"]] == ["unloaded"] * 3
        assert [model.get("max_model_len") for model in listed["data"]] == [512, None, None]
        loaded = (await found.client.post("/models/load", json={"model": "large"})).json()
        assert (loaded["id"], loaded["state"], loaded["max_model_len"]) == ("large", "loaded", 512)
        assert (await found.client.get("/v1/models/big")).json()["state"] == "loaded"
        unloaded = (await found.client.post("/models/unload", json={"model": "large"})).json()
        assert (unloaded["state"], unloaded["max_model_len"]) == ("unloaded", 512)
        for path in ("/models/load", "/models/unload"):
            assert (await found.client.post(path, json={"model": "x"})).status_code == 404
            assert (await found.client.post(path, json={})).status_code == 400

    run(play)


def test_a_model_is_not_unloaded_in_the_middle_of_a_stream_and_loads_again_for_the_next() -> None:
    async def play(found: Models) -> None:
        engine = found.engines["small"]
        engine.go_on.clear()
        engine.num_free_words = 1
        async with found.client.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as stream:
            lines = stream.aiter_lines()
            while "I am small" not in await anext(lines):
                pass
            unloading = asyncio.create_task(found.client.post("/models/unload", json={"model": "small"}))
            while found.states[0] != "unloading":
                await asyncio.sleep(0.001)
            waiting = asyncio.create_task(found.client.post("/v1/chat/completions", json=CHAT))
            await asyncio.sleep(0.05)
            assert not unloading.done() and not waiting.done()
            engine.go_on.set()
            rest = [line async for line in lines if line]
            assert rest[-1] == "data: [DONE]"
        assert (await unloading).status_code == 200
        assert (await waiting).json()["choices"][0]["message"]["content"] == "I am small, said once."
        assert len(found.loaded) == 2

    run(play)


def test_a_killed_model_harms_no_request_of_another_and_loads_again() -> None:
    async def play(found: Models) -> None:
        for engine in found.engines.values():
            engine.go_on.clear()
            engine.num_free_words = 1

        async def stream(name: str) -> list[str]:
            body = CHAT | {"stream": True, "model": name}
            answer = await found.client.post("/v1/chat/completions", json=body)
            return [line for line in answer.text.splitlines() if line]

        tasks = {name: asyncio.create_task(stream(name)) for name in ("small", "large")}
        whole = asyncio.create_task(found.client.post("/v1/completions", json={"prompt": "x", "model": "small"}))
        while len(found.engines["small"].asked) < 2 or not found.engines["large"].asked:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        found.of("small").kill()
        error = json.loads((await tasks["small"])[-1].removeprefix("data: "))["error"]
        assert error["code"] == "model_gone"
        answer = await whole
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_gone")
        listed = (await found.client.get("/v1/models/small")).json()
        assert (listed["state"], listed["error"]) == ("unloaded", "its process ended by signal 9")
        for engine in found.engines.values():
            engine.go_on.set()
        assert (await tasks["large"])[-1] == "data: [DONE]"
        again = await found.client.post("/v1/chat/completions", json=CHAT)
        assert again.json()["choices"][0]["message"]["content"] == "I am small, said once."

    run(play)


def test_a_client_that_leaves_cancels_its_request_in_the_models_process() -> None:
    async def play(found: Models) -> None:
        engine = found.engines["small"]
        engine.go_on.clear()
        for body in (CHAT, CHAT | {"stream": True}):
            asking = asyncio.create_task(found.client.post("/v1/chat/completions", json=body))
            while not engine.streams or engine.streams[-1].cancelled.is_set():
                await asyncio.sleep(0.001)
            asking.cancel()
            async with asyncio.timeout(10):
                while not engine.streams[-1].cancelled.is_set():
                    await asyncio.sleep(0.005)
            while found.table.rows[0].num_requests:
                await asyncio.sleep(0.005)

    run(play)


def test_a_model_that_cannot_be_loaded_says_why_and_others_go_on() -> None:
    async def play(found: Models) -> None:
        found.broken.add("small")
        answer = await found.client.post("/v1/chat/completions", json=CHAT)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["message"]) == (503, "model_failed", "small is broken")
        assert (await found.client.get("/v1/models/small")).json()["error"] == "small is broken"
        large = await found.client.post("/v1/messages", json=CHAT | {"model": "large", "max_tokens": 9})
        assert large.status_code == 200
        health = await found.client.get("/health")
        assert (health.status_code, health.json()["status"]) == (200, "degraded")

    run(play)


def test_a_model_that_cannot_fit_is_507_and_not_to_be_tried_again() -> None:
    async def play(found: Models) -> None:
        answer = await found.client.post("/v1/messages", json=CHAT | {"max_tokens": 9})
        assert (answer.status_code, answer.headers["x-should-retry"]) == (507, "false")
        assert answer.json()["type"] == "error" and "raise --memory-gb" in answer.json()["error"]["message"]

    run(play, ModelSpec("small", source="", needed_bytes=2000), memory_bytes=1000)


def test_the_cache_is_forgotten_by_all_or_by_the_one_that_is_named(tmp_path: Any) -> None:
    stored = ModelSpec("stored", source="", store=str(tmp_path))

    async def play(found: Models) -> None:
        await found.client.post("/models/load", json={"model": "small"})
        cleared = (await found.client.delete("/v1/cache", params={"cache_salt": "a"})).json()
        assert cleared == {
            "num_freed_pages": 6,
            "num_kept_pages": 4,
            "num_discarded_pages": 0,
            "object": "cache.cleared",
        }
        assert found.states == ["loaded", "unloaded", "loaded"], "prefixes on disk are forgotten, too"
        only = (await found.client.delete("/v1/cache", params={"model": "stored"})).json()
        assert only["num_freed_pages"] == 3 and len(found.engines["small"].namespaces_cleared) == 1
        assert (await found.client.delete("/v1/cache", params={"modle": "small"})).status_code == 400

    run(play, SMALL, LARGE, stored)


def test_health_and_metrics_are_of_all_models() -> None:
    async def play(found: Models) -> None:
        await found.client.post("/v1/chat/completions", json=CHAT | {"model": "big"})
        health = (await found.client.get("/health")).json()
        assert (health["status"], health["reason"]) == ("ready", None)
        told = {name: (each["status"], each["state"]) for name, each in health["models"].items()}
        assert told == {"small": ("unloaded", "unloaded"), "large": ("ready", "loaded")}
        assert health["models"]["large"]["num_pages"] == 0
        await found.client.get("/v1/models/other")
        families = text_string_to_metric_families((await found.client.get("/metrics")).text)
        samples = [sample for family in families for sample in family.samples]

        def value(name: str, **labels: str) -> float:
            [found] = [each.value for each in samples if each.name == name and labels.items() <= each.labels.items()]
            return found

        path = "/v1/chat/completions"
        assert value("radixlm_http_responses_total", model="large", path=path, status="200") == 1
        assert value("radixlm_http_responses_total", path="/v1/models/{model_id}", status="404") == 1
        assert value("radixlm_engine_up", model="large") == 1
        assert value("radixlm_model_state", model="small", state="unloaded") == 1
        assert value("radixlm_model_loads_total", model="large") == 1

    run(play)


def test_ollamas_clients_are_told_of_all_models_and_of_those_that_are_loaded() -> None:
    async def play(found: Models) -> None:
        assert (await found.client.get("/api/ps")).json() == {"models": []}
        assert (await found.client.get("/api/version")).json()["version"], "which verifies a connection"
        assert "Ollama is running" in (await found.client.get("/")).text
        await found.client.post("/v1/chat/completions", json=CHAT | {"model": "small:latest"})
        assert found.states == ["loaded", "unloaded"]
        tags = (await found.client.get("/api/tags")).json()["models"]
        assert tags[0] == {"name": "small", "said": "/api/tags"}
        assert [model["model"] for model in tags[1:]] == ["large:latest", "big:latest"]
        assert (await found.client.get("/api/ps")).json() == {
            "models": [{"name": "small", "said": "/api/ps", "expires_at": "9999-12-31T23:59:59Z"}]
        }

    run(play)


def test_each_model_stays_loaded_as_long_as_the_last_keep_alive_of_its_requests_says() -> None:
    async def play(found: Models) -> None:
        async def asked(**body: Any) -> str:
            """Ask, and return until when the model stays, as /api/ps says."""
            await found.client.post("/api/chat", json={"model": "small", **body})
            [listed] = (await found.client.get("/api/ps")).json()["models"]
            return str(listed["expires_at"])

        def left_s(expires_at: str) -> float:
            return (datetime.fromisoformat(expires_at) - datetime.now(UTC)).total_seconds()

        assert 50 < left_s(await asked()) <= 60, "as the server has it"
        assert 290 < left_s(await asked(keep_alive="5m")) <= 300
        assert 290 < left_s(await asked()) <= 300, "a request that does not say leaves it"
        assert (await asked(keep_alive=-1)).startswith("9999")
        assert (await asked(keep_alive="soon")).startswith("9999"), "which is 400"
        assert 50 < left_s(await asked(keep_alive=59.5)) <= 60
        async with asyncio.timeout(10):
            await found.client.post("/api/chat", json={"model": "small", "keep_alive": "2s"})
            assert found.states[0] == "loaded"
            while found.states[0] != "unloaded":
                await asyncio.sleep(0.02)

    run(play, unload_after_s=60.0)


def test_a_response_in_the_background_keeps_its_model_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "LOOKS_S", 0.01)

    async def play(found: Models) -> None:
        engine = found.engines["small"]
        engine.engine_stats = replace(engine.engine_stats, num_running=1)
        asked = await found.client.post("/v1/responses", json={"model": "small", "input": "Hi", "background": True})
        assert asked.json()["status"] == "in_progress"
        await asyncio.sleep(0.3)
        assert found.states[0] == "loaded"
        engine.engine_stats = replace(engine.engine_stats, num_running=0)
        async with asyncio.timeout(10):
            while found.states[0] != "unloaded":
                await asyncio.sleep(0.02)
        await found.client.post("/v1/responses", json={"model": "small", "input": "Hi", "background": True})
        found.of("small").kill()
        async with asyncio.timeout(10):
            while found.table.rows[0].num_requests:
                await asyncio.sleep(0.02)

    run(play, unload_after_s=0.05)


@pytest.mark.parametrize("value", [True, "true", 1])
def test_responses_in_the_background_share_one_look_at_their_model(
    value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "LOOKS_S", 0.01)

    async def play(found: Models) -> None:
        engine, num_tasks = found.engines["small"], len(asyncio.all_tasks())
        engine.engine_stats = replace(engine.engine_stats, num_running=1)
        for _ in range(5):
            asked = await found.client.post(
                "/v1/responses", json={"model": "small", "input": "Hi", "background": value}
            )
            assert asked.json()["status"] == "in_progress"
        await asyncio.sleep(0.2)
        assert found.states[0] == "loaded" and found.table.rows[0].num_requests == 1
        assert len(asyncio.all_tasks()) <= num_tasks + 5, "one looks"
        engine.engine_stats = replace(engine.engine_stats, num_running=0)
        async with asyncio.timeout(10):
            while found.states[0] != "unloaded":
                await asyncio.sleep(0.02)

    run(play, unload_after_s=0.05)


@pytest.mark.parametrize("keys", [(), KEYS])
def test_a_batch_keeps_its_model_loaded_between_its_requests(
    keys: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine has no request here: `/health` does not count the fake one's."""
    monkeypatch.setattr(background, "LOOKS_S", 0.01)

    async def play(found: Models) -> None:
        engine, client = found.engines["small"], found.client
        engine.go_on.clear()
        for key in keys[:1]:  # the model is held for another client already
            client.headers["authorization"] = f"Bearer {key}"
            await client.post("/v1/responses", json={"input": "Hi", "background": True})
        for key in keys[1:]:
            client.headers["authorization"] = f"Bearer {key}"
        line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": CHAT}
        form = {"file": ("a.jsonl", json.dumps(line).encode()), "purpose": (None, b"batch")}
        file = (await client.post("/v1/files", files=form)).json()
        body = {"input_file_id": file["id"], "endpoint": line["url"], "completion_window": "24h"}
        batch = (await client.post("/v1/batches", json=body)).json()
        await asyncio.sleep(0.3)
        assert found.states[0] == "loaded" and found.table.rows[0].num_requests == 1
        assert (await client.get(f"/v1/batches/{batch['id']}")).json()["status"] == "in_progress"
        engine.go_on.set()
        async with asyncio.timeout(10):
            await until(lambda: found.states[0] == "unloaded")

    run(play, unload_after_s=0.05, options=ServerOptions(api_keys=keys))


@pytest.mark.parametrize(
    ("path", "prompt"), [("/api/chat", {"messages": CHAT["messages"]}), ("/api/generate", {"prompt": "Hi"})]
)
def test_ollamas_keep_alive_of_nothing_does_not_load_a_model(path: str, prompt: dict[str, Any]) -> None:
    async def play(found: Models) -> None:
        body = {"model": "big", "keep_alive": 0}
        [field] = prompt
        for empty in ({}, {field: None}, {field: type(prompt[field])()}):
            unloaded = await found.client.post(path, json=body | empty)
            assert not found.loaded
        assert (await found.client.post(path, json=body | {"model": "other"})).status_code == 404
        await found.client.post("/models/load", json={"model": "big"})
        wanted = await found.client.post(path, json=body)
        assert wanted.json()["done_reason"] == "unload"
        assert plain(unloaded.json()) == plain(wanted.json())
        async with asyncio.timeout(10):
            await until(lambda: found.states[1] == "unloaded")
        answer = await found.client.post(path, json=body | prompt)
        assert "I am large" in answer.text and len(found.loaded) == 2

    run(play)


def test_ollamas_keep_alive_of_nothing_unloads_the_model_after_the_answer() -> None:
    async def play(found: Models) -> None:
        for keep_alive, state in ((5, "loaded"), ("5m", "loaded"), (-1, "loaded"), (0, "unloaded"), ("0s", "unloaded")):
            await found.client.post("/api/chat", json={"model": "small", "keep_alive": keep_alive})
            async with asyncio.timeout(10):
                while found.states[0] != state:
                    await asyncio.sleep(0.001)
        await found.client.post("/v1/chat/completions", json=CHAT | {"model": "small", "keep_alive": 0})
        assert found.states[0] == "loaded", "it is Ollama's"

    run(play)


def test_pinned_models_are_awaited_before_the_server_is_ready() -> None:
    async def play(found: Models) -> None:
        async with asyncio.timeout(10):
            while (health := await found.client.get("/health")).status_code != 200:
                assert health.json()["status"] == "loading"
                await asyncio.sleep(0.005)
        assert found.states == ["loaded", "unloaded"]

    run(play, ModelSpec("small", source="", is_pinned=True), LARGE)


def test_keys_are_asked_for_and_each_has_a_namespace_of_its_own() -> None:
    async def play(found: Models) -> None:
        assert (await found.client.post("/v1/chat/completions", json=CHAT)).status_code == 401
        assert (await found.client.post("/models/load", json={"model": "small"})).status_code == 401
        assert found.states == ["unloaded"] * 2
        for key in KEYS:
            headers = {"Authorization": f"Bearer {key}"}
            assert (await found.client.post("/v1/chat/completions", json=CHAT, headers=headers)).status_code == 200
        assert len(set(found.engines["small"].namespaces_asked)) == 2
        assert set((await found.client.get("/health")).json()) == {"status", "reason"}
        assert "small" in (await found.client.get("/health", headers=headers)).json()["models"]

    run(play, options=ServerOptions(api_keys=KEYS))


def test_clients_take_turns_by_their_addresses_and_requests_keep_their_ids() -> None:
    async def play(found: Models) -> None:
        headers = {"x-forwarded-for": "192.0.2.7", "x-request-id": "mine"}
        answer = await found.client.post("/v1/chat/completions", json=CHAT, headers=headers)
        assert answer.headers.get_list("x-request-id") == ["mine"]
        assert [options.client for options in found.engines["small"].options] == ["192.0.2.7"]
        assert [options.request_id for options in found.engines["small"].options] == ["mine"]

    run(play)


def test_pages_of_other_sites_are_refused_and_those_that_are_let_in_are_not() -> None:
    async def play(found: Models) -> None:
        path = "/v1/chat/completions"
        foreign = await found.client.post(path, json=CHAT, headers={"Origin": "https://evil.example"})
        assert foreign.status_code == 403 and found.states == ["unloaded"] * 2
        welcome = await found.client.post(path, json=CHAT, headers={"Origin": "https://good.example"})
        assert welcome.status_code == 200
        assert welcome.headers["access-control-allow-origin"] == "https://good.example"
        assert (await found.client.get("/", headers={"Accept": "text/html"})).text.startswith("<!")
        paths = (await found.client.get("/openapi.json")).json()["paths"]
        assert {"/models/load", "/models/unload", "/v1/chat/completions"} <= set(paths)
        assert "version" in (await found.client.get("/version")).json()

    run(play, options=ServerOptions(cors_origins=["https://good.example"]))


def test_long_bodies_are_refused_and_long_answers_come_whole() -> None:
    async def play(found: Models) -> None:
        refused = await found.client.post("/v1/completions", json={"prompt": "x" * 300_000})
        assert refused.status_code == 413
        found.engines["small"].words = ["word " * 10_000] * 10
        prompt = "x" * 150_000
        answer = await found.client.post("/v1/completions", json={"model": "small", "prompt": prompt})
        assert answer.json()["choices"][0]["text"] == "word " * 100_000
        assert found.engines["small"].asked[0][0] == prompt

    run(play, options=ServerOptions(max_body_bytes=200_000))


@pytest.mark.parametrize(("path", "module"), [("/api/tags", "ollama_lists"), ("/metrics", "overview")])
def test_a_model_that_comes_while_the_others_are_asked_is_no_error(
    monkeypatch: pytest.MonkeyPatch, path: str, module: str
) -> None:
    async def play(found: Models) -> None:
        async def answer(*_: object) -> None:
            if len(found.table.rows) == 2:
                found.table.add(ModelSpec("later", source="hf:a/b"))
            await asyncio.sleep(0)

        monkeypatch.setattr(f"radixlm.runtime.router.{module}.answer_in_time", answer)
        response = await found.client.get(path)
        assert response.status_code == 200 and len(found.table.rows) == 3

    run(play)
