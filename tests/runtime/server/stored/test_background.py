"""Responses in the background: polled, cancelled, continued once they have ended, and never lost in silence.

Law: a response in the background ends as the same request without `background` does.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from radixlm.runtime.errors import EngineError
from radixlm.runtime.server import create_app
from radixlm.runtime.server.stored.background import BackgroundResponses
from radixlm.runtime.server.stored.turns import Turns
from starlette.testclient import TestClient

from ..real_server import real_engine, wait_until

if TYPE_CHECKING:
    from ..conftest import FakeEngine

RESPONSES = "/v1/responses"
ASIDE = {"id", "created_at", "background", "conversation"}


@pytest.fixture
def waiting(engine: FakeEngine) -> Iterator[TestClient]:
    """A client of a server whose replies do not end until `engine.go_on` is set."""
    engine.go_on.clear()
    with TestClient(create_app(engine, api_keys=["sk-1", "sk-2"])) as client:  # type: ignore[arg-type]
        client.headers["authorization"] = "Bearer sk-1"
        yield client
        engine.go_on.set()


def begin(client: TestClient, **body: Any) -> Any:
    reply = client.post(RESPONSES, json={"input": "Hi", "background": True, **body})
    assert reply.status_code == 200, reply.text
    assert (reply.json()["status"], reply.json()["background"], reply.json()["output"]) == ("in_progress", True, [])
    return reply.json()


def of(client: TestClient, response: Any) -> Any:
    return client.get(f"{RESPONSES}/{response['id']}").json()


def ended(client: TestClient, response: Any) -> Any:
    wait_until(lambda: of(client, response)["status"] != "in_progress")
    return of(client, response)


def plain(response: Any) -> Any:
    """A response without ids and times."""
    found = {name: value for name, value in response.items() if name not in ASIDE}
    return found | {"output": [{**item, "id": ""} for item in response["output"]]}


@pytest.mark.parametrize("body", [{}, {"max_output_tokens": 2, "metadata": {"a": "b"}, "instructions": "Be brief."}])
def test_it_is_polled_until_it_ends_as_any_other(waiting: TestClient, engine: FakeEngine, body: Any) -> None:
    begun = begin(waiting, **body)
    assert of(waiting, begun) == begun
    items = waiting.get(f"{RESPONSES}/{begun['id']}/input_items").json()["data"]
    assert items[0]["content"][0]["text"] == "Hi"
    engine.go_on.set()
    whole = ended(waiting, begun)
    assert waiting.get(f"{RESPONSES}/{begun['id']}/input_items").json()["data"] == items
    alone = waiting.post(RESPONSES, json={"input": "Hi", **body}).json()
    assert whole["id"] == begun["id"] and whole["background"] and plain(whole) == plain(alone)
    assert whole["status"] == ("incomplete" if body else "completed")


def test_it_is_continued_once_it_has_ended(waiting: TestClient, engine: FakeEngine) -> None:
    conversation = waiting.post("/v1/conversations", json={}).json()["id"]
    begun = begin(waiting, conversation=conversation)
    early = waiting.post(RESPONSES, json={"input": "And?", "previous_response_id": begun["id"]})
    assert early.status_code == 400 and "is in_progress" in early.json()["error"]["message"]
    assert waiting.get(f"/v1/conversations/{conversation}/items").json()["data"] == []
    engine.go_on.set()
    ended(waiting, begun)
    then = begin(waiting, input="And?", previous_response_id=begun["id"])
    assert ended(waiting, then)["previous_response_id"] == begun["id"]
    assert [message["content"] for message in engine.asked[-1][0]] == ["Hi", "Hello wörld!", "And?"]  # type: ignore[attr-defined]
    assert engine.options[-1].earlier is not None, "its token ids were kept"
    assert len(waiting.get(f"/v1/conversations/{conversation}/items").json()["data"]) == 2


def test_it_is_cancelled_and_stays_so(waiting: TestClient, engine: FakeEngine) -> None:
    begun = begin(waiting)
    path = f"{RESPONSES}/{begun['id']}/cancel"
    assert waiting.post(path, headers={"authorization": "Bearer sk-2"}).status_code == 404
    for _ in range(2):
        assert waiting.post(path).json() == begun | {"status": "cancelled"} == of(waiting, begun)
    assert engine.streams[-1].cancelled.is_set()
    refused = waiting.post(RESPONSES, json={"input": "And?", "previous_response_id": begun["id"]})
    assert refused.status_code == 400 and "is cancelled" in refused.json()["error"]["message"]
    engine.go_on.set()
    whole = ended(waiting, begin(waiting))
    assert waiting.post(f"{RESPONSES}/{whole['id']}/cancel").json() == whole, "one that has ended stays as it is"


def test_a_poll_while_it_is_cancelled_does_not_see_it_fail(
    waiting: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, seen = begin(waiting), list[str]()
    change_response = Turns.change_response

    async def polled(turns: Turns, *given: Any) -> None:
        seen.append((await asyncio.to_thread(of, waiting, begun))["status"])
        await change_response(turns, *given)

    monkeypatch.setattr(Turns, "change_response", polled)
    assert waiting.post(f"{RESPONSES}/{begun['id']}/cancel").json()["status"] == "cancelled"
    assert seen == ["in_progress", "cancelled"]


def test_cancelled_again_while_its_last_status_is_stored_it_is_stored() -> None:
    stored = list[str]()

    async def main() -> None:
        storing, disk = asyncio.Event(), asyncio.Event()

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                storing.set()
                await disk.wait()
                stored.append("cancelled")
                raise

        responses = BackgroundResponses()
        await responses.begin("resp_1", work())
        first = asyncio.create_task(responses.cancel("resp_1"))
        await storing.wait()
        second = asyncio.create_task(responses.cancel("resp_1"))
        await asyncio.sleep(0)
        disk.set()
        await asyncio.gather(first, second)
        assert not responses.is_running("resp_1") and not responses.is_cancelled("resp_1")

    asyncio.run(main())
    assert stored == ["cancelled"]


def test_the_model_of_a_server_of_several_may_be_named(waiting: TestClient, engine: FakeEngine) -> None:
    engine.go_on.set()
    response = ended(waiting, begin(waiting))
    assert waiting.get(f"{RESPONSES}/{response['id']}?model=small").json() == response
    assert waiting.get(f"{RESPONSES}/{response['id']}/input_items?model=small&limit=1").status_code == 200
    assert waiting.get(f"{RESPONSES}/{response['id']}?modal=small").status_code == 400


@pytest.mark.parametrize("how", ["response", "cache"])
def test_one_that_is_deleted_is_not_stored_again(waiting: TestClient, engine: FakeEngine, how: str) -> None:
    begun = begin(waiting)
    waiting.delete(f"{RESPONSES}/{begun['id']}" if how == "response" else "/v1/cache")
    assert engine.streams[-1].cancelled.is_set() == (how == "response")
    engine.go_on.set()
    ended(waiting, begin(waiting))
    assert waiting.get(f"{RESPONSES}/{begun['id']}").status_code == 404


def test_one_that_fails_says_why(waiting: TestClient, engine: FakeEngine) -> None:
    engine.words.insert(1, EngineError("the model broke"))
    begun = begin(waiting)
    engine.go_on.set()
    failed = ended(waiting, begun)
    assert failed["status"] == "failed" and failed["error"] == {"code": "server_error", "message": "the model broke"}


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"stream": True}, "stream", "poll GET /v1/responses/ID"),
        ({"store": False}, "background", "set store to true"),
        ({"cache_match": "off"}, "background", "set store to true"),
        ({"input": ""}, "input", "empty"),
    ],
)
def test_what_cannot_be_is_refused_at_once(waiting: TestClient, body: Any, param: str, says: str) -> None:
    reply = waiting.post(RESPONSES, json={"input": "Hi", "background": True, **body})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param and says in reply.text


def test_a_server_that_keeps_nothing_makes_none(engine: FakeEngine) -> None:
    client = TestClient(create_app(engine, keeps_responses=False))  # type: ignore[arg-type]
    reply = client.post(RESPONSES, json={"input": "Hi", "background": True})
    assert reply.status_code == 400 and "--no-keep-responses" in reply.json()["error"]["message"]


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.runtime.server.real_server import real_engine
from radixlm.runtime.server import create_app
from starlette.testclient import TestClient
engine, model = real_engine(store=Path(sys.argv[1]))
model.step_s = 60
with TestClient(create_app(engine)) as client:
    body = {"input": "once there was", "max_output_tokens": 4, "background": True}
    print(client.post("/v1/responses", json=body).json()["id"], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_one_that_a_kill_ended_has_failed_after_the_restart(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[4]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    killed = [sys.executable, "-c", KILLED, str(tmp_path)]
    done = subprocess.run(killed, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    path = f"{RESPONSES}/{done.stdout.strip()}"
    engine, _ = real_engine(store=tmp_path)
    with engine, TestClient(create_app(engine)) as client:
        found = client.get(path).json()
        assert found["status"] == "failed" and "the server stopped before" in found["error"]["message"]
        assert client.post(f"{path}/cancel").json() == found == client.get(path).json()
        assert client.delete(path).status_code == 200
