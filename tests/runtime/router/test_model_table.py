"""Models that are loaded on demand: whatever happens in whatever order, each request is answered by its own model."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from radixlm.runtime.errors import InvalidParameter, ModelFailed, ModelTooLarge
from radixlm.runtime.router.model_row import ModelSpec, Row
from radixlm.runtime.router.model_table import ModelTable

SIZES = {"small": 30, "large": 60, "huge": 90, "pinned": 10}
BUDGET = 100


@dataclass(eq=False)
class FakeWorker:
    """Answers with its name; what it was asked is lost unless it is stopped."""

    name: str
    machine: Machine
    asked: list[str] = field(default_factory=list)
    num_answering: int = 0
    state: str = "alive"
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def memory_bytes(self) -> int:
        return SIZES[self.name]

    async def answer(self, prompt: str) -> str:
        """Take some turns of the event loop."""
        assert self.state != "stopped", "it was unloaded although a request has it"
        self.num_answering += 1
        try:
            for _ in range(self.machine.chance.randrange(6)):
                await asyncio.sleep(0)
                assert self.state != "stopped", "it was unloaded in the middle of a request"
            if self.state == "killed":
                raise ConnectionError
            self.asked.append(prompt)
            return f"{self.name}:{prompt}"
        finally:
            self.num_answering -= 1

    async def stop(self) -> None:
        assert self.num_answering == 0 or self.state == "killed"
        await asyncio.sleep(0)
        if self.state == "alive":
            self.machine.disk[self.name] += self.asked
            self.state = "stopped"
            self.ended.set()

    async def wait_until_ended(self) -> str:
        await self.ended.wait()
        return "killed"

    def kill(self) -> None:
        if self.state == "alive":
            self.state = "killed"
            self.machine.lost[self.name] += self.asked
            self.ended.set()


@dataclass
class Machine:
    """Loads fake workers, of which it remembers all; loading `broken` models fails."""

    chance: random.Random = field(default_factory=lambda: random.Random(0))
    broken: set[str] = field(default_factory=set)
    workers: list[FakeWorker] = field(default_factory=list)
    disk: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in SIZES})
    lost: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in SIZES})
    now: float = 0.0

    async def open(self) -> None:
        """There is nothing to get ready,"""

    async def close(self) -> None:
        """or to free."""

    async def load(self, spec: ModelSpec, progressed: Callable[[str, float | None], None]) -> FakeWorker:
        progressed("load", 0.5)
        for _ in range(self.chance.randrange(4)):
            await asyncio.sleep(0)
        if spec.name in self.broken:
            raise ModelFailed("it is broken")
        alive = [worker for worker in self.workers if worker.state == "alive"]
        assert spec.name not in [worker.name for worker in alive], "two processes of one model have one store"
        assert sum(worker.memory_bytes for worker in alive) + SIZES[spec.name] <= BUDGET
        self.workers.append(FakeWorker(spec.name, self))
        return self.workers[-1]


def spec_of(name: str) -> ModelSpec:
    is_pinned = name == "pinned"
    return ModelSpec(name, source="", aliases=(f"{name}-alias",), is_pinned=is_pinned, needed_bytes=SIZES[name])


def table_of(machine: Machine, **options: Any) -> ModelTable[FakeWorker]:
    specs = [spec_of(name) for name in SIZES]
    return ModelTable(specs, machine, memory_bytes=BUDGET, clock=lambda: machine.now, **options)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 20))


async def settle() -> None:
    for _ in range(40):
        await asyncio.sleep(0)


async def ask(table: ModelTable[FakeWorker], name: str, prompt: str) -> str:
    row = table.named(name)
    assert row is not None
    return await ask_row(table, row, prompt)


async def ask_row(table: ModelTable[FakeWorker], row: Row[FakeWorker], prompt: str) -> str:
    lease = await table.lease(row)
    try:
        return await lease.worker.answer(prompt)
    finally:
        lease.release()


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.sampled_from([*SIZES, "small-alias", "large-alias"])),
        st.tuples(st.sampled_from(["kill", "unload", "break", "mend", "leave"]), st.sampled_from([*SIZES])),
        st.tuples(st.sampled_from(["remove", "add"]), st.sampled_from([*SIZES])),
        st.tuples(st.sampled_from(["wait", "unused"]), st.just("")),
    ),
    min_size=1,
    max_size=60,
)


@given(STEPS, st.integers(0, 1 << 32).map(random.Random))
@settings(max_examples=150, deadline=None)
def test_whatever_is_loaded_unloaded_removed_or_killed_each_request_has_the_answer_of_its_model(
    steps: list[tuple[str, str]], chance: random.Random
) -> None:
    async def play() -> None:
        machine = Machine(chance)
        table = table_of(machine, unload_after_s=5.0)
        asked: dict[asyncio.Task[str], tuple[str, str]] = {}
        hurt: set[str] = set()  # models with a reason to fail a request
        left: set[asyncio.Task[str]] = set()
        background: list[asyncio.Future[None]] = []
        for number, (step, name) in enumerate(steps):
            model = name.removesuffix("-alias")
            row = table.named(name)
            if step == "ask" and row is not None:
                asked[asyncio.create_task(ask_row(table, row, str(number)))] = (model, str(number))
            elif step == "kill":
                hurt |= {worker.name for worker in machine.workers if worker.name == name and worker.state == "alive"}
                for worker in machine.workers:
                    if worker.name == name:
                        worker.kill()
            elif step == "remove" and row is not None and len(table.rows) > 1:
                background.append(table.remove(row))
                hurt.add(name)
            elif step == "add" and row is None:
                table.add(spec_of(name))
            elif step == "unload" and row is not None:
                background.append(asyncio.create_task(table.unload(row)))
            elif step == "break":
                machine.broken.add(name)
                hurt.add(name)
            elif step == "mend":
                machine.broken.discard(name)
            elif step == "leave":
                leaving = [task for task, (of, _) in asked.items() if of == name and not task.done()]
                for task in leaving[:1]:
                    task.cancel()
                    left.add(task)
            elif step == "unused":
                machine.now += 3
                table.unload_unused()
            for _ in range(chance.randrange(8)):
                await asyncio.sleep(0)
                table.check()
                assert table.bytes_taken <= BUDGET
        answers = await asyncio.gather(*asked, return_exceptions=True)
        await asyncio.gather(*background)
        for task, answer in zip(asked, answers, strict=True):
            model, prompt = asked[task]
            if isinstance(answer, ConnectionError | ModelFailed):
                assert model in hurt, f"{model} had no reason to fail"
            elif task not in left or not isinstance(answer, asyncio.CancelledError):
                assert answer == f"{model}:{prompt}"
        await settle()
        table.check()
        assert all(row.num_requests == 0 for row in table.rows)
        await table.close()
        kept = {name: sorted(machine.disk[name] + machine.lost[name]) for name in SIZES}
        answered = {name: [] for name in SIZES}  # type: dict[str, list[str]]
        for task, answer in zip(asked, answers, strict=True):
            if isinstance(answer, str):
                answered[asked[task][0]].append(asked[task][1])
        for name in SIZES:
            assert set(answered[name]) <= set(kept[name]), "what was answered is kept, or was killed"
            if name not in hurt:
                assert not machine.lost[name]
        assert not [worker for worker in machine.workers if worker.state == "alive"]

    run(play())


def test_a_model_is_loaded_once_for_all_that_wait_and_makes_room_least_recently_used_first() -> None:
    async def play() -> None:
        machine = Machine()
        table = table_of(machine)
        small, large, huge, _ = table.rows
        assert await asyncio.gather(*(ask(table, "small", str(number)) for number in range(5))) == [
            f"small:{number}" for number in range(5)
        ]
        machine.now = 1
        await ask(table, "large-alias", "x")
        assert [worker.name for worker in machine.workers] == ["small", "large"]
        machine.now = 2
        await ask(table, "small", "y")
        lease = await table.lease(small)
        task = asyncio.create_task(ask(table, "huge", "z"))
        await settle()
        assert (small.state, large.state, huge.state) == ("unloading", "unloaded", "loading")
        assert machine.disk["large"] == ["x"] and not task.done()
        lease.release()
        assert await task == "huge:z" and small.state == "unloaded"
        await table.close()

    run(play())


def test_what_cannot_fit_is_refused_and_unloads_nothing() -> None:
    async def play() -> None:
        machine = Machine()
        table = table_of(machine)
        table.memory_bytes = 99
        pinned = await table.lease(table.rows[3])
        pinned.release()
        await ask(table, "large", "x")
        with pytest.raises(ModelTooLarge, match=r"huge needs .* raise --memory-gb"):
            await ask(table, "huge", "x")
        assert [row.state for row in table.rows] == ["unloaded", "loaded", "unloaded", "loaded"]
        await table.close()

    run(play())


def test_a_model_that_takes_more_than_was_known_makes_room_when_it_is_loaded() -> None:
    async def play() -> None:
        machine = Machine()
        specs = [ModelSpec("small", source="", needed_bytes=30), ModelSpec("large", source="")]
        table = ModelTable(specs, machine, memory_bytes=80)
        await ask(table, "small", "x")
        await ask(table, "large", "x")
        await settle()
        assert [row.state for row in table.rows] == ["unloaded", "loaded"] and table.bytes_taken == 60
        await table.close()

    run(play())


def test_an_unused_model_is_unloaded_unless_it_is_pinned_or_has_a_request() -> None:
    async def play() -> None:
        machine = Machine()
        table = table_of(machine, unload_after_s=10.0)
        small, large, _, pinned = table.rows
        leases = [await table.lease(row) for row in (small, large, pinned)]
        leases[0].release()
        leases[2].release()
        machine.now = 9.9
        table.unload_unused()
        assert small.state == "loaded"
        peek = await table.lease(small, is_use=False)
        peek.release()
        machine.now = 10
        table.unload_unused()
        await settle()
        assert (small.state, large.state, pinned.state) == ("unloaded", "loaded", "loaded")
        await table.close()

    run(play())


def test_a_model_that_a_client_wants_kept_is_only_unloaded_to_make_room_and_after_all_others() -> None:
    async def play() -> None:
        machine = Machine()
        specs = [ModelSpec(name, source="", needed_bytes=SIZES[name]) for name in ("small", "large", "pinned")]
        table = ModelTable(specs, machine, 95, unload_after_s=10.0, clock=lambda: machine.now)
        small, large, _ = table.rows
        await ask(table, "small", "x")
        table.keep_alive(small, math.inf)
        machine.now = 5
        await ask(table, "large", "x")
        table.keep_alive(large, 2.0)
        machine.now = 6.9
        table.unload_unused()
        assert [row.state for row in table.rows] == ["loaded", "loaded", "unloaded"]
        machine.now = 7
        table.unload_unused()
        await settle()
        assert [row.state for row in table.rows] == ["loaded", "unloaded", "unloaded"]
        await ask(table, "large", "x")
        machine.now = 1000
        await ask(table, "pinned", "x")
        await settle()
        assert [row.state for row in table.rows] == ["loaded", "unloaded", "loaded"], "large was used later"
        lease, other = await table.lease(small), await table.lease(small)
        lease.release()
        table.keep_alive(small, 0)
        assert await asyncio.wait_for(ask(table, "small", "y"), 30) == "small:y", "others do not wait for it"
        assert small.state == "loaded"
        other.release()
        await settle()
        assert small.state == "unloaded" and small.num_requests == 0
        await ask(table, "small", "x")
        assert small.keep_alive_s is None, "it is as the server has it again"
        await table.close()

    run(play())


def test_a_removed_model_counts_until_it_is_unloaded_and_is_not_loaded_twice() -> None:
    async def play() -> None:
        machine = Machine()
        table = table_of(machine)
        small = table.rows[0]
        lease = await table.lease(small)
        waiting = table.remove(small)
        await settle()
        assert table.named("small") is None and table.bytes_taken == 30, "its request goes on"
        waiting.cancel()
        await settle()
        assert table.bytes_taken == 30, "although nobody waits for its end"
        table.add(spec_of("small"))
        again, huge = (asyncio.create_task(ask(table, name, "x")) for name in ("small", "huge"))
        await settle()
        assert len(machine.workers) == 1 and not again.done() and not huge.done()
        lease.release()
        assert await again == "small:x" and await huge == "huge:x"
        await table.close()

    run(play())


def test_a_model_that_is_removed_when_its_load_begins_answers_and_is_unloaded() -> None:
    async def play() -> None:
        table = table_of(Machine())
        asked = asyncio.create_task(ask(table, "small", "x"))
        await asyncio.sleep(0)
        await asyncio.wait_for(table.remove(table.rows[0]), 5)
        assert await asked == "small:x" and table.bytes_taken == 0
        await table.close()

    run(play())


def test_a_server_that_stops_stops_removed_models_that_still_answer() -> None:
    async def play() -> None:
        machine = Machine()
        table = table_of(machine)
        await table.lease(table.rows[0])
        table.remove(table.rows[0])
        await settle()
        await table.close()
        assert [worker.state for worker in machine.workers] == ["stopped"]

    run(play())


def test_pinned_models_are_loaded_from_the_start() -> None:
    async def play() -> None:
        machine = Machine()
        table = table_of(machine)
        running = asyncio.create_task(table.run())
        await settle()
        assert [row.state for row in table.rows] == ["unloaded", "unloaded", "unloaded", "loaded"]
        running.cancel()
        await table.close()

    run(play())


def test_a_client_that_leaves_while_its_model_loads_leaves_the_load_to_others() -> None:
    async def play() -> None:
        table = table_of(Machine())
        one, other = (asyncio.create_task(ask(table, "small", prompt)) for prompt in "ab")
        await asyncio.sleep(0)
        one.cancel()
        assert await other == "small:b"
        assert table.rows[0].num_requests == 0
        await table.close()

    run(play())


def test_two_models_have_no_name_in_common_and_there_is_one_at_least() -> None:
    one, other = ModelSpec("a", source=""), ModelSpec("b", source="", aliases=("a",))
    with pytest.raises(InvalidParameter, match="two models have the name 'a'"):
        ModelTable([one, other], Machine())
    with pytest.raises(InvalidParameter, match="no model"):
        ModelTable([], Machine())
    table = ModelTable([one], Machine())
    with pytest.raises(InvalidParameter, match="two models have the name 'a'"):
        table.add(other)
    assert table.named("b") is None, "it was not added"


def test_a_name_that_no_model_has_is_the_one_of_a_model_that_takes_any() -> None:
    named = [ModelSpec("a", source=""), ModelSpec("b", source="", aliases=("*",))]
    table = ModelTable(named, Machine())
    assert [row and row.spec.name for row in map(table.named, ("a", "b", "a:latest", "gpt-4o", None, ""))] == [
        *"ababaa"
    ]
    assert ModelTable(named[:1], Machine()).named("gpt-4o") is None
