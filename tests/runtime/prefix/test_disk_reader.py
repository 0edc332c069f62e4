"""The reader's thread reads in turn, has it said when it is done, and outlives what goes wrong in it."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from radixlm.runtime.engine.engine_queue import WorkQueue
from radixlm.runtime.prefix.disk_reader import DiskReader, Read
from radixlm.runtime.store import PageStore

from ..store.pages import IDENTITY, PAGE_BYTES, chain, payload

WAIT_S = 30.0  # only a hang takes that long


class Watched:
    """A reader, and the reads that it said are done, in order."""

    def __init__(self, store: PageStore) -> None:
        self.queue = WorkQueue(clock=time.monotonic)
        self.reader = DiskReader(store, PAGE_BYTES, self.queue)
        self.done: list[Read] = []
        self.pages: list[np.ndarray] = []

    def note(self, read: Read) -> None:
        """What the engine does when a read is done."""
        self.done.append(read)
        if read.pages is not None:
            self.pages.append(read.pages.copy())

    def read(self, into: np.ndarray | None = None) -> Read:
        return self.reader.read_pages(tuple(HEADS), self.note, into=into)

    def run(self, work: Callable[[], bool], num_bytes: int = 0) -> Read:
        return self.reader.run(work, self.note, num_bytes=num_bytes)

    def wait(self, times: int = 1) -> None:
        """Until as many more reads are done, the engine's part with it."""
        wanted, deadline = len(self.done) + times, time.monotonic() + WAIT_S
        while len(self.done) < wanted:
            self.queue.run()
            assert time.monotonic() < deadline, "nothing comes"


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


def test_reads_are_done_in_order_in_the_readers_thread(watched: Watched) -> None:
    threads = list[str]()

    def work() -> bool:
        threads.append(threading.current_thread().name)
        return True

    reads = [watched.read(), watched.run(work), watched.run(work), watched.read()]
    watched.wait(4)
    assert watched.done == reads and threads == ["radixlm-store-reader"] * 2
    assert all(read.is_done and read.is_right and read.seconds >= 0 for read in reads)
    assert all((pages == payload(HEADS)).all() for pages in watched.pages) and len(watched.pages) == 2
    assert reads[0].pages is None, "its buffer is used again"


@pytest.mark.parametrize("run", [fails, lambda: False])
def test_a_read_that_fails_is_not_right_and_the_next_goes_on(watched: Watched, run: Callable[[], bool]) -> None:
    failed, after = watched.run(run), watched.run(lambda: True)
    watched.wait(2)
    assert failed.is_done and not failed.is_right
    assert after.is_done and after.is_right


def test_a_cancelled_read_is_done_without_being_run_and_one_that_runs_is_told_done(watched: Watched) -> None:
    may_go, begun, calls = threading.Event(), threading.Event(), list[int]()

    def first() -> bool:
        begun.set()
        return may_go.wait(WAIT_S)

    running = watched.run(first, 7)
    assert begun.wait(WAIT_S)
    waiting = [watched.run(lambda: bool(calls.append(1)), 100 * (i + 1)) for i in range(2)]
    assert watched.reader.queued_bytes == 300
    watched.reader.cancel([running, waiting[1]])
    assert watched.reader.queued_bytes == 100
    assert [read.is_done for read in (running, *waiting)] == [False, False, True]
    may_go.set()
    watched.wait(2)
    assert watched.done == [running, waiting[0]] and running.is_right and calls == [1]


def test_a_read_waits_for_one_of_few_buffers_until_the_engine_has_taken_one_in(watched: Watched) -> None:
    reads = [watched.read() for _ in range(5)]
    deadline = time.monotonic() + WAIT_S
    while len(watched.queue) < 3:
        assert time.monotonic() < deadline
    assert not reads[3].is_done, "it would read ahead of the engine"
    watched.wait(5)
    assert watched.done == reads and len(watched.pages) == 5


def test_what_the_engine_makes_of_a_read_may_raise_and_the_buffer_goes_back(watched: Watched) -> None:
    for _ in range(5):
        watched.reader.read_pages(tuple(HEADS), lambda read: fails() and None)
    watched.read()
    watched.wait()


def test_behind_a_disk_that_hangs_nothing_is_kept_of_loads_that_have_ended(watched: Watched) -> None:
    goes_on = threading.Event()
    watched.run(lambda: goes_on.wait(WAIT_S))
    rooms = []
    for _ in range(5):
        room = np.empty((len(HEADS), PAGE_BYTES), np.uint8)
        rooms.append(weakref.ref(room))
        read = watched.read(room)
        watched.reader.cancel([read])
        del room, read
    last = watched.read()
    gc.collect()
    assert [room() for room in rooms] == [None] * 5
    goes_on.set()
    watched.wait(2)
    assert watched.done[1] is last
