"""A disk that fails at any operation costs pages, never the process, and never gives a wrong one."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from radixlm.runtime.errors import StoreCorrupt, StoreOff
from radixlm.runtime.store import PageKey, PageStore

from .faulty_files import FailAt, FaultyFiles
from .pages import ALICE, BOB, IDENTITY, PAGE_BYTES, chain, keys, payload

MAX_BYTES = 400_000  # 31 pages, in segments of 3
STEP = 23  # each so many-th operation fails; the three errors begin at different ones
CHAINS = [chain(5, seed, namespace=(ALICE, BOB)[seed % 2]) for seed in range(9)]


def read(store: PageStore, page_keys: list[PageKey]) -> int:
    out = np.empty((len(page_keys), PAGE_BYTES), np.uint8)
    num_read = store.read(page_keys, out)
    assert (out[:num_read] == payload(page_keys[:num_read])).all()
    return num_read


def live(store: PageStore, files: FaultyFiles) -> int:
    """Everything that a store does; after how many operations it began to take pages out."""
    for page_keys in CHAINS:
        store.put(page_keys, payload(page_keys))
        store.touch(keys(CHAINS[0]))
        read(store, page_keys)
    num_operations = files.num_operations
    store.drop([CHAINS[-1][3].key])
    try:
        store.discard(BOB)
    except StoreOff:  # said of a disk that failed, and only there
        assert store.stats().is_off
    read(store, CHAINS[0])
    return num_operations


@pytest.mark.parametrize("lasts", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EROFS], ids=errno.errorcode.get)
def test_whatever_operation_fails_the_owner_goes_on_and_reads_nothing_wrong(
    tmp_path: Path, error: int, lasts: bool
) -> None:
    files = FaultyFiles()
    with PageStore.open(tmp_path / "sound", IDENTITY, max_bytes=MAX_BYTES, files=files) as store:
        first_removal = live(store, files)
        assert store.stats().num_pages_evicted
        assert not store.stats().is_off
    assert files.num_operations > 150
    for at in range(error % STEP, files.num_operations, STEP):
        directory, fault = tmp_path / str(at), FailAt(at, error, lasts=lasts)
        files = FaultyFiles(before=fault)
        try:
            with PageStore.open(directory, IDENTITY, max_bytes=MAX_BYTES, files=files) as store:
                live(store, files)
        except StoreCorrupt:
            assert at < 5
        assert fault.has_failed
        with PageStore.open(directory, IDENTITY, max_bytes=MAX_BYTES) as store:
            listed = set(store.page_keys())
            for page_keys in CHAINS:
                num_listed = sum(head in listed for head in page_keys)
                assert read(store, page_keys) == num_listed or at >= first_removal
                assert set(page_keys[:num_listed]) <= listed
            # Where a removal failed, what is gone may still be listed; it is never read.
            assert store.stats().misses.keys() <= ({"absent", "gone"} if at >= first_removal else {"absent"})
            store.put(CHAINS[2], payload(CHAINS[2]))
            assert read(store, CHAINS[2]) == 5


@pytest.mark.parametrize("operation", ["pwritev", "fdatasync"])
def test_a_disk_that_fails_turns_the_store_off_and_says_so_once(
    tmp_path: Path, operation: str, caplog: pytest.LogCaptureFixture
) -> None:
    files = FaultyFiles()
    with PageStore.open(tmp_path, IDENTITY, max_bytes=MAX_BYTES, files=files) as store:
        store.put(CHAINS[0], payload(CHAINS[0]))
        files.before = FailAt(0, errno.EIO, operations=[operation])
        with caplog.at_level(logging.ERROR):
            assert store.put(CHAINS[1], payload(CHAINS[1])).stored == ()
            assert store.put(CHAINS[2], payload(CHAINS[2])).stored == ()
        assert read(store, CHAINS[0]) == 0
        stats = store.stats()
        assert stats.is_off
        assert "Input/output error" in str(stats.off_because) or "on purpose" in str(stats.off_because)
        assert stats.misses == {"off": 1}
        assert [record.levelname for record in caplog.records] == ["ERROR"]
    with PageStore.open(tmp_path, IDENTITY, max_bytes=MAX_BYTES) as store:
        assert read(store, CHAINS[0]) == 5


def test_a_page_that_cannot_be_read_is_a_miss_and_turns_the_store_off(tmp_path: Path) -> None:
    files = FaultyFiles()
    with PageStore.open(tmp_path, IDENTITY, max_bytes=MAX_BYTES, files=files) as store:
        store.put(CHAINS[0], payload(CHAINS[0]))
        files.before = FailAt(0, errno.EIO, operations=["preadv"])
        assert read(store, CHAINS[0]) == 0
        assert store.stats().misses == {"io": 1}
        assert store.stats().is_off


def test_a_full_disk_makes_the_store_smaller_and_it_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = FaultyFiles()
    with PageStore.open(tmp_path, IDENTITY, max_bytes=MAX_BYTES, files=files) as store:
        for page_keys in CHAINS[:3]:
            store.put(page_keys, payload(page_keys))
        files.before = FailAt(0, errno.ENOSPC, operations=["pwritev"])
        assert store.put(CHAINS[3], payload(CHAINS[3])).stored == ()
        assert "is full" in caplog.text
        assert not store.stats().is_off
        assert store.stats().max_bytes == store.stats().num_bytes < MAX_BYTES
        assert [read(store, page_keys) for page_keys in CHAINS[:3]] == [5, 5, 5]
        result = store.put(CHAINS[3], payload(CHAINS[3]))
        assert result.stored == keys(CHAINS[3])
        assert result.evicted
        assert store.stats().num_bytes <= store.stats().max_bytes
        assert read(store, CHAINS[3]) == 5


def test_writes_and_reads_that_stop_in_the_middle_go_on(tmp_path: Path) -> None:
    class Short(FaultyFiles):
        def preadv(self, fd: int, buffers: list, offset: int) -> int:  # type: ignore[override, type-arg]
            return super().preadv(fd, [memoryview(buffers[0])[:700]], offset)

    with PageStore.open(tmp_path, IDENTITY, max_bytes=MAX_BYTES, files=Short(max_write=777)) as store:
        store.put(CHAINS[0], payload(CHAINS[0]))
        assert read(store, CHAINS[0]) == 5


@pytest.mark.parametrize("clock", [lambda: 0.0, iter(range(10**9, 0, -1)).__next__, lambda: -1e12])
def test_clocks_do_not_matter(tmp_path: Path, clock: Callable[[], float]) -> None:
    with PageStore.open(tmp_path, IDENTITY, max_bytes=MAX_BYTES, clock=clock) as store:
        for page_keys in CHAINS:
            store.put(page_keys, payload(page_keys))
        assert read(store, CHAINS[-1]) == 5
        assert read(store, CHAINS[0]) == 0  # the oldest
    with PageStore.open(tmp_path, IDENTITY, max_bytes=MAX_BYTES, clock=lambda: -clock()) as store:
        page_keys = chain(5, 99)
        assert store.put(page_keys, payload(page_keys)).stored == keys(page_keys)
        assert read(store, CHAINS[-1]) == 5


def test_a_segment_that_somebody_removed_is_a_miss(tmp_path: Path) -> None:
    with PageStore.open(tmp_path, IDENTITY, max_bytes=MAX_BYTES) as store:
        store.put(CHAINS[0], payload(CHAINS[0]))
        for path in tmp_path.glob("segment-*"):
            path.unlink()
        assert read(store, CHAINS[0]) == 0
        assert store.stats().misses == {"gone": 1}
        assert not store.stats().is_off
        store.put(CHAINS[0], payload(CHAINS[0]))
