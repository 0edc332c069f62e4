"""What is put is found again, whole, by everything that it depends on and by nothing else."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from radixlm.runtime.cache.cache_namespace import adapted_namespace
from radixlm.runtime.errors import StoreBusy, StoreCorrupt, StoreError, StoreOff
from radixlm.runtime.store import PageKey, PageStore
from radixlm.runtime.store.page_key import pack_tokens

from .pages import ALICE, BOB, IDENTITY, OTHER, PAGE_BYTES, chain, keys, payload

MAX_BYTES = 4 << 20


def read(store: PageStore, page_keys: list[PageKey]) -> int:
    """How many pages are found; those are right."""
    out = np.full((len(page_keys), PAGE_BYTES), 0xEE, np.uint8)
    num_read = store.read(page_keys, out)
    assert (out[:num_read] == payload(page_keys[:num_read])).all()
    return num_read


def test_what_was_put_is_read_back_before_and_after_a_restart(tmp_path: Path) -> None:
    page_keys, branch = chain(20), chain(5, 1, namespace=BOB)
    with PageStore.open(tmp_path, IDENTITY, max_bytes=MAX_BYTES) as store:
        secret = store.secret
        assert store.put(page_keys, payload(page_keys)).stored == keys(page_keys)
        store.put(branch, payload(branch))
        assert (read(store, page_keys), read(store, branch), read(store, page_keys[7:])) == (20, 5, 13)
    with PageStore.open(tmp_path, IDENTITY, max_bytes=MAX_BYTES) as store:
        assert store.secret == secret
        assert set(store.page_keys()) == {*page_keys, *branch}
        assert (read(store, page_keys), read(store, branch)) == (20, 5)
        assert store.stats().num_pages == 25
        more = chain(3, 2, parent_key=page_keys[-1].key)
        store.put(more, payload(more))
        assert read(store, [*page_keys, *more]) == 23


def test_heads_come_after_those_before_them(tmp_path: Path) -> None:
    with PageStore.open(tmp_path, IDENTITY, max_bytes=MAX_BYTES) as store:
        trunk = chain(6)
        branches = [chain(4, seed, parent_key=trunk[2 + seed].key) for seed in range(3)]
        for page_keys in (trunk, *branches):
            store.put(page_keys, payload(page_keys))
        seen = {bytes(32)}
        for head in store.page_keys():
            assert head.parent_key in seen
            seen.add(head.key)
        assert len(seen) == 1 + 6 + 12


def test_pages_without_their_parent_are_left_out_and_pages_that_are_there_are_not_written_twice(tmp_path: Path) -> None:
    page_keys = chain(6)
    with PageStore.open(tmp_path, IDENTITY, max_bytes=MAX_BYTES) as store:
        assert store.put(page_keys[1:], payload(page_keys[1:])).stored == ()
        store.put(page_keys[:3], payload(page_keys[:3]))
        assert store.put(page_keys, payload(page_keys)).stored == keys(page_keys)
        assert store.put(page_keys, payload(page_keys)).stored == keys(page_keys)
        assert store.stats().num_pages_written == store.stats().num_pages == 6


def test_no_other_model_namespace_parent_or_token_finds_a_page(tmp_path: Path) -> None:
    page_keys = chain(3)
    others = [chain(3, namespace=BOB), chain(3, parent_key=b"p" * 32), chain(3, 1)]
    with PageStore.open(tmp_path, IDENTITY, max_bytes=MAX_BYTES) as store:
        store.put(page_keys, payload(page_keys))
        assert [read(store, other) for other in others] == [0, 0, 0]
        assert store.stats().misses == {"absent": 3}
    with PageStore.open(tmp_path, OTHER, max_bytes=MAX_BYTES) as store:
        assert list(store.page_keys()) == []
        assert read(store, chain(3, identity=OTHER)) == 0
        mine = chain(3, identity=OTHER)
        store.put(mine, payload(mine))
        assert read(store, mine) == 3
    with PageStore.open(tmp_path, IDENTITY, max_bytes=MAX_BYTES) as store:
        assert list(store.page_keys()) == page_keys
        assert read(store, page_keys) == 3


@pytest.mark.parametrize("field", ["namespace", "parent_key", "token_ids"])
def test_a_key_alone_is_not_believed(tmp_path: Path, field: str) -> None:
    page_keys = chain(3)
    wrong = {"namespace": BOB, "parent_key": b"p" * 32, "token_ids": (1,) * 16}[field]
    with PageStore.open(tmp_path, IDENTITY, max_bytes=MAX_BYTES) as store:
        store.put(page_keys, payload(page_keys))
        assert read(store, [page_keys[0], replace(page_keys[1], **{field: wrong}), page_keys[2]]) == 1  # type: ignore[arg-type]
        kind = {"parent_key": "parent", "token_ids": "tokens"}.get(field, field)
        assert store.stats().misses == {kind: 1}
        assert read(store, page_keys) == 1  # neither is the page believed that could be taken for another


def test_marks_of_who_wrote_a_token_do_not_matter_to_keys_and_values(tmp_path: Path) -> None:
    page_keys = chain(2)
    with PageStore.open(tmp_path, IDENTITY, max_bytes=MAX_BYTES) as store:
        store.put(page_keys, payload(page_keys))
        assert read(store, [replace(head, generated=bytes(16)) for head in page_keys]) == 2
        assert [head.generated for head in store.page_keys()] == [head.generated for head in page_keys]


def test_a_discarded_namespace_is_nowhere_on_the_disk(tmp_path: Path) -> None:
    page_keys, other = chain(6), chain(4, 1, namespace=BOB)
    with PageStore.open(tmp_path, IDENTITY, max_bytes=MAX_BYTES) as store:
        store.put(page_keys, payload(page_keys))
        store.put(other, payload(other))
        assert sorted(store.discard(ALICE)) == sorted(keys(page_keys))
        assert (read(store, page_keys), read(store, other)) == (0, 4)
        assert list(store.page_keys()) == other
        on_disk = b"".join(path.read_bytes() for path in tmp_path.iterdir())
        for head, row in zip(page_keys, payload(page_keys), strict=True):
            assert head.key not in on_disk
            assert pack_tokens(head.token_ids) not in on_disk
            assert row.tobytes()[:64] not in on_disk
    (tmp_path / "index.sqlite").unlink()
    with PageStore.open(tmp_path, IDENTITY, max_bytes=MAX_BYTES) as store:
        assert list(store.page_keys()) == other


def test_a_namespace_is_discarded_with_its_adapters(tmp_path: Path) -> None:
    """Also those of records that the index no longer has."""
    ours, lost = (chain(2, i, namespace=adapted_namespace(ALICE, str(i))) for i in range(2))
    other = chain(2, 2, namespace=adapted_namespace(BOB, "0"))
    with PageStore.open(tmp_path, IDENTITY, max_bytes=MAX_BYTES) as store:
        for pages in (ours, lost, other):
            store.put(pages, payload(pages))
        store._state.add_bad(set(keys(lost)))
        assert sorted(store.discard(ALICE)) == sorted(keys([*ours, *lost]))
        assert list(store.page_keys()) == other
    on_disk = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert not any(page.key in on_disk for page in (*ours, *lost))


def test_dropped_pages_are_nowhere_on_the_disk(tmp_path: Path) -> None:
    page_keys, other = chain(6), chain(4, 1, namespace=BOB)
    with PageStore.open(tmp_path, IDENTITY, max_bytes=MAX_BYTES) as store:
        store.put(page_keys, payload(page_keys))
        store.put(other, payload(other))
        assert sorted(store.drop([page_keys[2].key])) == sorted(keys(page_keys[2:]))
        on_disk = b"".join(path.read_bytes() for path in tmp_path.iterdir())
        for head, row in zip(page_keys, payload(page_keys), strict=True):
            is_there = head in page_keys[:2]
            assert (pack_tokens(head.token_ids) in on_disk) == is_there, "the ids, in index and write-ahead log"
            assert (row.tobytes()[:64] in on_disk) == is_there, "keys and values"
        assert (read(store, page_keys), read(store, other)) == (2, 4)


def test_pages_that_are_dropped_because_one_broke_are_nowhere_on_the_disk(tmp_path: Path) -> None:
    page_keys = chain(6)
    with PageStore.open(tmp_path, IDENTITY, max_bytes=MAX_BYTES) as store:
        store.put(page_keys, payload(page_keys))
        [segment] = tmp_path.glob("segment-*")
        content = bytearray(segment.read_bytes())
        content[content.index(payload(page_keys)[2].tobytes()) + 100] ^= 1
        segment.write_bytes(content)
        assert read(store, page_keys) == 2
        store.drop([page_keys[2].key])
        on_disk = b"".join(path.read_bytes() for path in tmp_path.iterdir())
        for head, row in zip(page_keys[2:], payload(page_keys)[2:], strict=True):
            assert pack_tokens(head.token_ids) not in on_disk, "the ids"
            assert row.tobytes()[200:400] not in on_disk, "keys and values"
        assert read(store, page_keys) == 2


def test_dropped_pages_and_those_after_them_do_not_come_back_with_a_new_index(tmp_path: Path) -> None:
    page_keys = chain(6)
    with PageStore.open(tmp_path, IDENTITY, max_bytes=MAX_BYTES) as store:
        store.put(page_keys, payload(page_keys))
        assert sorted(store.drop([page_keys[3].key])) == sorted(keys(page_keys[3:]))
        assert read(store, page_keys) == 3
    (tmp_path / "index.sqlite").unlink()
    with PageStore.open(tmp_path, IDENTITY, max_bytes=MAX_BYTES) as store:
        assert list(store.page_keys()) == page_keys[:3]
        store.put(page_keys, payload(page_keys))
        assert read(store, page_keys) == 6


def test_a_second_process_is_refused_and_told_which_is_the_first(tmp_path: Path) -> None:
    first = PageStore.open(tmp_path, IDENTITY, max_bytes=MAX_BYTES)
    with pytest.raises(StoreBusy, match=f"is open in process {os.getpid()}"):
        PageStore.open(tmp_path, IDENTITY, max_bytes=MAX_BYTES)
    first.close()
    PageStore.open(tmp_path, IDENTITY, max_bytes=MAX_BYTES).close()


def test_a_store_that_holds_no_page_and_a_directory_that_is_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="holds no page"):
        PageStore.open(tmp_path, IDENTITY, max_bytes=PAGE_BYTES)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreCorrupt, match="give another directory"):
        PageStore.open(tmp_path / "file", IDENTITY, max_bytes=MAX_BYTES)


def test_nobody_else_may_read_what_is_stored(tmp_path: Path) -> None:
    page_keys = chain(2)
    with PageStore.open(tmp_path / "store", IDENTITY, max_bytes=MAX_BYTES) as store:
        store.put(page_keys, payload(page_keys))
        for path in (tmp_path / "store", *(tmp_path / "store").iterdir()):
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_a_closed_store_finds_nothing_and_takes_nothing(tmp_path: Path) -> None:
    page_keys = chain(2)
    store = PageStore.open(tmp_path, IDENTITY, max_bytes=MAX_BYTES)
    store.close()
    store.close()
    assert store.put(page_keys, payload(page_keys)).stored == ()
    assert (read(store, page_keys), store.drop(keys(page_keys)), list(store.page_keys())) == (0, [], [])
    with pytest.raises(StoreOff, match="the store is off"):
        store.discard(ALICE)
    assert store.stats().is_off
