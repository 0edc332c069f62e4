"""A server in front of servers: the same answers, past dead replicas, and no client waits for one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

import pytest
from radixlm.runtime.extras.ray import replica_front
from radixlm.runtime.extras.ray.asgi_messages import answer_of, plain_scope
from radixlm.runtime.extras.ray.prefix_router import RoutedPrompt, RouterPolicy
from radixlm.runtime.extras.ray.replica_front import REPLICA_HEADER, ReplicaFront, ReplicaGone
from radixlm.runtime.server.http import request_body
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient
from starlette.types import Message, Receive, Scope, Send

TALK = "A question that is longer than a block, so that it can be found again. "


class FakeReplica:
    """A small server, which dies when it is told to."""

    def __init__(self) -> None:
        self.dies_after: int | None = None  # messages of an answer
        self.returns = asyncio.Event()
        self.bodies: list[bytes] = []
        self.clients = set[str]()
        self.num_cancelled = 0
        routes = [
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/cache", self._forget, methods=["DELETE"]),
            Route("/fails", self._fail),
        ]
        self.app = Starlette(routes=routes)

    async def ask(self, scope: Mapping[str, Any], body: bytes) -> AsyncGenerator[list[Message]]:
        num_messages = 0
        json.dumps({**scope, "headers": None, "raw_path": None, "query_string": None})  # all of it can be sent
        try:
            async with aclosing(answer_of(self.app, dict(scope), body)) as batches:
                async for batch in batches:
                    for message in batch:
                        if self.dies_after == num_messages:
                            raise ReplicaGone("killed")
                        num_messages += 1
                        yield [message]
        except GeneratorExit:
            self.num_cancelled += 1
            raise

    async def wait_until_ready(self) -> None:
        await self.returns.wait()

    async def _chat(self, request: Request) -> Response:
        body = await request.body()
        self.bodies.append(body)
        self.clients.add("" if request.client is None else request.client.host)
        if json.loads(body).get("stream"):
            return StreamingResponse(self._events(), media_type="text/event-stream")
        return JSONResponse({"length": len(body)})

    async def _events(self) -> AsyncGenerator[bytes]:
        for number in range(3):
            yield f"data: {number}\n\n".encode()

    async def _forget(self, request: Request) -> Response:
        if "x" in request.query_params:
            return JSONResponse({"error": "no parameter x"}, 400)
        return JSONResponse({"num_freed_pages": 2, "num_kept_pages": 1, "object": "cache.cleared"})

    async def _fail(self, request: Request) -> Response:
        raise RuntimeError("a bug")


@pytest.fixture
def replicas() -> dict[str, FakeReplica]:
    return {"one": FakeReplica(), "two": FakeReplica()}


@pytest.fixture
def client(replicas: dict[str, FakeReplica]) -> Iterator[TestClient]:
    front = ReplicaFront(replicas, policy=RouterPolicy(max_lead=2), max_body_bytes=1000)
    with TestClient(front.app(), raise_server_exceptions=False) as client:
        yield client


def ask(client: TestClient, text: str, **more: Any) -> Any:
    body = {"messages": [{"role": "user", "content": text}], **more}
    return client.post("/v1/chat/completions", json=body)


def test_a_replica_is_told_whose_request_it_is(client: TestClient, replicas: dict[str, FakeReplica]) -> None:
    """Without keys all clients were one for the turns of a replica."""
    ask(client, TALK)
    assert set[str].union(*(each.clients for each in replicas.values())) == {"testclient"}


def test_conversations_spread_and_go_on_where_they_began(client: TestClient) -> None:
    first = [ask(client, f"{number} {TALK}").headers[REPLICA_HEADER] for number in range(6)]
    again = [ask(client, f"{number} {TALK}{TALK}").headers[REPLICA_HEADER] for number in range(6)]
    assert first == again and sorted(first) == ["one"] * 3 + ["two"] * 3


def test_a_front_of_engines_whose_match_is_off_remembers_no_prompt(replicas: dict[str, FakeReplica]) -> None:
    front = ReplicaFront(replicas, policy=RouterPolicy(max_lead=2), match="off")
    with TestClient(front.app()) as client:
        places = {ask(client, f"{TALK}{TALK * number}").headers[REPLICA_HEADER] for number in range(6)}
    assert places == {"one"}  # none holds anything: the first of those that are free


def test_answers_and_streams_come_as_the_replica_sends_them(client: TestClient) -> None:
    assert ask(client, "Hi").json()["length"] > 10
    streamed = ask(client, "Hi", stream=True)
    assert streamed.text == "data: 0\n\ndata: 1\n\ndata: 2\n\n"
    assert streamed.headers["content-type"].startswith("text/event-stream")


def test_a_replica_that_dies_before_it_answers_is_replaced(
    client: TestClient, replicas: dict[str, FakeReplica]
) -> None:
    place = ask(client, TALK).headers[REPLICA_HEADER]
    other = ({*replicas} - {place}).pop()
    replicas[place].dies_after = 0
    again = ask(client, TALK + TALK)
    assert again.status_code == 200 and again.headers[REPLICA_HEADER] == other
    health = client.get("/health")
    assert health.status_code == 200 and health.json()["status"] == "degraded"
    assert health.json()["replicas"][place] == {"status": "gone", "num_requests": 0}
    replicas[place].dies_after = None
    replicas[place].returns.set()
    client.get("/health")
    assert client.get("/health").json()["status"] == "ready"


def test_a_replica_that_dies_in_mid_stream_says_so_in_the_stream(
    client: TestClient, replicas: dict[str, FakeReplica]
) -> None:
    for replica in replicas.values():
        replica.dies_after = 2
    events = ask(client, TALK, stream=True).text.split("\n\n")
    assert events[0] == "data: 0" and json.loads(events[1].removeprefix("data: "))["error"]["code"] == "replica_gone"


def test_without_replicas_clients_are_told_at_once(client: TestClient, replicas: dict[str, FakeReplica]) -> None:
    for replica in replicas.values():
        replica.dies_after = 0
    answer = ask(client, TALK)
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "no_replica"
    assert int(answer.headers["retry-after"]) > 0
    assert client.get("/health").status_code == 503


def test_a_request_that_kills_who_takes_it_kills_no_third_replica() -> None:
    replicas = {name: FakeReplica() for name in ("one", "two", "three", "four")}
    for replica in replicas.values():
        replica.dies_after = 0
    with TestClient(ReplicaFront(replicas).app(), raise_server_exceptions=False) as client:
        answer = ask(client, TALK)
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "replica_gone"
        living = [one["status"] for one in client.get("/health").json()["replicas"].values()]
        assert sorted(living) == ["gone", "gone", "ready", "ready"]
        for replica in replicas.values():
            replica.dies_after = None
        assert ask(client, TALK).status_code == 200, "others are served"


def test_without_replicas_nothing_is_said_to_be_forgotten(client: TestClient, replicas: dict[str, FakeReplica]) -> None:
    for replica in replicas.values():
        replica.dies_after = 0
    for _ in range(2):  # they die of it, and then there is none
        answer = client.delete("/v1/cache")
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "no_replica"
        assert int(answer.headers["retry-after"]) > 0


def test_a_body_that_does_not_come_is_not_waited_for_for_ever(
    replicas: dict[str, FakeReplica], monkeypatch: pytest.MonkeyPatch
) -> None:
    hasty = partial(request_body.read_body, deadline_s=0.05)
    monkeypatch.setattr(replica_front, "read_body", hasty)
    sent: list[Message] = []

    async def ask_slowly() -> None:
        first: list[Message] = [{"type": "http.request", "body": b"{", "more_body": True}]

        async def receive() -> Message:
            if first:
                return first.pop()
            await asyncio.sleep(3600)
            raise AssertionError

        async def send(message: Message) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
        await ReplicaFront(replicas).app()(scope, receive, send)

    asyncio.run(ask_slowly())
    assert sent[0]["status"] == 408


def test_a_long_body_is_read_beside_the_loop(
    client: TestClient, replicas: dict[str, FakeReplica], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[bool] = []

    def of(*arguments: Any, **options: Any) -> RoutedPrompt:
        try:
            asyncio.get_running_loop()
            threads.append(False)
        except RuntimeError:
            threads.append(True)
        return RoutedPrompt()

    monkeypatch.setattr(replica_front.RoutedPrompt, "of", of)
    with TestClient(ReplicaFront(replicas).app()) as roomy:
        assert ask(roomy, "short").status_code == ask(roomy, "x" * 100_000).status_code == 200
    assert threads == [False, True]


def test_an_error_of_the_replicas_server_is_an_answer_and_no_death(client: TestClient) -> None:
    assert client.get("/fails").status_code == 500
    assert client.get("/health").json()["status"] == "ready"


def test_a_client_can_name_the_replica(client: TestClient) -> None:
    body = {"messages": [{"role": "user", "content": TALK}]}
    for name in ("two", "one", "two"):
        answer = client.post("/v1/chat/completions", json=body, headers={REPLICA_HEADER: name})
        assert answer.headers[REPLICA_HEADER] == name
    answer = client.post("/v1/chat/completions", json=body, headers={REPLICA_HEADER: "three"})
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "replica_not_found"


def test_what_is_forgotten_is_forgotten_by_all(client: TestClient) -> None:
    cleared = {"num_freed_pages": 4, "num_kept_pages": 2, "object": "cache.cleared"}
    places = [ask(client, TALK).headers[REPLICA_HEADER], ask(client, f"other {TALK}").headers[REPLICA_HEADER]]
    refused = client.delete("/v1/cache?x=1")
    assert refused.status_code == 400 and "error" in refused.json()
    assert ask(client, TALK).headers[REPLICA_HEADER] == places[0]
    assert client.delete("/v1/cache").json() == cleared
    swapped = [ask(client, f"other {TALK}").headers[REPLICA_HEADER], ask(client, TALK).headers[REPLICA_HEADER]]
    assert swapped == places != swapped[::-1]


def test_a_long_body_is_refused_before_it_is_sent_on(client: TestClient, replicas: dict[str, FakeReplica]) -> None:
    assert ask(client, "x" * 2000).status_code == 413
    assert not any(replica.bodies for replica in replicas.values())


def test_keys_are_asked_for_and_set_caches_apart(replicas: dict[str, FakeReplica]) -> None:
    front = ReplicaFront(replicas)
    with TestClient(front.app(["alice", "bob"])) as client:
        assert ask(client, TALK).status_code == 401 and client.get("/health").status_code == 200
        assert client.get("/health").json() == {"status": "ready", "replicas": {}}
        places = {}
        for key in ("alice", "bob"):  # the same text, but whoever holds it for one holds nothing for the other
            client.headers["authorization"] = f"Bearer {key}"
            places[key] = ask(client, TALK).headers[REPLICA_HEADER]
        assert places["alice"] != places["bob"]
        assert ask(client, TALK).headers[REPLICA_HEADER] == places["bob"]


def test_the_overloaded_one_is_avoided_and_a_client_that_leaves_is_cancelled() -> None:
    asyncio.run(_overload())


async def _overload() -> None:
    is_stopped = asyncio.Event()

    async def waits(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await receive()  # until the client has gone
        is_stopped.set()

    replicas = {"one": FakeReplica(), "two": FakeReplica()}
    app = ReplicaFront(replicas, policy=RouterPolicy(max_lead=2)).app()
    body = json.dumps({"messages": [{"role": "user", "content": TALK}]}).encode()
    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers, "query_string": b""}

    async def place() -> str:
        messages = [message async for batch in answer_of(app, dict(scope), body) for message in batch]
        return str(dict(messages[0]["headers"])[REPLICA_HEADER.encode()].decode())

    async def loads() -> dict[str, int]:
        asked = {**scope, "method": "GET", "path": "/health"}
        body = b"".join([message.get("body", b"") async for batch in answer_of(app, asked, b"") for message in batch])
        return {name: replica["num_requests"] for name, replica in json.loads(body)["replicas"].items()}

    holder = await place()
    replicas[holder].app = waits  # type: ignore[assignment]
    waiting = [answer_of(app, dict(scope), body) for _ in range(2)]
    reading = [asyncio.create_task(anext(one)) for one in waiting]
    while (await loads())[holder] < 2:
        await asyncio.sleep(0)
    assert await place() != holder
    for task, one in zip(reading, waiting, strict=True):
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await one.aclose()
    await asyncio.wait_for(is_stopped.wait(), 10)
    assert await loads() == {"one": 0, "two": 0}
    assert plain_scope({**scope, "app": object()}) == scope


def client_of_front(replicas: dict[str, FakeReplica], **options: Any) -> TestClient:
    return TestClient(ReplicaFront(replicas).app(**options), raise_server_exceptions=False)


PATHS = [("POST", "/v1/chat/completions"), ("DELETE", "/v1/cache"), ("GET", "/health")]


@pytest.mark.parametrize("host", ["evil.example:8000", "localhost.evil.example", ""])
def test_a_page_that_made_its_own_name_point_to_the_front_may_nothing(
    replicas: dict[str, FakeReplica], host: str
) -> None:
    client = client_of_front(replicas, hosts=("localhost", "gpu.example"))
    for method, path in PATHS:
        response = client.request(method, path, headers={"host": host}, json={"messages": []})
        assert (response.status_code, response.json()["error"]["code"]) == (403, "host_not_allowed")
        assert "hosts=" in response.json()["error"]["message"]
    assert not any(replica.bodies for replica in replicas.values())
    for known in ("localhost:8000", "gpu.example", "127.0.0.1"):
        assert client.get("/health", headers={"host": known}).status_code == 200


def test_a_page_of_another_site_may_not_send_requests_to_the_front(replicas: dict[str, FakeReplica]) -> None:
    client = client_of_front(replicas)
    for method, path in PATHS[:2]:
        response = client.request(method, path, headers={"origin": "https://evil.example"}, json={"messages": []})
        assert (response.status_code, response.json()["error"]["code"]) == (403, "origin_not_allowed")
    assert not any(replica.bodies for replica in replicas.values())
    assert ask(client, TALK).status_code == 200, "no browser sends it"


def test_a_page_that_was_asked_in_is_asked_by_no_replica_where_it_comes_from() -> None:
    """A replica knows no origins: it would refuse what the front lets in."""
    origins: list[list[bytes]] = []

    class Noting(FakeReplica):
        async def ask(self, scope: Mapping[str, Any], body: bytes) -> AsyncGenerator[list[Message]]:
            origins.append([value for name, value in scope["headers"] if name == b"origin"])
            async for batch in super().ask(scope, body):
                yield batch

    client = client_of_front({"one": Noting()}, cors_origins=("https://example.com",))
    headers = {"origin": "https://example.com"}
    answer = client.post("/v1/chat/completions", json={"messages": []}, headers=headers)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "https://example.com")
    assert client.delete("/v1/cache", headers=headers).status_code == 200
    assert origins == [[], []]
    preflight = headers | {"access-control-request-method": "POST"}
    assert client.options("/v1/chat/completions", headers=preflight).status_code == 200


def test_bodies_that_arrive_at_the_front_have_a_bound_together(
    replicas: dict[str, FakeReplica], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_front, "MAX_BODIES", 0.5)
    front = ReplicaFront(replicas, max_body_bytes=1000)
    with TestClient(front.app()) as client:
        assert ask(client, "x" * 700).status_code == 503
        assert [ask(client, "x" * 300).status_code for _ in range(3)] == [200] * 3
