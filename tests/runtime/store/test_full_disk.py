"""A store leaves a part of its disk free, makes room where others took that, and is off for a minute if it cannot."""

from __future__ import annotations

import errno
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from radixlm.runtime.errors import StoreCorrupt, StoreUnusable
from radixlm.runtime.store import PageKey, PageStore
from radixlm.runtime.store.evictor import FULL_S
from radixlm.runtime.store.files import Buffer, OSFiles

from .pages import ALICE, IDENTITY, PAGE_BYTES, chain, keys, payload

DISK_BYTES = 1 << 20
MAX_BYTES = 10 * DISK_BYTES
RESERVE_BYTES = DISK_BYTES // 4


@dataclass
class SmallDisk(OSFiles):
    """A disk of a mebibyte, of which others take `others_bytes`."""

    directory: Path
    others_bytes: int = 0
    num_refused: int = 0  # writes that did not fit

    @property
    def free_bytes(self) -> int:
        taken = sum(path.stat().st_size for path in self.directory.glob("segment-*"))
        return max(0, DISK_BYTES - self.others_bytes - taken)

    def disk_bytes(self, directory: Path) -> tuple[int, int]:
        return DISK_BYTES, self.free_bytes

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        if sum(memoryview(buffer).nbytes for buffer in buffers) > self.free_bytes:
            self.num_refused += 1
            raise OSError(errno.ENOSPC, "on purpose")
        return super().pwritev(fd, buffers, offset)


@pytest.fixture
def disk(tmp_path: Path) -> SmallDisk:
    return SmallDisk(tmp_path)


def opened(disk: SmallDisk) -> PageStore:
    return PageStore.open(disk.directory, IDENTITY, max_bytes=MAX_BYTES, files=disk)


def put(store: PageStore, seed: int) -> list[PageKey]:
    page_keys = chain(5, seed)
    store.put(page_keys, payload(page_keys))
    return page_keys


def num_read(store: PageStore, page_keys: list[PageKey]) -> int:
    return store.read(page_keys, np.empty((len(page_keys), PAGE_BYTES), np.uint8))


def wait(store: PageStore) -> None:
    """As long as a store is off whose disk is full."""
    now = time.monotonic() + FULL_S
    store._state._clock = lambda: now


def test_a_store_larger_than_its_disk_leaves_a_reserve_free(disk: SmallDisk) -> None:
    for first in (0, 40):
        with opened(disk) as store:
            for seed in range(first, first + 40):
                page_keys = put(store, seed)
                assert num_read(store, page_keys) == 5, "the oldest make room"
                assert disk.free_bytes >= RESERVE_BYTES
            assert disk.num_refused == 0, "room is made before the write that needs it"
            assert not store.stats().is_off


def test_a_disk_that_others_fill_takes_segments_and_not_the_store(disk: SmallDisk) -> None:
    with opened(disk) as store:
        for seed in range(40):
            put(store, seed)
        before = store.stats().num_segments
        disk.others_bytes += disk.free_bytes
        put(store, 50)
        assert not store.stats().is_off and 0 < store.stats().num_segments < before
        disk.others_bytes = DISK_BYTES
        put(store, 51)
        assert "No space left" in str(store.stats().off_because) and store.stats().num_segments == 0
        disk.others_bytes = 0
        put(store, 52)
        assert store.stats().is_off
        wait(store)
        page_keys = put(store, 52)
        assert num_read(store, page_keys) == 5, "it goes on without a restart"


def test_a_disk_that_is_full_at_the_start_makes_room_before_the_index_changes(disk: SmallDisk) -> None:
    with opened(disk) as store:
        first = put(store, 0)
        for seed in range(1, 20):
            newest = put(store, seed)
    disk.others_bytes += disk.free_bytes
    removed: list[str] = []
    disk.unlink = lambda path: (removed.append(path.name), path.unlink())[0]  # type: ignore[method-assign,assignment]
    with opened(disk) as store:
        assert removed and removed == sorted(removed)
        assert num_read(store, newest) == 5 and num_read(store, first) == 0
        assert store.gc().bytes_after <= DISK_BYTES - disk.others_bytes
        assert not store.stats().is_off


@pytest.mark.parametrize(
    ("code", "words"),
    [(sqlite3.SQLITE_FULL, "database or disk is full"), (sqlite3.SQLITE_IOERR_SHMSIZE, "disk I/O error")],
)
def test_an_index_without_room_leaves_out_what_was_to_be_stored(
    disk: SmallDisk, monkeypatch: pytest.MonkeyPatch, code: int, words: str
) -> None:
    full = sqlite3.OperationalError(words)
    full.sqlite_errorcode = code

    def fail(rows: object) -> None:
        raise full

    with opened(disk) as store:
        first = put(store, 0)
        with monkeypatch.context() as patched:
            patched.setattr(store._writer.index, "put", fail)
            page_keys = chain(5, 1)
            assert store.put(page_keys, payload(page_keys)).stored == ()
        assert words in str(store.stats().off_because) and num_read(store, first) == 0
        wait(store)
        assert num_read(store, first) == 5
        assert store.put(page_keys, payload(page_keys)).stored == keys(page_keys)
    with opened(disk) as store:
        assert num_read(store, page_keys) == 5 and store.discard(ALICE) is not None


def test_a_directory_that_cannot_be_written_is_told_from_one_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(StoreUnusable):
        PageStore.open("/proc/no-store", IDENTITY, max_bytes=MAX_BYTES)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreCorrupt) as refused:
        PageStore.open(tmp_path / "file", IDENTITY, max_bytes=MAX_BYTES)
    assert not isinstance(refused.value, StoreUnusable)
