"""Pages to store: chains of random tokens, with keys and values that follow from their page_keys."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from radixlm.runtime.store import NO_PARENT, PageKey, StoreIdentity

PAGE_BYTES = 5000  # no multiple of a block
IDENTITY = StoreIdentity("model", "tokenizer", "q4", "f16", PAGE_BYTES)
OTHER = StoreIdentity("another model", "tokenizer", "q4", "f16", PAGE_BYTES)
ALICE, BOB = b"alice", b"bob"


def chain(
    num_pages: int,
    seed: int = 0,
    *,
    namespace: bytes = ALICE,
    parent_key: bytes = NO_PARENT,
    identity: StoreIdentity = IDENTITY,
) -> list[PageKey]:
    """Pages one behind the other."""
    chance, page_keys = random.Random(seed), list[PageKey]()
    for _ in range(num_pages):
        tokens = [chance.randrange(50_000) for _ in range(16)]
        page_keys.append(PageKey.of(identity, namespace, parent_key, tokens, bytes(chance.choices((0, 1), k=16))))
        parent_key = page_keys[-1].key
    return page_keys


def payload(page_keys: Sequence[PageKey], page_bytes: int = PAGE_BYTES) -> NDArray[np.uint8]:
    """What is stored for those pages, always the same for the same key: `[len(page_keys), page_bytes]`."""
    rows = [np.random.default_rng(list(head.key)).integers(0, 256, page_bytes, dtype=np.uint8) for head in page_keys]
    return np.array(rows, dtype=np.uint8).reshape(len(page_keys), page_bytes)


def keys(page_keys: Sequence[PageKey]) -> tuple[bytes, ...]:
    """Their keys."""
    return tuple(head.key for head in page_keys)


def single_files(directory: Path) -> list[Path]:
    """The files of large records, the oldest first."""
    return sorted(directory.glob("segment-*.run"))
