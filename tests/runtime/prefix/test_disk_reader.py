"""The reader's thread does other work in its turn, says when it is done, and outlives what goes wrong in it."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from radixlm.runtime.prefix.disk_reader import DiskReader, ReadJob, ReadWork
from radixlm.runtime.store import PageStore

from ..store.pages import IDENTITY, PAGE_BYTES, chain, payload

WAIT_S = 30.0  # only a hang takes that long


class Watched:
    """A reader, and what it notified of."""

    def __init__(self, store: PageStore) -> None:
        self._told = threading.Semaphore(0)
        self.reader = DiskReader(store, PAGE_BYTES, notify=self._told.release)

    def wait(self, times: int = 1) -> None:
        for _ in range(times):
            assert self._told.acquire(timeout=WAIT_S)


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    with PageStore.open(tmp_path, IDENTITY, max_bytes=1 << 20) as store:
        store.put(HEADS, payload(HEADS))
        it = Watched(store)
        yield it
        it.reader.close()


HEADS = chain(3)


def fails() -> bool:
    raise ValueError("on purpose")


def test_work_is_done_in_the_readers_thread_between_jobs(watched: Watched) -> None:
    reader, done = watched.reader, list[str]()

    def work() -> bool:
        done.append(threading.current_thread().name)
        return len(reader.results) == 1

    reader.submit(ReadJob(tuple(HEADS)))
    first, second = reader.submit_work(work), reader.submit_work(work)
    reader.submit(ReadJob(tuple(HEADS)))
    watched.wait(4)
    assert done == ["radixlm-store-reader"] * 2 and first.is_right and second.is_right
    assert first.is_done and second.is_done and first.seconds >= 0
    for piece in reader.results:
        assert (piece.pages == payload(HEADS)).all() and piece.num_right == 3


@pytest.mark.parametrize("run", [fails, lambda: False])
def test_work_that_fails_is_not_right_and_the_next_goes_on(watched: Watched, run: object) -> None:
    failed = watched.reader.submit_work(run)  # type: ignore[arg-type]
    after = watched.reader.submit_work(lambda: True)
    watched.wait(2)
    assert failed.is_done and not failed.is_right
    assert after.is_done and after.is_right


def test_cancelled_work_is_done_without_being_run(watched: Watched) -> None:
    may_go, begun, calls = threading.Event(), threading.Event(), list[int]()

    def first() -> bool:
        begun.set()
        return may_go.wait(WAIT_S)

    running = watched.reader.submit_work(first, num_bytes=7)
    assert begun.wait(WAIT_S)
    waiting = [watched.reader.submit_work(lambda: bool(calls.append(1)), num_bytes=100 * (i + 1)) for i in range(2)]
    assert watched.reader.queued_bytes == 300
    waiting[1].is_cancelled = True
    assert watched.reader.queued_bytes == 100
    assert not any(work.is_done for work in (running, *waiting))
    may_go.set()
    watched.wait(3)
    assert [work.is_done for work in (running, *waiting)] == [True] * 3
    assert running.is_right and not waiting[1].is_right and calls == [1]


def test_work_waits_for_no_buffer_of_others_pages(watched: Watched) -> None:
    reader = watched.reader
    for _ in range(3):  # as many as there are buffers, none of which is given back
        reader.submit(ReadJob(tuple(HEADS)))
    work = reader.submit_work(lambda: np.array_equal(reader.results[2].pages, payload(HEADS)))
    watched.wait(4)
    assert work.is_right and isinstance(work, ReadWork)


def test_behind_a_disk_that_hangs_nothing_is_kept_of_loads_that_have_ended(watched: Watched) -> None:
    goes_on = threading.Event()
    watched.reader.submit_work(lambda: goes_on.wait(WAIT_S))
    rooms = []
    for _ in range(5):
        room = np.empty((len(HEADS), PAGE_BYTES), np.uint8)
        rooms.append(weakref.ref(room))
        job = ReadJob(tuple(HEADS), into=room)
        watched.reader.submit(job)
        job.is_cancelled = True
        del room, job
    last = ReadJob(tuple(HEADS))
    watched.reader.submit(last)
    gc.collect()
    assert [room() for room in rooms] == [None] * 5
    goes_on.set()
    watched.wait(2)
    assert [piece.job for piece in watched.reader.results] == [last]
