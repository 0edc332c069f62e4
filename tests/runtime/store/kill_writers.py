"""Kill a process that writes to a store, at a random moment, again and again; then look at what it left.

The writer says each answer of the store before it goes on, so that its killer knows what was promised. Run alone for
hundreds: `python -m tests.runtime.store.kill_writers --kills 500`.
"""

from __future__ import annotations

import argparse
import os
import pickle
import random
import signal
import struct
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from radixlm.runtime.store import PageHead, PageStore

from .pages import ALICE, BOB, IDENTITY, PAGE_BYTES, chain, payload

MAX_BYTES = 1_500_000
MAX_SECONDS = 0.06  # of a writer's life


@dataclass
class Killed:
    """What all kills together left."""

    num_kills: int = 0
    num_promised: int = 0  # pages that were stored when the writer was killed
    num_in_the_middle: int = 0  # kills while the store was at work
    num_mended: int = 0  # kills after which records were taken in or cut
    there: dict[bytes, PageHead] = field(default_factory=dict)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        killed = kill_writers(Path(directory) / "store", arguments.kills, random.Random(arguments.seed))
    print(
        f"{killed.num_kills} kills, {killed.num_in_the_middle} of them in the middle of a put, drop or discard, "
        f"{killed.num_mended} with a tail to mend: {killed.num_promised} promised pages, all there, none wrong"
    )


def kill_writers(directory: Path, num_kills: int, chance: random.Random) -> Killed:
    """Kill so many writers of one directory; raise AssertionError when a page that was promised is missing or wrong."""
    killed = Killed()
    while killed.num_kills < num_kills:
        reading, writing = os.pipe()
        seed = chance.randrange(1 << 30)
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            _write(directory, seed, writing)
        os.close(writing)
        time.sleep(chance.uniform(0.0, MAX_SECONDS))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        with open(reading, "rb") as pipe:
            _look(directory, pipe.read(), killed)
        killed.num_kills += 1
    return killed


def _write(directory: Path, seed: int, pipe: int) -> None:
    """Use a store until killed, saying what is begun and what was answered."""
    chance = random.Random(seed)
    store = PageStore.open(directory, IDENTITY, max_bytes=MAX_BYTES)
    trunks = [chain(0)]
    while True:
        match chance.randrange(12):
            case 0:
                _say(pipe, ("discard", ()))
                _say(pipe, ("discarded", tuple(store.discard(BOB))))
            case 1 if trunks[-1]:
                key = chance.choice(trunks[-1]).key
                _say(pipe, ("drop", (key,)))
                _say(pipe, ("dropped", tuple(store.drop([key]))))
            case 2:
                store.touch(head.key for head in chance.choice(trunks))
            case _:
                trunk = chance.choice(trunks)
                namespace = trunk[0].namespace if trunk else chance.choice((ALICE, BOB))
                parent = trunk[-1].key if trunk else bytes(32)
                heads = trunk + chain(chance.randint(1, 12), chance.random(), namespace=namespace, parent_key=parent)
                trunks.append(heads)
                _say(pipe, ("put", tuple(heads)))
                result = store.put(heads, payload(heads))
                _say(pipe, ("stored", (result.stored, result.evicted)))


def _say(pipe: int, said: tuple[str, object]) -> None:
    data = pickle.dumps(said)
    os.write(pipe, struct.pack("<I", len(data)) + data)


def _look(directory: Path, said: bytes, killed: Killed) -> None:
    """Hold what is there to what was said."""
    begun, ever, there = None, dict(killed.there), dict(killed.there)
    while len(said) >= 4 and len(said) >= 4 + struct.unpack_from("<I", said)[0]:
        (length,) = struct.unpack_from("<I", said)
        what, about = pickle.loads(said[4 : 4 + length])
        said = said[4 + length :]
        begun = (what, about) if what in ("put", "drop", "discard") else None
        match what:
            case "put":
                ever.update((head.key, head) for head in about)
            case "stored":
                there.update((key, ever[key]) for key in about[0])
                there = {key: head for key, head in there.items() if key not in set(about[1])}
            case "dropped" | "discarded":
                there = {key: head for key, head in there.items() if key not in set(about)}
    with PageStore.open(directory, IDENTITY, max_bytes=MAX_BYTES) as store:
        listed, stats = list(store.heads()), store.stats()
        assert all(ever[head.key] == head for head in listed)
        missing = there.keys() - {head.key for head in listed}
        # What was being taken out, or making room, may be gone, and nothing else.
        assert not missing or begun is not None, f"{len(missing)} pages are missing"
        assert not missing or begun[0] != "discard" or all(there[key].namespace == BOB for key in missing)
        out = np.empty((1, PAGE_BYTES), np.uint8)
        for head in listed:
            found = store.read([head], out)
            assert found or (begun is not None and begun[0] in ("drop", "discard")), "a page that is listed is gone"
            assert not found or (out == payload([head])).all(), "a page is wrong"
        assert not store.stats().misses.keys() - {"gone", "absent"}
        killed.num_promised += len(there)
        killed.num_in_the_middle += begun is not None
        killed.num_mended += stats.recovery.num_adopted + stats.recovery.num_cut > 0
    with PageStore.open(directory, IDENTITY, max_bytes=MAX_BYTES) as store:
        killed.there = {head.key: head for head in store.heads()}


if __name__ == "__main__":
    main()
