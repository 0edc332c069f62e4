"""Models that clients pull and delete: only if the operator allows it, only those that clients pulled."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from radixlm.runtime.router.model_row import ModelSpec
from radixlm.runtime.router.pulling import Pulling
from radixlm.runtime.server.errors import HTTPError
from starlette.requests import Request
from starlette.responses import StreamingResponse

from .served_models import Models, models, until

SMALL = ModelSpec("small", source="", aliases=("*",))
ASKED = {"messages": [{"role": "user", "content": "Hi"}]}


@dataclass
class FakeLibrary:
    """Has every model but those called `no`."""

    pulled: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)

    def spec_of(self, name: str) -> ModelSpec:
        if name.startswith("no"):
            raise HTTPError(404, f"{name} is no model of the hub", code="model_not_found")
        return ModelSpec(name, source=f"hf:{name}")

    def has(self, name: str) -> bool:
        return name in self.pulled

    def add(self, spec: ModelSpec) -> None:
        self.pulled.append(spec.name)

    def forget(self, spec: ModelSpec) -> None:
        time.sleep(0.01)  # a slow disk
        self.pulled.remove(spec.name)

    def remove_artifact(self, spec: ModelSpec, served: Sequence[ModelSpec]) -> None:
        if spec.source not in [each.source for each in served]:
            self.removed.append(spec.source)


def run(play: Callable[[Models], Awaitable[None]], library: FakeLibrary | None, *specs: ModelSpec) -> None:
    async def playing() -> None:
        async with models(*(specs or (SMALL,)), library=library) as found:
            await play(found)

    asyncio.run(asyncio.wait_for(playing(), 60))


async def pull(found: Models, name: str, **body: Any) -> list[Any]:
    answer = await found.client.post("/api/pull", json={"model": name, **body})
    return [answer.status_code, *map(json.loads, answer.text.splitlines())]


async def delete(found: Models, name: str) -> tuple[int, str]:
    answer = await found.client.request("DELETE", "/api/delete", json={"model": name})
    return answer.status_code, answer.text


async def names(found: Models) -> list[str]:
    return [each["model"] for each in (await found.client.get("/api/tags")).json()["models"] if "model" in each]


def test_unless_the_operator_allows_it_both_are_refused_and_load_nothing() -> None:
    async def play(found: Models) -> None:
        for asked in (await pull(found, "other"), await pull(found, "other", stream=False)):
            assert asked[0] == 403 and "--allow-pull" in asked[1]["error"]
        assert await pull(found, "small:latest") == [200, {"status": "success"}], "it is here"
        for name, status in (("small", 403), ("other", 404)):
            assert (await delete(found, name))[0] == status
        assert (await found.client.post("/api/pull", json={})).status_code == 400
        assert found.states == ["unloaded"]

    run(play, None)


def test_a_pulled_model_is_served_from_then_on_until_it_is_deleted() -> None:
    library = FakeLibrary()

    async def play(found: Models) -> None:
        status, first, *steps, last = await pull(found, "org/new:latest")
        assert (status, first, last) == (200, {"status": "pulling manifest"}, {"status": "success"})
        assert steps in ([], [{"status": "compile", "total": 100, "completed": 50}])
        assert library.pulled == ["org/new"] and found.states == ["unloaded", "loaded"]
        answer = await found.client.post("/v1/chat/completions", json=ASKED | {"model": "org/new"})
        assert answer.json()["choices"][0]["message"]["content"] == "I am org/new, said once."
        assert await pull(found, "org/new", stream=False) == [200, {"status": "success"}]
        assert [row.num_loads for row in found.table.rows] == [0, 1], "it was here"
        assert (await delete(found, "small"))[0] == 403, "which no client pulled"
        assert await delete(found, "org/new") == (200, "")
        assert (library.pulled, library.removed, len(found.table.rows)) == ([], ["hf:org/new"], 1)
        assert (await delete(found, "org/new"))[0] == 404

    run(play, library)


def test_a_model_that_cannot_be_loaded_is_not_served_and_the_client_is_told() -> None:
    library = FakeLibrary()

    async def play(found: Models) -> None:
        found.broken.add("bad")
        status, *lines = await pull(found, "bad")
        assert status == 200 and lines[-1] == {"error": "bad is broken"}
        assert (await pull(found, "bad", stream=False))[0] == 503
        assert (await pull(found, "no-such"))[0] == 404
        assert library.pulled == [] and len(found.table.rows) == 1

    run(play, library)


def test_clients_that_pull_the_same_model_have_it_loaded_once_and_one_that_leaves_harms_none() -> None:
    library = FakeLibrary()

    async def play(found: Models) -> None:
        pulls = [asyncio.create_task(pull(found, "new")) for _ in range(4)]
        await until(lambda: len(found.table.rows) == 2)
        pulls[0].cancel()
        for answer in await asyncio.gather(*pulls[1:]):
            assert answer[-1] == {"status": "success"}
        assert library.pulled == ["new"] and found.table.rows[1].num_loads == 1

    run(play, library)


def test_a_model_is_deleted_when_its_requests_have_ended_and_the_only_one_is_not() -> None:
    library = FakeLibrary(["new", "small"])

    async def play(found: Models) -> None:
        engine = found.engines["new"]
        engine.go_on.clear()
        asked = asyncio.create_task(found.client.post("/v1/chat/completions", json=ASKED | {"model": "new"}))
        await until(lambda: bool(engine.asked))
        deleting = asyncio.create_task(delete(found, "new"))
        await until(lambda: len(found.table.rows) == 1)
        assert not deleting.done() and (await delete(found, "new"))[0] == 404, "no other request finds it"
        engine.go_on.set()
        assert (await asked).json()["choices"][0]["message"]["content"] == "I am new, said once."
        assert (await deleting)[0] == 200
        status, said = await delete(found, "small")
        assert status == 409 and "only model" in said

    run(play, library, SMALL, ModelSpec("new", source="hf:new"))


def test_a_model_that_is_pulled_again_while_it_is_deleted_is_kept() -> None:
    library = FakeLibrary(["new"])

    async def play(found: Models) -> None:
        engine = found.engines["new"]
        engine.go_on.clear()
        asked = asyncio.create_task(found.client.post("/v1/chat/completions", json=ASKED | {"model": "new"}))
        await until(lambda: bool(engine.asked))
        deleting = asyncio.create_task(delete(found, "new"))
        await until(lambda: len(found.table.rows) == 1)
        assert library.pulled == [], "a restart does not bring it back"
        pulling = asyncio.create_task(pull(found, "new"))
        await until(lambda: len(found.table.rows) == 2)
        engine.go_on.set()
        await asked
        assert (await deleting)[0] == 200 and (await pulling)[-1] == {"status": "success"}
        assert (library.pulled, library.removed, found.states) == (["new"], [], ["unloaded", "loaded"])

    run(play, library, SMALL, ModelSpec("new", source="hf:new"))


def test_the_last_model_is_not_deleted_while_another_may_fail_to_load() -> None:
    async def play(found: Models) -> None:
        found.broken.add("bad")
        found.loading.clear()
        pulling = asyncio.create_task(pull(found, "bad"))
        await until(lambda: len(found.table.rows) == 2)
        deleting = await delete(found, "one")
        found.loading.set()
        assert deleting[0] == 409 and (await pulling)[-1] == {"error": "bad is broken"}
        assert await names(found) == ["one:latest"]

    run(play, FakeLibrary(["one"]), ModelSpec("one", source="hf:one"))


def test_a_pull_that_fails_before_its_first_line_is_told() -> None:
    async def play(found: Models) -> None:
        pulling = Pulling(found.table, FakeLibrary())  # type: ignore[arg-type]
        found.broken.add("bad")
        request = Request({"type": "http", "method": "POST", "path": "/api/pull", "headers": []}, body_of("bad"))
        answer = await pulling.pull(request)
        assert isinstance(answer, StreamingResponse)
        await until(lambda: len(found.table.rows) == 1)
        await asyncio.sleep(0)  # its last callback
        lines = [json.loads(bytes(line)) async for line in answer.body_iterator]  # type: ignore[arg-type]
        assert lines[-1] == {"error": "bad is broken"}

    run(play, None)


def body_of(name: str) -> Callable[[], Awaitable[dict[str, Any]]]:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps({"model": name}).encode()}

    return receive


def test_one_model_stays_when_two_are_deleted_at_once() -> None:
    async def play(found: Models) -> None:
        answers = await asyncio.gather(delete(found, "one"), delete(found, "other"))
        assert sorted(status for status, _ in answers) == [200, 409] and len(found.table.rows) == 1

    run(play, FakeLibrary(["one", "other"]), *(ModelSpec(name, source=f"hf:{name}") for name in ("one", "other")))
