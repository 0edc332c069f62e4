"""What no request asked for is done in a thread, piece by piece, while there is no request."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from radixlm.runtime.engine.background_work import IdleThread
from radixlm.runtime.engine.engine_queue import Command, EngineQueue
from radixlm.runtime.errors import EngineError

WAIT_S = 60.0  # only a hang takes that long
SOON_S = 0.02


class Quiet:
    """Says for how long it was quiet, and that it was asked."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.asked = threading.Event()

    def __call__(self) -> float:
        self.asked.set()
        return self.seconds


def pieces(done: list[int], after: dict[int, object] | None = None) -> Iterator[None]:
    """Three pieces; `after` is called, or raised, when one of them is done."""
    for number in range(3):
        done.append(number)
        then = (after or {}).get(number)
        if isinstance(then, Exception):
            raise then
        if callable(then):
            then()
        yield


def test_pieces_are_done_once_it_was_quiet() -> None:
    done: list[int] = []
    thread = IdleThread(pieces(done), quiet_s=Quiet(1.0), least_s=1.0)
    assert thread.join(WAIT_S)
    assert done == [0, 1, 2]


def test_nothing_is_done_while_there_are_requests() -> None:
    done: list[int] = []
    quiet = Quiet(0.0)
    thread = IdleThread(pieces(done), quiet_s=quiet, least_s=SOON_S)
    for _ in range(3):
        quiet.asked.clear()
        assert quiet.asked.wait(WAIT_S)
    assert done == []
    quiet.seconds = SOON_S
    assert thread.join(WAIT_S)
    assert done == [0, 1, 2]


def test_a_request_puts_off_the_next_piece() -> None:
    done: list[int] = []
    quiet = Quiet(SOON_S)

    def come() -> None:
        quiet.seconds = 0.0

    thread = IdleThread(pieces(done, {1: come}), quiet_s=quiet, least_s=SOON_S)
    assert not thread.join(10 * SOON_S)
    assert done == [0, 1]
    quiet.seconds = SOON_S
    assert thread.join(WAIT_S)
    assert done == [0, 1, 2]


def test_what_is_stopped_begins_no_piece() -> None:
    done: list[int] = []
    thread = IdleThread(pieces(done), quiet_s=Quiet(0.0), least_s=WAIT_S)
    thread.stop()
    assert thread.join(WAIT_S)
    assert done == []


@pytest.mark.parametrize("error", [OSError(12, "Cannot allocate memory"), EngineError("closed"), ValueError("a bug")])
def test_a_piece_that_fails_ends_the_thread(error: Exception) -> None:
    done: list[int] = []
    assert IdleThread(pieces(done, {1: error}), quiet_s=Quiet(1.0), least_s=1.0).join(WAIT_S)
    assert done == [0, 1]


def test_a_queue_is_quiet_since_its_last_request_ended() -> None:
    now = 0.0
    queue = EngineQueue(threading.Condition(), clock=lambda: now, max_num_requests=None)
    now = 3.0
    assert queue.quiet_s == 3.0
    queue.put(Command(lambda: None, lambda cause: None))
    assert queue.quiet_s == 3.0  # that is no request
    queue.put(Command(lambda: None, lambda cause: None, is_request=True))
    queue.do_all()
    assert queue.quiet_s == 0.0
    now = 5.0
    queue.leave(1.0)
    now = 7.0
    assert queue.quiet_s == 2.0
