"""Kill a process that writes to a store, at a random moment, again and again; then look at what it left.

The writer says each answer of the store before it goes on, so that its killer knows what was promised: pages, and runs
of them in some order, which are written again in another, and states after pages. Run alone for hundreds:
`python -m tests.runtime.extras.approximate.records.kill_writers --kills 500`.
"""

from __future__ import annotations

import argparse
import os
import pickle
import random
import select
import signal
import struct
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from radixlm.runtime.artifact.manifest import PAGE_SIZE
from radixlm.runtime.extras.approximate.records.row_records import RowRecords
from radixlm.runtime.store import PageKey, PageStore

from ....store.pages import ALICE, BOB, chain, payload
from .runs import identity_of, is_of_pages, kv_of

KV = kv_of()
IDENTITY = identity_of(KV)
MAX_BYTES = 1_500_000
STATE_BYTES = 20_001
MAX_SECONDS = 0.1  # of a writer's life
MAX_OPEN_SECONDS = 30.0  # before that


Heads = tuple[PageKey, ...]


@dataclass
class Killed:
    """What all kills together left."""

    num_kills: int = 0
    num_promised: int = 0  # pages that were stored when the writer was killed
    num_in_the_middle: int = 0  # kills while the store was at work
    num_mended: int = 0  # kills after which records were taken in or cut
    num_in_an_order: int = 0  # kills while a run was being ordered
    num_runs: int = 0  # that were there, all of them right
    num_promised_runs: int = 0  # among them
    num_states: int = 0  # that were there, all of them right
    there: dict[bytes, PageKey] = field(default_factory=dict)
    ordered: dict[Heads, set[int]] = field(default_factory=dict)  # in which orders each run may be


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        killed = kill_writers(Path(directory) / "store", arguments.kills, random.Random(arguments.seed))
    print(
        f"{killed.num_kills} kills, {killed.num_in_the_middle} of them in the middle of a put, order, drop or discard, "
        f"{killed.num_mended} with a tail to mend: {killed.num_promised} promised pages, all there, none wrong; "
        f"{killed.num_in_an_order} in the middle of an order: {killed.num_runs} runs, none wrong or in an older order, "
        f"{killed.num_promised_runs} of them promised; {killed.num_states} states, none wrong"
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
        said = b""
        if chance.random() < 0.7:  # the others may be killed while they open, which takes a busy machine long
            for _ in range(chance.randrange(1, 16)):  # so that it gets as far on a slow disk
                if not select.select([reading], [], [], MAX_OPEN_SECONDS)[0]:
                    break
                said += os.read(reading, 1 << 16)
        time.sleep(chance.uniform(0.0, MAX_SECONDS))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        with open(reading, "rb") as pipe:
            _look(directory, said + pipe.read(), killed)
        killed.num_kills += 1
    return killed


def _write(directory: Path, seed: int, pipe: int) -> None:
    """Use a store until killed, saying what is begun and what was answered."""
    chance = random.Random(seed)
    store = PageStore.open(directory, IDENTITY, max_bytes=MAX_BYTES)
    trunks = [chain(0)]
    while True:
        match chance.randrange(17):
            case 0 | 12 | 13:  # so that there is room for runs
                _say(pipe, ("discard", ()))
                _say(pipe, ("discarded", tuple(store.discard(BOB))))
            case 1 if trunks[-1]:
                key = chance.choice(trunks[-1]).key
                _say(pipe, ("drop", (key,)))
                _say(pipe, ("dropped", tuple(store.drop([key]))))
            case 2:
                store.touch(head.key for head in chance.choice(trunks))
            case 3 | 4 | 5 | 6 if trunks[-1]:
                trunk = chance.choice([trunk for trunk in trunks if trunk])
                first = chance.randrange(len(trunk))
                heads, order = trunk[first : first + chance.randint(1, 12)], chance.randrange(1 << 30)
                _say(pipe, ("order", (tuple(heads), order)))
                ordered = RowRecords.of(store).rewrite(
                    heads, _scores(len(heads), order), chunk_size=32, num_ranks=_num_ranks(heads)
                )
                _say(pipe, ("ordered", (ordered.stored, ordered.evicted)))
            case 14 | 15 | 16 if trunks[-1]:
                head = chance.choice(trunks[-1])
                _say(pipe, ("state", (head,)))
                kept = store.states.put(head, _state_of(head))
                _say(pipe, ("kept", (kept.stored, kept.evicted)))
            case _:
                trunk = chance.choice(trunks)
                namespace = trunk[0].namespace if trunk else chance.choice((ALICE, BOB))
                parent = trunk[-1].key if trunk else bytes(32)
                more = chain(
                    chance.randint(1, 12), chance.random(), namespace=namespace, parent_key=parent, identity=IDENTITY
                )
                heads = trunk + more
                trunks.append(heads)
                _say(pipe, ("put", tuple(heads)))
                result = store.put(heads, payload(heads, KV.page_bytes))
                _say(pipe, ("stored", (result.stored, result.evicted)))


def _say(pipe: int, said: tuple[str, object]) -> None:
    data = pickle.dumps(said)
    os.write(pipe, struct.pack("<I", len(data)) + data)


def _scores(num_pages: int, order: int) -> NDArray[np.float32]:
    shape = (KV.num_layers, KV.num_kv_heads, num_pages * PAGE_SIZE)
    return np.random.default_rng(order).random(shape, np.float32)


def _num_ranks(heads: Sequence[PageKey]) -> int:
    """Half of the tokens; the other rows are read from pages."""
    return PAGE_SIZE * len(heads) // 2


def _state_of(head: PageKey) -> NDArray[np.uint8]:
    return np.random.default_rng(list(head.key)).integers(0, 256, STATE_BYTES, dtype=np.uint8)


def _look(directory: Path, said: bytes, killed: Killed) -> None:
    """Hold what is there to what was said."""
    begun, ever, there = None, dict(killed.there), dict(killed.there)
    promised: Heads | None = None  # the run that was ordered last
    kept: PageKey | None = None  # the page whose state was stored last
    while len(said) >= 4 and len(said) >= 4 + struct.unpack_from("<I", said)[0]:
        (length,) = struct.unpack_from("<I", said)
        what, about = pickle.loads(said[4 : 4 + length])
        said = said[4 + length :]
        begun = (what, about) if what in ("put", "order", "state", "drop", "discard") else None
        match what:
            case "put":
                ever.update((head.key, head) for head in about)
                promised = kept = None  # runs make room for pages, which take their states along
            case "order":
                (run, order), promised, kept = about, None, None  # older runs and states may have to make room
                killed.ordered.setdefault(run, set()).add(order)
            case "state":
                [head], promised, kept = about, None, None
            case "stored" | "ordered" | "kept" | "dropped" | "discarded":
                came, gone = about if what in ("stored", "ordered", "kept") else ((), about)
                if what == "kept" and came:
                    kept = head
                elif kept is not None and kept.key in gone:
                    kept = None
                there.update((key, ever[key]) for key in came)
                there = {key: head for key, head in there.items() if key not in set(gone)}
                if what == "ordered" and came:
                    killed.ordered[run], promised = {order}, run
                elif promised is not None and not set(gone).isdisjoint(head.key for head in promised):
                    promised = None
    with PageStore.open(directory, IDENTITY, max_bytes=MAX_BYTES) as store:
        listed, stats = list(store.page_keys()), store.stats()
        assert all(ever[head.key] == head for head in listed)
        missing = there.keys() - {head.key for head in listed}
        # What was being taken out, or making room, may be gone, and nothing else.
        assert not missing or begun is not None, f"{len(missing)} pages are missing"
        assert not missing or begun[0] != "discard" or all(there[key].namespace == BOB for key in missing)
        out, readable = np.empty((1, KV.page_bytes), np.uint8), set[bytes]()
        for head in listed:
            found = store.read([head], out)
            readable |= {head.key} if found else set()
            assert found or (begun is not None and begun[0] in ("drop", "discard")), "a page that is listed is gone"
            assert not found or (out == payload([head], KV.page_bytes)).all(), "a page is wrong"
        store.put((), payload((), KV.page_bytes))  # what was found overwritten goes with the next change, and all below
        readable &= {head.key for head in store.page_keys()}
        killed.ordered = {run: orders for run, orders in killed.ordered.items() if _is_right(store, run, orders)}
        store.put((), payload((), KV.page_bytes))
        num_states = _num_states(store, ever, begun, None if kept is None or kept.key not in readable else kept)
        store.put((), payload((), KV.page_bytes))
        num_there = len(killed.ordered) + num_states
        assert num_there == len(list(directory.glob("segment-*.run"))), "there is a run or a state that nobody wrote"
        killed.num_states += num_states
        is_whole = promised is not None and {head.key for head in promised} <= readable
        if is_whole and (begun is None or begun[0] == "drop"):  # runs go after their pages
            assert promised in killed.ordered, f"a run is missing after {begun}"
            killed.num_promised_runs += 1
        killed.num_runs += len(killed.ordered)
        killed.num_in_an_order += begun is not None and begun[0] == "order"
        assert not store.stats().misses.keys() - {"gone", "absent"}
        killed.num_promised += len(there)
        killed.num_in_the_middle += begun is not None
        killed.num_mended += stats.recovery.num_adopted + stats.recovery.num_cut > 0
    with PageStore.open(directory, IDENTITY, max_bytes=MAX_BYTES) as store:
        killed.there = {head.key: head for head in store.page_keys()}


def _num_states(
    store: PageStore, ever: dict[bytes, PageKey], begun: tuple[str, object] | None, kept: PageKey | None
) -> int:
    """How many states there are, all of them right, and that of the page `kept` among them."""
    right, out = set[bytes](), np.empty(STATE_BYTES, np.uint8)
    for key in list(store.pages_with_state()):
        is_there = store.states.read(ever[key], out)
        assert is_there or (begun is not None and begun[0] in ("drop", "discard")), "a state that is listed is gone"
        assert not is_there or (out == _state_of(ever[key])).all(), "a state is wrong"
        right |= {key} if is_there else set()
    if kept is not None and (begun is None or begun[0] == "drop"):
        assert kept.key in right, f"a state is missing after {begun}"
    return len(right)


def _is_right(store: PageStore, heads: Heads, orders: set[int]) -> bool:
    """Whether a run of those pages is there; it has to be them, in one of these orders."""
    run = RowRecords.of(store).open_ordered(heads)
    if run is None or run.header.num_pages < len(heads):
        if run is not None:
            run.close()
        return False
    order, is_whole = run.order(), is_of_pages(run, payload(heads, KV.page_bytes))
    run.close()
    assert order is not None and is_whole, "a run that is listed cannot be read"
    num_ranks = _num_ranks(heads)
    allowed = [np.argsort(-_scores(len(heads), one), axis=-1, kind="stable")[..., :num_ranks] for one in orders]
    assert any((order == one).all() for one in allowed), "a run is in an order that it no longer had"
    return True


if __name__ == "__main__":
    main()
