"""One client keeps no other waiting: each kind of work has its own threads, clients their turns, and the queue an end.

Clients, requests and threads are as many as it takes; all that is worked on stands still until it is let go.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from radixlm.runtime.server import create_app
from radixlm.runtime.server.work_queues import AT_ONCE_BYTES, LONG_BODY_BYTES, NUM_SHORT, WorkQueues
from starlette.requests import Request

from .conftest import FakeEngine
from .real_server import WAIT_S

NUM_REQUESTS = 60  # more than anyio has threads
LANES_OF = WorkQueues.of
LONG = "once there was " * 10_000
SHORT = "once there was " * 200  # and yet too long to be worked on at once
TALK = [{"role": role, "content": LONG} for role in ("user", "assistant", "user")]
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
FLOODS: dict[str, tuple[str, str, Any]] = {
    "texts to tokenize": ("POST", "/tokenize", {"prompt": LONG}),
    "conversations to tokenize": ("POST", "/tokenize", {"messages": TALK}),
    "short texts to tokenize": ("POST", "/tokenize", {"prompt": "Hi"}),
    "ids to spell": ("POST", "/detokenize", {"tokens": [1] * 20_000}),
    "histories to truncate": ("POST", "/v1/chat/completions", {"messages": TALK, "truncation": "middle"}),
    "inputs to truncate": ("POST", "/v1/responses", {"input": TALK, "truncation": "auto"}),
    "messages to truncate": ("POST", "/v1/messages", {"messages": TALK, "truncation": "middle", "max_tokens": 5}),
    "messages to count": ("POST", "/v1/messages/count_tokens", {"messages": TALK}),
    "long prompts": ("POST", "/v1/completions", {"prompt": LONG}),
    "caches to clear": ("DELETE", "/v1/cache", None),
    "caches to see": ("GET", "/v1/cache", None),
}


@dataclass
class StandingEngine(FakeEngine):
    """Stands still over all that is done in threads, but for a prompt that is `Hi` in a chat, until `let_go`."""

    let_go: threading.Event = field(default_factory=threading.Event)
    begun: list[str] = field(default_factory=list)

    def _stand(self, work: str) -> None:
        self.begun.append(work)
        assert self.let_go.wait(WAIT_S)

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        self._stand("encode")
        return super().encode("few words", add_bos=add_bos)

    def encode_chat(self, messages: Any, tools: object = (), template_kwargs: object = None) -> list[int]:
        self._stand("encode_chat")
        return super().encode_chat(messages, tools, template_kwargs)

    def decode(self, token_ids: Any) -> str:
        self._stand("decode")
        return super().decode(token_ids)

    def cache_tree(self, namespace: bytes) -> Any:
        self._stand("cache_tree")
        return super().cache_tree(namespace)

    def clear_cache(self, namespace: bytes) -> Any:
        self._stand("clear_cache")
        return super().clear_cache(namespace)

    def stream(self, prompt: Any, *arguments: Any, **options: Any) -> Any:
        if prompt != CHAT["messages"]:
            self._stand(prompt[:3] if isinstance(prompt, str) else "stream")
        return super().stream(prompt, *arguments, **options)


@pytest.fixture
def standing() -> Iterator[StandingEngine]:
    engine = StandingEngine()
    yield engine
    engine.let_go.set()


@asynccontextmanager
async def client_of(engine: FakeEngine, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(engine, **options)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        yield client


@pytest.fixture
def work_queues(monkeypatch: pytest.MonkeyPatch) -> list[WorkQueues]:
    """Those of each server that is made."""
    made: list[WorkQueues] = []

    def of(engine: Any) -> WorkQueues:
        made.append(LANES_OF(engine))
        return made[-1]

    monkeypatch.setattr(WorkQueues, "of", of)
    return made


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize(("method", "path", "body"), FLOODS.values(), ids=FLOODS)
def test_a_flood_of_one_kind_leaves_a_short_chat_its_thread(
    standing: StandingEngine, method: str, path: str, body: Any
) -> None:
    """All kinds shared forty threads: a hundred texts to tokenize made a chat of one token take fourteen seconds."""

    async def run() -> None:
        async with client_of(standing) as client:
            flood = [asyncio.create_task(client.request(method, path, json=body)) for _ in range(NUM_REQUESTS)]
            await until(lambda: bool(standing.begun))
            try:
                async with asyncio.timeout(WAIT_S):
                    answer = await client.post("/v1/chat/completions", json=CHAT)
                assert answer.status_code == 200
                assert not any(task.done() for task in flood) and len(standing.begun) <= NUM_SHORT
            finally:
                standing.let_go.set()
                answers = await asyncio.gather(*flood)
            assert Counter(answer.status_code for answer in answers) == {200: NUM_REQUESTS}

    asyncio.run(run())


@pytest.mark.parametrize(("method", "path", "body"), FLOODS.values(), ids=FLOODS)
def test_what_waits_for_its_turn_is_as_many_as_the_queue_takes_and_the_others_are_429(
    standing: StandingEngine, method: str, path: str, body: Any
) -> None:
    standing.max_num_requests = standing.room = 8

    async def run() -> None:
        async with client_of(standing) as client:
            flood = [asyncio.create_task(client.request(method, path, json=body)) for _ in range(NUM_REQUESTS)]
            await until(lambda: sum(task.done() for task in flood) >= NUM_REQUESTS - 8 - NUM_SHORT)
            standing.let_go.set()
            answers = await asyncio.gather(*flood)
        refused = [answer for answer in answers if answer.status_code == 429]
        assert NUM_REQUESTS - 8 - NUM_SHORT <= len(refused) <= NUM_REQUESTS - 8 - 1
        assert {answer.status_code for answer in answers} == {200, 429}
        assert {answer.headers["retry-after"] for answer in refused} == {"1"}
        errors = [answer.json()["error"] for answer in refused]
        assert {error.get("code", error["type"]) for error in errors} <= {"rate_limit_exceeded", "rate_limit_error"}

    asyncio.run(run())


def test_prompts_that_wait_for_their_turn_are_no_more_than_the_engine_has_room_for(standing: StandingEngine) -> None:
    standing.max_num_requests, standing.room = 100, 3  # 97 are with the engine already

    async def run() -> None:
        async with client_of(standing) as client:
            flood = [asyncio.create_task(client.post("/v1/completions", json={"prompt": LONG})) for _ in range(9)]
            await until(lambda: sum(task.done() for task in flood) >= 4)
            standing.let_go.set()
            answers = await asyncio.gather(*flood)
            assert Counter(answer.status_code for answer in answers) == {200: 5, 429: 4}  # 2 in threads, 3 wait

    asyncio.run(run())


def test_a_client_with_many_long_prompts_delays_another_by_its_turn(
    standing: StandingEngine, work_queues: list[WorkQueues]
) -> None:
    def prompt(client: str, number: int) -> dict[str, Any]:
        return {"prompt": f"{client}{number} {LONG}", "max_tokens": 1}

    async def run() -> None:
        async with client_of(standing, api_keys=("a", "b")) as client:

            def ask(name: str, number: int) -> asyncio.Task[httpx.Response]:
                headers = {"authorization": f"Bearer {name}"}
                return asyncio.create_task(client.post("/v1/completions", json=prompt(name, number), headers=headers))

            asked = [ask("a", 0), ask("a", 1)]
            await until(lambda: len(standing.begun) == 2)
            asked += [ask("a", number) for number in range(2, 9)]
            asked += [ask("b", number) for number in range(2)]
            await until(lambda: work_queues[0].submission.num_waiting == len(asked) - 2)
            standing.let_go.set()
            await asyncio.gather(*asked)
        assert {begun[0] for begun in standing.begun[2:4]} == {"a", "b"}
        assert {begun[0] for begun in standing.begun[4:6]} == {"a", "b"}

    asyncio.run(run())


@pytest.mark.parametrize(("flood", "others"), [(LONG, SHORT), (SHORT, LONG)], ids=["long", "short"])
def test_a_queue_full_of_one_clients_prompts_refuses_that_client_and_not_another(
    standing: StandingEngine, flood: str, others: str
) -> None:
    """Long and short prompts share the end of the queue: a client's requests in both are counted together."""
    standing.max_num_requests = standing.room = 8

    async def run() -> None:
        async with client_of(standing, api_keys=("a", "b")) as client:

            def ask(name: str, prompt: str) -> asyncio.Task[httpx.Response]:
                headers = {"authorization": f"Bearer {name}"}
                return asyncio.create_task(client.post("/v1/completions", json={"prompt": prompt}, headers=headers))

            greedy = [ask("a", flood) for _ in range(NUM_REQUESTS)]
            await until(lambda: sum(task.done() for task in greedy) >= NUM_REQUESTS - 8 - NUM_SHORT)
            modest = [ask("b", others) for _ in range(NUM_SHORT + 2)]
            # until all of them have a turn, or wait in the place of greedy ones: six turns, and eight that wait
            await until(lambda: len(standing.begun) == 2 + NUM_SHORT or any(task.done() for task in modest))
            await until(lambda: sum(task.done() for task in [*greedy, *modest]) == len([*greedy, *modest]) - 14)
            standing.let_go.set()
            assert Counter([(await task).status_code for task in modest]) == {200: NUM_SHORT + 2}
            assert {answer.status_code for answer in await asyncio.gather(*greedy)} == {200, 429}

    asyncio.run(run())


