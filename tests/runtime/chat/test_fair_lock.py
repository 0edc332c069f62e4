"""Turns are taken one at a time, by client in turn, and whoever waits is served or told."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter

import pytest
from radixlm.runtime.chat.fair_lock import FairLock
from radixlm.runtime.errors import GrammarsOverloaded


def fair_lock(max_waiting: int, num_turns: int = 1) -> FairLock:
    return FairLock(
        num_turns=num_turns,
        max_waiting=lambda: max_waiting,
        refusal=lambda num_waiting: GrammarsOverloaded(num_waiting, retry_after_s=1),
    )


def test_clients_take_turns_and_each_ones_requests_stay_in_order() -> None:
    turns, order = fair_lock(16), []
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
    turns = fair_lock(1)
    with pytest.raises(ZeroDivisionError), turns.turn("a", deadline=0.0):
        _ = 1 / 0
    with turns.turn("a", deadline=0.0), pytest.raises(GrammarsOverloaded), turns.turn("b", deadline=0.0):
        pass
    assert turns.num_waiting == 0
    with turns.turn("b", deadline=0.0):
        turns.check()


def test_random_clients_are_served_or_told_and_never_two_at_once() -> None:
    turns, inside, counts = fair_lock(4), threading.Lock(), Counter[str]()

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
    turns, order = fair_lock(8, num_turns=2), []

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
    turns, order = fair_lock(8), []

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
    turns, told = fair_lock(3), []

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


def test_a_task_that_waits_no_longer_than_its_deadline_is_refused() -> None:
    lock = fair_lock(8)

    async def run() -> None:
        async with lock.turn_of_task("x"):
            with pytest.raises(GrammarsOverloaded):
                async with lock.turn_of_task("a", deadline=time.monotonic() + 0.01):
                    raise AssertionError("it has no turn")
        async with lock.turn_of_task("a", deadline=time.monotonic()):  # the lock is free: nothing is waited for
            pass

    asyncio.run(run())
    assert lock.num_waiting == 0
    lock.check()


def test_work_in_a_thread_keeps_its_turn_until_it_ends_though_its_task_is_cancelled() -> None:
    lock, began, may_end = fair_lock(8), threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        assert may_end.wait(30)

    async def run() -> None:
        working = asyncio.create_task(lock.run_in_thread("a", work))
        assert await asyncio.to_thread(began.wait, 30)
        next_one = asyncio.create_task(lock.run_in_thread("b", lambda: may_end.is_set()))
        left = asyncio.create_task(lock.run_in_thread("c", lambda: "never run"))
        while lock.num_waiting < 2:
            await asyncio.sleep(0.001)
        left.cancel()
        for _ in range(3):  # a server that ends cancels what a client that left has cancelled already
            working.cancel()
            await asyncio.sleep(0.01)
            assert not working.done()
        while lock.num_waiting > 1:
            await asyncio.sleep(0.001)
        assert not next_one.done() and not working.done()
        may_end.set()
        assert await next_one
        with pytest.raises(asyncio.CancelledError):
            await working

    asyncio.run(run())
    lock.check()


def test_what_work_in_a_thread_raises_is_raised_and_ends_the_turn() -> None:
    lock = fair_lock(8)

    async def run() -> None:
        with pytest.raises(ZeroDivisionError):
            await lock.run_in_thread("a", lambda: 1 // 0)
        assert await lock.run_in_thread("a", lambda: 7) == 7

    asyncio.run(run())
    lock.check()
