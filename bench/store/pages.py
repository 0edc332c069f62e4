"""How fast stored pages are written, read and found again, beside what the disk does without any of it.

    python -m bench.store.pages --directory .cache

A prompt of 64 pages of SmolLM2's size (360 KiB each) is put and read as the engine does, once from the disk (its bytes
leave the page cache after each read) and once from the page cache; beside it one `preadv` of as many bytes of the same
file. Checksums are compared on the same bytes. The index is filled with the pages of a 64 GB store, which lists them
when it is opened.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import tempfile
import zlib
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from itertools import count
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
from numpy.typing import NDArray
from radixlm.runtime.store import NO_PARENT, OSFiles, PageKey, PageStore, StoreIdentity
from radixlm.runtime.store.index import Index
from radixlm.runtime.store.index_rows import PageRow
from radixlm.runtime.store.record import Place
from radixlm.runtime.store.segment import Segment
from xxhash import xxh3_128_digest

PAGE_BYTES = 368_640
NUM_PAGES = 64
ROUNDS = 9
NUM_INDEX_PAGES = 180_000
IDENTITY = StoreIdentity("model", "tokenizer", "q4", "f16", PAGE_BYTES)


class CachedFiles(OSFiles):
    """Leaves what was read in the page cache."""

    def drop_cache(self, fd: int, offset: int, num_bytes: int) -> None:
        pass


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, default=Path(".cache"), help="on the disk to measure")
    directory = Path(tempfile.mkdtemp(dir=parser.parse_args().directory))
    try:
        _measure_pages(directory)
        _measure_index(directory)
    finally:
        shutil.rmtree(directory)


def prompt(num_pages: int, seed: int) -> list[PageKey]:
    """Pages of random tokens, one behind the other."""
    chance, heads, parent_key = random.Random(seed), list[PageKey](), NO_PARENT
    for _ in range(num_pages):
        tokens = [chance.randrange(50_000) for _ in range(16)]
        heads.append(PageKey.of(IDENTITY, b"n" * 32, parent_key, tokens, bytes(16)))
        parent_key = heads[-1].key
    return heads


def _measure_pages(directory: Path) -> None:
    payload = np.random.default_rng(0).integers(0, 256, (NUM_PAGES, PAGE_BYTES), dtype=np.uint8)
    heads, seeds, out = prompt(NUM_PAGES, 0), count(1), np.empty_like(payload)
    buffer = bytearray(NUM_PAGES * Segment(1, IDENTITY).record_bytes)  # touched: no page faults are measured
    with PageStore.open(directory, IDENTITY, max_bytes=4 << 30) as store:
        store.put(heads, payload)
        _say("put, with fdatasync", lambda: store.put(prompt(NUM_PAGES, next(seeds)), payload))
        _say("read from the disk", lambda: store.read(heads, out))
        _say("  one preadv of as many bytes", lambda: _raw_read(directory, buffer, drop=True))
    with PageStore.open(directory, IDENTITY, max_bytes=4 << 30, files=CachedFiles()) as store:
        _say("read from the page cache", lambda: store.read(heads, out))
        _say("  one preadv of as many bytes", lambda: _raw_read(directory, buffer, drop=False))
    assert (out == payload).all()
    checksums: dict[str, Callable[[NDArray[np.uint8]], object]] = {
        "XXH3-128": lambda row: xxh3_128_digest(row.data),
        "BLAKE2b": lambda row: blake2b(row.data, digest_size=16).digest(),
        "CRC-32": lambda row: zlib.crc32(row.data),
    }
    for name, checksum in checksums.items():
        _say(f"checksum {name}", partial(_check_all, checksum, payload))


def _check_all(checksum: Callable[[NDArray[np.uint8]], object], payload: NDArray[np.uint8]) -> None:
    for row in payload:
        checksum(row)


def _raw_read(directory: Path, buffer: bytearray, *, drop: bool) -> None:
    segment = Segment(1, IDENTITY)
    fd = os.open(directory / segment.name, os.O_RDONLY)
    os.preadv(fd, [buffer], segment.offset(0))
    if drop:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def _measure_index(directory: Path) -> None:
    path = directory / "full.sqlite"
    index = Index.open(path)
    per_segment = 720
    with index.transaction():
        for number in range(NUM_INDEX_PAGES // per_segment):
            heads = prompt(per_segment, number)
            index.put(PageRow(head, Place(number, i), number) for i, head in enumerate(heads))
    index.close()
    begun = perf_counter()
    index = Index.open(path)
    opened = perf_counter()
    num_listed = sum(1 for _ in index.pages())
    listed = perf_counter()
    keys = [head.key for head in prompt(NUM_PAGES, 7)]
    find_s = median(_seconds(lambda: index.find(keys)) for _ in range(ROUNDS))
    index.close()
    print(
        f"index of {num_listed:,} pages, {path.stat().st_size / 1e6:.0f} MB: opened in {opened - begun:.2f} s, "
        f"listed in {listed - opened:.2f} s; {NUM_PAGES} keys found in {find_s * 1e3:.2f} ms"
    )


def _say(what: str, do: Callable[[], object]) -> None:
    do()
    seconds = median(_seconds(do) for _ in range(ROUNDS))
    print(f"{what:<32} {seconds * 1e3:7.2f} ms  {NUM_PAGES * PAGE_BYTES / seconds / 1e9:6.2f} GB/s")


def _seconds(do: Callable[[], object]) -> float:
    begun = perf_counter()
    do()
    return perf_counter() - begun


if __name__ == "__main__":
    main()
