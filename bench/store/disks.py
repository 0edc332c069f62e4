"""Simulate disks of declared speed under a store, and count what was really read. Knows files, not what is measured."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from radixlm.runtime.artifact import Artifact
from radixlm.runtime.prefix.prefix_plan import LoadBudget, PrefixPlan
from radixlm.runtime.prefix.rates import Rates
from radixlm.runtime.store import PageStore, StoreIdentity
from radixlm.runtime.store.files import OSFiles

from .throttled_files import ThrottledFiles

DISKS_MB_PER_S: Mapping[str, float | None] = {"25": 25.0, "50": 50.0, "100": 100.0, "500": 500.0, "real": None}
STORE_BYTES = 1 << 30


def load_always(num_in_memory: int, num_on_disk: int, rates: Rates, budget: LoadBudget) -> PrefixPlan:
    """Load whatever is stored, however long it takes, and compute nothing meanwhile."""
    return PrefixPlan.of((0, num_in_memory, "memory"), (num_in_memory, num_on_disk, "front"), deadline_s=3600.0)


def disk_files(disk: str) -> ThrottledFiles:
    """Return files on one of `DISKS_MB_PER_S`."""
    mb_per_s = DISKS_MB_PER_S[disk]
    return ThrottledFiles(OSFiles(), None if mb_per_s is None else mb_per_s * 1e6)


def open_store(artifact: Artifact, directory: Path, files: ThrottledFiles | None = None) -> PageStore:
    """Open a store of the artifact's pages; without `files` as fast as the disk is."""
    return PageStore.open(directory, StoreIdentity.of(artifact.manifest), max_bytes=STORE_BYTES, files=files)


def drop_page_cache(directory: Path) -> None:
    """Drop all files from the page cache, so that they are read from the disk next time."""
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def device_bytes() -> int:
    """Return the bytes that the kernel read from disks for this process."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["read_bytes"])
