"""Whatever ends the writing, all that was promised is there afterwards, and nothing that is wrong."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from radixlm.runtime.store import PageStore, StoreIdentity

from .faulty_files import FailAt, FaultyFiles, PowerLost
from .pages import ALICE, BOB, chain, payload

NUM_LOSSES = 60
MAX_BYTES = 600_000  # 73 pages
SMALL = StoreIdentity("model", "tokenizer", "q4", "f16", 1000)


class Promised:
    """The keys that are stored as far as the store's answers say; what is on the way in or out may be there or not."""

    def __init__(self) -> None:
        self.there: set[bytes] = set()
        self.known = [chain(0)]

    def work(self, store: PageStore, chance: random.Random) -> None:
        """Do one thing."""
        page_keys = chance.choice(self.known)
        match chance.randrange(8):
            case 0:
                store.touch(head.key for head in page_keys)
            case 1:
                read(store, self, page_keys)
            case 2 if page_keys:
                gone = chance.choice(page_keys).key
                self.there -= below(self.known, gone)
                store.drop([gone])
            case 3 if chance.random() < 0.2:
                self.there -= {head.key for some in self.known for head in some if head.namespace == BOB}
                store.discard(BOB)
            case _:
                at = chance.randint(0, len(page_keys))
                namespace = page_keys[0].namespace if page_keys else chance.choice((ALICE, BOB))
                parent = page_keys[at - 1].key if at else bytes(32)
                more = chain(
                    chance.randint(1, 9), chance.random(), namespace=namespace, parent_key=parent, identity=SMALL
                )
                self.known.append(page_keys[:at] + more)
                before = self.there
                if store.stats().num_bytes + len(self.known[-1]) * 8192 > MAX_BYTES - 8 * 4096:
                    self.there = set()  # until it is done: any of them may leave
                result = store.put(self.known[-1], payload(self.known[-1], SMALL.page_bytes))
                self.there = (before - set(result.evicted)) | set(result.stored)


def below(known: list, key: bytes) -> set[bytes]:  # type: ignore[type-arg]
    """The key and all keys of pages that come after it."""
    found = {key}
    for page_keys in known:
        for head in page_keys:
            if head.parent_key in found:
                found.add(head.key)
    return found


def read(store: PageStore, promised: Promised, page_keys: list) -> None:  # type: ignore[type-arg]
    """Read pages; what is found is right, and what was promised is found."""
    out = np.empty((len(page_keys), SMALL.page_bytes), np.uint8)
    num_read = store.read(page_keys, out)
    assert (out[:num_read] == payload(page_keys[:num_read], SMALL.page_bytes)).all()
    assert num_read == len(page_keys) or page_keys[num_read].key not in promised.there


def check(store: PageStore, promised: Promised) -> None:
    """All that is listed can be read and was put once; all that was promised is listed."""
    listed = list(store.page_keys())
    ever = {head.key: head for page_keys in promised.known for head in page_keys}
    assert all(ever[head.key] == head for head in listed)
    assert promised.there <= {head.key for head in listed}
    assert store.stats().num_pages == len(listed)
    for page_keys in promised.known:
        read(store, promised, page_keys)


@pytest.mark.parametrize("seed", [*range(NUM_LOSSES), 2297])
def test_a_loss_of_power_at_any_moment_takes_nothing_that_was_promised(tmp_path: Path, seed: int) -> None:
    chance, promised, directory = random.Random(seed), Promised(), tmp_path / "0"
    for life in range(1, 4):
        files = FaultyFiles(max_write=chance.choice((None, 700, 9000)))
        files.before = FailAt(chance.randrange(200), PowerLost())
        try:
            store = PageStore.open(directory, SMALL, max_bytes=MAX_BYTES, files=files)
            check(store, promised)
            while not store.stats().is_off:
                promised.work(store, chance)
            pytest.fail(f"the store is off: {store.stats().off_because}")
        except PowerLost:
            files.lose_power(directory, tmp_path / str(life), chance)
            directory = tmp_path / str(life)
    with PageStore.open(directory, SMALL, max_bytes=MAX_BYTES) as store:
        check(store, promised)