def test_a_long_prompt_waits_for_no_text_that_is_only_counted(standing: StandingEngine) -> None:
    async def run() -> None:
        async with client_of(standing) as client:
            others = [asyncio.create_task(client.post("/tokenize", json={"prompt": LONG})) for _ in range(3)]
            truncated = {"messages": TALK, "truncation": "middle"}
            others += [asyncio.create_task(client.post("/v1/chat/completions", json=truncated)) for _ in range(3)]
            await until(lambda: sorted(standing.begun) == ["encode", "encode_chat"])
            prompt = asyncio.create_task(client.post("/v1/completions", json={"prompt": LONG}))
            await until(lambda: standing.begun[2:] == ["onc"])
            standing.let_go.set()
            assert (await prompt).status_code == 200
            await asyncio.gather(*others)

    assert len(LONG) > LONG_BODY_BYTES
    asyncio.run(run())


@dataclass
class WatchedEngine(FakeEngine):
    """Notes which threads hand it requests."""

    threads: list[int] = field(default_factory=list)

    def stream(self, prompt: Any, *arguments: Any, **options: Any) -> Any:
        self.threads.append(threading.get_ident())
        return super().stream(prompt, *arguments, **options)


@pytest.mark.parametrize(("prompt", "is_at_once"), [("Hi", True), ("Hi " * AT_ONCE_BYTES, False)])
def test_only_a_short_prompt_is_worked_on_without_a_thread_of_its_own(prompt: str, is_at_once: bool) -> None:
    engine = WatchedEngine()

    async def ask() -> None:
        transport = httpx.ASGITransport(create_app(engine))  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            (await client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})).raise_for_status()

    asyncio.run(ask())
    assert [thread == threading.get_ident() for thread in engine.threads] == [is_at_once]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of threads")
def test_a_long_text_gives_way_to_the_model_whose_threads_wait_for_each_other() -> None:
    """One chat in ten took half a second while others' texts were encoded, though both processors were enough."""

    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    async def of_body(num_bytes: int) -> int:
        scope = {"type": "http", "client": None, "headers": [], "state": {"num_body_bytes": num_bytes}}
        request = Request(scope, forever)
        return await WorkQueues.of(FakeEngine()).tokenization.run(request, priority)

    async def forever() -> Any:
        await asyncio.Event().wait()

    assert asyncio.run(of_body(LONG_BODY_BYTES - 1)) == priority()
    assert asyncio.run(of_body(LONG_BODY_BYTES + 1)) == max(10, priority())
