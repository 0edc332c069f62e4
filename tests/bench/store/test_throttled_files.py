"""A disk that was declared slow is as slow as declared, for everybody together, and counts what it moved."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from radixlm.runtime.store import OSFiles, PageStore

from bench.store.throttled_files import ThrottledFiles

from ...runtime.store.pages import IDENTITY, PAGE_BYTES, chain, payload


class Clock:
    """Time passes only in `sleep`."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("mb_per_s", [25, 500])
def test_reads_and_writes_together_take_the_time_of_the_declared_disk(tmp_path: Path, mb_per_s: int) -> None:
    clock = Clock()
    files = ThrottledFiles(OSFiles(), mb_per_s * 1e6, burst_bytes=4096, clock=clock, sleep=clock.sleep)
    fd = files.open(tmp_path / "file", create=True)
    for i in range(20):
        assert files.pwritev(fd, [bytes(100_000)], i * 100_000) == 100_000
    buffer = bytearray(200_000)
    for i in range(5):
        assert files.preadv(fd, [buffer], i * 200_000) == 200_000
    files.close(fd)
    assert (files.read_bytes, files.written_bytes) == (1_000_000, 2_000_000)
    assert clock.now - 100 == pytest.approx(3.0 / mb_per_s, rel=0.01)


def test_a_rested_disk_moves_a_burst_at_once_and_no_more(tmp_path: Path) -> None:
    clock = Clock()
    files = ThrottledFiles(OSFiles(), 1e6, burst_bytes=50_000, clock=clock, sleep=clock.sleep)
    fd = files.open(tmp_path / "file", create=True)
    clock.now += 1000
    files.pwritev(fd, [bytes(50_000)], 0)
    assert clock.now == 1100
    files.pwritev(fd, [bytes(50_000)], 0)
    assert clock.now == pytest.approx(1100.05)
    files.close(fd)


def test_a_store_works_on_a_slow_disk(tmp_path: Path) -> None:
    clock, heads = Clock(), chain(20)
    files = ThrottledFiles(OSFiles(), 1e6, clock=clock, sleep=clock.sleep)
    with PageStore.open(tmp_path, IDENTITY, max_bytes=4 << 20, files=files) as store:
        store.put(heads, payload(heads))
        out = np.empty((20, PAGE_BYTES), np.uint8)
        before = files.read_bytes
        assert store.read(heads, out) == 20
        assert files.read_bytes - before == store.stats().read_bytes == 20 * 12288
