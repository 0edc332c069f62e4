"""Measure how fast stored pages are written and read, compared with the disk alone.

    python -m bench.store.pages --directory .cache

A prompt of 64 pages of SmolLM2's size (360 KiB each) is put and read as the engine does, once from the disk (its bytes
leave the page cache after each read) and once from the page cache; for comparison one `preadv` of as many bytes of the
same file. Prints; results are in LOG.md.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Callable
from itertools import count
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
from radixlm.runtime.store import NO_PARENT, OSFiles, PageKey, PageStore, StoreIdentity
from radixlm.runtime.store.record import BLOCK, padded
from radixlm.runtime.store.segment import Segment

from ..options import read_options

PAGE_BYTES = 368_640
NUM_PAGES = 64
ROUNDS = 9
IDENTITY = StoreIdentity("model", "tokenizer", "q4", "f16", PAGE_BYTES)


class CachedFiles(OSFiles):
    """Leaves the bytes that were read in the page cache."""

    def drop_cache(self, fd: int, offset: int, num_bytes: int) -> None:
        pass


def main() -> None:
    """Measure how fast pages are written to a store and read, and print it."""
    directory = Path(tempfile.mkdtemp(dir=read_options(__doc__, directory=Path(".cache")).directory))
    try:
        _measure_pages(directory)
    finally:
        shutil.rmtree(directory)


def page_keys(num_pages: int, seed: int) -> list[PageKey]:
    """Return the keys of pages of random tokens, each page after the one before."""
    chance, heads, parent_key = random.Random(seed), list[PageKey](), NO_PARENT
    for _ in range(num_pages):
        tokens = [chance.randrange(50_000) for _ in range(16)]
        heads.append(PageKey.of(IDENTITY, b"n" * 32, parent_key, tokens, bytes(16)))
        parent_key = heads[-1].key
    return heads


def _measure_pages(directory: Path) -> None:
    """Print the times to store and to read a prompt's pages, and to read as many bytes of the file."""
    payload = np.random.default_rng(0).integers(0, 256, (NUM_PAGES, PAGE_BYTES), dtype=np.uint8)
    heads, seeds, out = page_keys(NUM_PAGES, 0), count(1), np.empty_like(payload)
    buffer = bytearray(NUM_PAGES * (BLOCK + padded(PAGE_BYTES)))  # touched: no page faults are measured
    with PageStore.open(directory, IDENTITY, max_bytes=4 << 30) as store:
        store.put(heads, payload)
        _print_time("put, with fdatasync", lambda: store.put(page_keys(NUM_PAGES, next(seeds)), payload))
        _print_time("read from the disk", lambda: store.read(heads, out))
        _print_time("  one preadv of as many bytes", lambda: _read_segment(directory, buffer, drop=True))
    with PageStore.open(directory, IDENTITY, max_bytes=4 << 30, files=CachedFiles()) as store:
        _print_time("read from the page cache", lambda: store.read(heads, out))
        _print_time("  one preadv of as many bytes", lambda: _read_segment(directory, buffer, drop=False))
    assert (out == payload).all()


def _read_segment(directory: Path, buffer: bytearray, *, drop: bool) -> None:
    """Fill the buffer from the store's first file by one `preadv`; `drop` drops the file from the page cache."""
    segment = Segment(1, IDENTITY)
    fd = os.open(directory / segment.name, os.O_RDONLY)
    os.preadv(fd, [buffer], segment.num_header_blocks * BLOCK)
    if drop:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def _print_time(what: str, do: Callable[[], object]) -> None:
    """Print the median time of an action, which stores or reads all pages, and its bytes per second."""
    do()
    seconds = median(_seconds(do) for _ in range(ROUNDS))
    print(f"{what:<32} {seconds * 1e3:7.2f} ms  {NUM_PAGES * PAGE_BYTES / seconds / 1e9:6.2f} GB/s")


def _seconds(do: Callable[[], object]) -> float:
    """Return the seconds that an action takes."""
    begun = perf_counter()
    do()
    return perf_counter() - begun


if __name__ == "__main__":
    main()
