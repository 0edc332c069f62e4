"""States of recurrent models come back as they were stored, or not at all; they leave with their pages."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from radixlm.runtime.store import OSFiles, PageKey, PageStore
from radixlm.runtime.store.catalogue import verify
from radixlm.runtime.store.index import Index
from radixlm.runtime.store.index_rows import RecordRow

from .pages import ALICE, BOB, IDENTITY, OTHER, chain, payload, single_files

STATE_BYTES = 30_001
HEADS = chain(4)


def state_of(head: PageKey) -> NDArray[np.uint8]:
    return np.random.default_rng(list(head.key)).integers(0, 256, STATE_BYTES, dtype=np.uint8)


def opened(directory: Path, max_bytes: int = 2_000_000) -> PageStore:
    return PageStore.open(directory, IDENTITY, max_bytes=max_bytes)


def found(store: PageStore, head: PageKey) -> bool:
    out = np.zeros(STATE_BYTES, np.uint8)
    is_there = store.states.read(head, out)
    assert not is_there or np.array_equal(out, state_of(head))
    return is_there


def with_pages(directory: Path) -> PageStore:
    store = opened(directory)
    store.put(HEADS, payload(HEADS))
    return store


def test_states_come_back_after_a_restart(tmp_path: Path) -> None:
    with with_pages(tmp_path) as store:
        assert not found(store, HEADS[2])
        assert store.states.put(HEADS[2], state_of(HEADS[2])).stored
    with opened(tmp_path) as store:
        assert [found(store, head) for head in HEADS] == [False, False, True, False]
        assert list(store.pages_with_state()) == [HEADS[2].key]
        assert not store.states.read(HEADS[2], np.zeros(STATE_BYTES - 1, np.uint8)), "of another size"
    assert not verify(tmp_path, OSFiles()).bad
    with PageStore.open(tmp_path, OTHER, max_bytes=2_000_000) as store:
        assert not store.states.read(HEADS[2], np.zeros(STATE_BYTES, np.uint8))


def test_states_need_their_pages_and_leave_with_them(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        assert not store.states.put(HEADS[1], state_of(HEADS[1])).stored
        store.put(HEADS, payload(HEADS))
        for head in HEADS:
            store.states.put(head, state_of(head))
        store.drop([HEADS[2].key])
        assert [found(store, head) for head in HEADS] == [True, True, False, False]
        assert len(single_files(tmp_path)) == 2
        store.gc()
        assert [found(store, head) for head in HEADS] == [True, True, False, False]
        store.discard(BOB)
        assert found(store, HEADS[0])
        store.discard(ALICE)
        assert single_files(tmp_path) == [] and not found(store, HEADS[0])


def test_a_discarded_state_is_nowhere_on_disk(tmp_path: Path) -> None:
    with with_pages(tmp_path) as store:
        store.states.put(HEADS[0], state_of(HEADS[0]))
        secret = state_of(HEADS[0])[100:160].tobytes()
        assert any(secret in path.read_bytes() for path in tmp_path.iterdir())
        store.discard(ALICE)
        assert not any(secret in path.read_bytes() for path in tmp_path.iterdir())


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5, 0.9])
def test_a_flipped_bit_is_a_miss(tmp_path: Path, share: float) -> None:
    with with_pages(tmp_path) as store:
        store.states.put(HEADS[3], state_of(HEADS[3]))
    [path] = single_files(tmp_path)
    content = bytearray(path.read_bytes())
    at = int(share * (len(content) - 4096 - 4096)) + 4096  # behind the segment's header
    content[at] ^= 4
    path.write_bytes(content)
    assert verify(tmp_path, OSFiles()).bad or share < 0.1, "what fills a header up may be wrong"
    with opened(tmp_path) as store:
        is_there = found(store, HEADS[3])
        assert not is_there
        assert not found(store, HEADS[3]) and store.stats().num_pages == 4


def test_a_full_store_gives_states_room_and_no_more_than_half(tmp_path: Path) -> None:
    max_bytes = 600_000
    with opened(tmp_path, max_bytes) as store:
        for seed in range(30):
            page_keys = chain(8, seed)
            store.put(page_keys, payload(page_keys))
            assert store.states.put(page_keys[-1], state_of(page_keys[-1])).stored, seed
            assert found(store, page_keys[-1])
            stats = store.stats()
            assert stats.num_bytes <= max_bytes and stats.num_ordered_bytes <= max_bytes // 2
        states = set(store.pages_with_state())
        assert 1 < len(states) < 30 and states <= {head.key for head in store.page_keys()}, "none without its page"
    assert not verify(tmp_path, OSFiles()).bad


def test_the_store_tells_of_every_state_that_leaves(tmp_path: Path) -> None:
    told: set[bytes] = set()  # pages with a state
    with opened(tmp_path, 600_000) as store:
        for seed in [*range(12), *range(6), 12, 3, 13]:  # some pages leave and are written again at once
            page_keys = chain(8, seed)
            written = store.put(page_keys, payload(page_keys))
            told -= {*written.evicted, *written.lost_states}
            for head in page_keys[seed % 5 :: 3]:
                result = store.states.put(head, state_of(head))
                told -= {*result.evicted, *result.lost_states}
                told |= set(result.stored)
                assert told == set(store.pages_with_state()), seed
    assert len(told) > 1


def full_of_single_pages(directory: Path) -> tuple[PageStore, list[PageKey]]:
    """A full store, and the pages that are there, the oldest first."""
    store, page_keys = opened(directory, 300_000), [chain(1, seed)[0] for seed in range(1, 61)]
    for head in page_keys:
        store.put([head], payload([head]))
    there = set(store.page_keys())
    return store, [head for head in page_keys if head in there]


def test_nothing_leaves_for_a_state_whose_page_is_gone(tmp_path: Path) -> None:
    store, page_keys = full_of_single_pages(tmp_path)
    with store:
        result = store.states.put(HEADS[0], state_of(HEADS[0]))
        assert not result.stored and not result.evicted and set(store.page_keys()) == set(page_keys)


def test_no_page_makes_room_for_its_own_state(tmp_path: Path) -> None:
    store, page_keys = full_of_single_pages(tmp_path)
    with store:
        result = store.states.put(page_keys[0], state_of(page_keys[0]))
        assert result.stored and page_keys[1].key in result.evicted and found(store, page_keys[0])


def test_what_a_state_costs_does_not_grow_with_the_pages_beside_it(tmp_path: Path) -> None:
    def num_operations(num_pages: int) -> int:
        page_keys = chain(num_pages)
        with opened(tmp_path / str(num_pages), 2 * num_pages * 12288) as store:
            store.put(page_keys, payload(page_keys))
            for head in page_keys[:20]:
                store.states.put(head, state_of(head))
            counted: list[None] = []
            store._writer.index._sql.set_progress_handler(lambda: counted.append(None), 1)
            assert store._writer._evictor.next_single() is not None
            store.states.put(page_keys[20], state_of(page_keys[20]))
            return len(counted)

    few, many = num_operations(100), num_operations(1000)
    assert many < 1.2 * few


def test_a_discard_looks_at_each_record_once_however_many_segments_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []

    class Rows(dict[bytes, RecordRow | None]):
        def values(self):  # type: ignore[no-untyped-def]
            looks.append(len(self))
            return super().values()

    rows_of = Index.rows_of
    monkeypatch.setattr(Index, "rows_of", lambda index, namespace: Rows(rows_of(index, namespace)))
    with with_pages(tmp_path) as store:
        for head in HEADS:
            store.states.put(head, state_of(head))
        assert store.stats().num_segments == 5
        assert sorted(store.discard(ALICE)) == sorted(head.key for head in HEADS)
        assert sum(looks) == 8
        assert not any(found(store, head) for head in HEADS) and single_files(tmp_path) == []
