"""What is posted runs before the next step, and nothing that goes wrong in it keeps the rest from running."""

from __future__ import annotations

import threading

import pytest
from radixlm.runtime.engine.engine_queue import WorkQueue


class Clock:
    """Stands still."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_closures_run_in_order_and_what_they_post_runs_the_next_time() -> None:
    done = list[str]()
    queue = WorkQueue(clock=Clock())

    def first() -> None:
        done.append("first")
        queue.post(lambda: done.append("later"))

    queue.post(first)
    queue.post(lambda: done.append("second"))
    assert queue.wait_s == 0.0
    queue.run()
    assert done == ["first", "second"] and queue.wait_s == 0.0
    queue.run()
    assert done == ["first", "second", "later"] and queue.wait_s is None


def test_a_closure_is_due_at_its_time_and_after_what_was_posted() -> None:
    clock, done = Clock(), list[str]()
    queue = WorkQueue(clock=clock)
    queue.at(3.0, lambda: done.append("three"))
    queue.at(2.0, lambda: done.append("two"))
    queue.run()
    assert not done and queue.wait_s == 2.0
    clock.now = 5.0
    queue.post(lambda: done.append("posted"))
    queue.run()
    assert done == ["posted", "two", "three"] and queue.wait_s is None


def test_a_closure_that_raises_is_logged_and_the_others_run(caplog: pytest.LogCaptureFixture) -> None:
    done = list[str]()
    queue = WorkQueue(clock=Clock())

    def fail() -> None:
        raise ValueError("on purpose")

    queue.post(fail)
    queue.at(0.0, fail)
    queue.post(lambda: done.append("runs"))
    queue.run()
    assert done == ["runs"] and caplog.text.count("on purpose") >= 2


def test_a_post_ends_the_wait_of_a_thread_that_has_nothing_to_do() -> None:
    queue = WorkQueue(clock=Clock())
    with queue.changed:
        threading.Thread(target=queue.post, args=(lambda: None,)).start()
        assert queue.changed.wait_for(lambda: len(queue), timeout=30.0)
