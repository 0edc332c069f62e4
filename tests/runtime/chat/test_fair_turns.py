"""Turns are taken one at a time, by client in turn, and whoever waits is served or told."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter

import pytest
from radixlm.runtime.chat.fair_turns import FairTurns
from radixlm.runtime.errors import GrammarsOverloaded


def fair_turns(max_waiting: int, num_turns: int = 1) -> FairTurns:
    return FairTurns(
        num_turns=num_turns,
        max_waiting=lambda: max_waiting,
        refusal=lambda num_waiting: GrammarsOverloaded(num_waiting, retry_after_s=1),
    )


def test_clients_take_turns_and_each_ones_requests_stay_in_order() -> None:
    turns, order = fair_turns(16), []
    threads = []

    def take(client: str, number: int) -> None:
        with turns.turn(client, deadline=time.monotonic() + 60):
            order.append((client, number))

    with turns.turn("x", deadline=time.monotonic() + 60):
        for client, number in [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1), ("c", 0)]:
            threads.append(threading.Thread(target=take, args=(client, number)))
            threads[-1].start()
            while turns.num_waiting < len(threads):
                time.sleep(0.001)
        turns.check()
    for thread in threads:
        thread.join(30)
    assert order == [("a", 0), ("b", 0), ("c", 0), ("a", 1), ("b", 1), ("a", 2)]
    turns.check()


def test_a_turn_ends_also_by_an_error_and_a_refused_one_leaves_nothing() -> None:
    turns = fair_turns(1)
    with pytest.raises(ZeroDivisionError), turns.turn("a", deadline=0.0):
        _ = 1 / 0
    with turns.turn("a", deadline=0.0), pytest.raises(GrammarsOverloaded), turns.turn("b", deadline=0.0):
        pass
    assert turns.num_waiting == 0
    with turns.turn("b", deadline=0.0):
        turns.check()


def test_random_clients_are_served_or_told_and_never_two_at_once() -> None:
    turns, inside, counts = fair_turns(4), threading.Lock(), Counter[str]()

    def run(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(50):
            try:
                with turns.turn(chance.choice("abc"), deadline=time.monotonic() + chance.choice([0.0, 0.001, 60.0])):
                    assert inside.acquire(blocking=False)
                    time.sleep(chance.choice([0.0, 0.0002]))
                    inside.release()
                    counts["served"] += 1
            except GrammarsOverloaded:
                counts["told"] += 1

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert counts["served"] + counts["told"] == 400 and min(counts["served"], counts["told"]) > 0
    assert turns.num_waiting == 0
    turns.check()


def test_tasks_take_turns_as_threads_do_and_a_cancelled_one_leaves_nothing() -> None:
    turns, order = fair_turns(8, num_turns=2), []

    async def take(client: str, number: int) -> None:
        async with turns.turn_of_task(client):
            order.append((client, number))
            await asyncio.sleep(0)

    async def run() -> None:
        async with turns.turn_of_task("x"), turns.turn_of_task("x"):
            asked = [("a", 0), ("a", 1), ("a", 2), ("b", 0), ("c", 0)]
            tasks = [asyncio.create_task(take(*item)) for item in asked]
            await asyncio.sleep(0)
            assert turns.num_waiting == 5
            tasks[1].cancel()
            await asyncio.sleep(0)
            turns.check()
            assert turns.num_waiting == 4
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())
    assert order == [("a", 0), ("b", 0), ("c", 0), ("a", 2)]
    turns.check()


def test_a_task_that_is_cancelled_when_it_is_called_passes_its_turn_on() -> None:
    turns, order = fair_turns(8), []

    async def take(client: str) -> None:
        async with turns.turn_of_task(client):
            order.append(client)

    async def run() -> None:
        async with turns.turn_of_task("x"):
            called, other = asyncio.create_task(take("a")), asyncio.create_task(take("b"))
            await asyncio.sleep(0)
        called.cancel()  # it was called, and has not run yet
        await asyncio.gather(called, other, return_exceptions=True)

    asyncio.run(run())
    assert order == ["b"]
    turns.check()


def test_of_a_full_queue_the_client_that_has_most_loses_its_latest() -> None:
    turns, told = fair_turns(3), []

    async def take(client: str, number: int) -> None:
        try:
            async with turns.turn_of_task(client):
                pass
        except GrammarsOverloaded:
            told.append((client, number))

    async def run() -> None:
        async with turns.turn_of_task("x"):
            tasks = [asyncio.create_task(take("a", number)) for number in range(4)]
            tasks += [asyncio.create_task(take("b", number)) for number in range(2)]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert told == [("a", 3), ("b", 1), ("a", 2)]
        await asyncio.gather(*tasks)

    asyncio.run(run())
    turns.check()
