"""An alias lies beside the pages of its prompt and reply, leaves with them, and is found again after a restart."""

from __future__ import annotations

from pathlib import Path

import pytest
from radixlm.runtime.store import PageKey, PageStore, StoredAlias
from radixlm.runtime.store.page_key import NO_PARENT
from radixlm.runtime.store.record import MAX_DETAILS_BYTES
from radixlm.runtime.store.small_record import last_page_key

from .pages import ALICE, BOB, IDENTITY, OTHER, chain, payload

MAX_BYTES = 1_000_000  # 80 pages, in segments of 9
RENDERED = b"The keeper wrote down the weather of every single day."


def open_store(directory: Path) -> PageStore:
    return PageStore.open(directory, IDENTITY, max_bytes=MAX_BYTES)


def alias_of(page: PageKey, rendered: bytes = RENDERED) -> StoredAlias:
    return StoredAlias(page.namespace, page.key, 20, b"d" * 16, (7, 8, 70_000), rendered, b" \n")


def put(store: PageStore, *chains: list[PageKey]) -> None:
    for page_keys in chains:
        store.put(page_keys, payload(page_keys))


def test_an_alias_is_found_after_a_restart_with_or_without_the_index(tmp_path: Path) -> None:
    page_keys = chain(5)
    aliases = [alias_of(page_keys[4]), alias_of(page_keys[4], b"another"), alias_of(page_keys[2])]
    with open_store(tmp_path) as store:
        put(store, page_keys)
        for alias in aliases:
            assert len(store.put_small(alias).stored) == 1
            store.put_small(alias)
        assert store.stats().num_pages == 5 and store.stats().num_pages_written == 5
        num_bytes = store.stats().num_bytes
    for name in ("", "index.sqlite"):
        if name:
            (tmp_path / name).unlink()
        with open_store(tmp_path) as store:
            assert sorted(store.aliases(), key=repr) == sorted(aliases, key=repr)
            assert list(store.page_keys()) == page_keys and store.stats().num_bytes == num_bytes
            assert store.verify().bad == {}
            assert store.verify().num_pages == 5


def test_an_alias_whose_page_is_not_there_or_that_is_too_long_is_left_out(tmp_path: Path) -> None:
    page_keys = chain(5)
    with open_store(tmp_path) as store:
        put(store, page_keys[:3])
        assert store.put_small(alias_of(page_keys[3])).stored == ()
        assert store.put_small(alias_of(page_keys[2], bytes(MAX_DETAILS_BYTES))).stored == ()
        assert store.put_small(StoredAlias(ALICE, NO_PARENT, 3, b"d" * 16, (1,), b"a", b"")).stored == ()
        assert list(store.aliases()) == []


@pytest.mark.parametrize("how", ["drop", "discard"])
def test_an_alias_leaves_with_its_page_and_nothing_of_it_is_on_the_disk(tmp_path: Path, how: str) -> None:
    page_keys, other = chain(5), chain(5, 1, namespace=BOB)
    kept = [alias_of(other[4])]
    with open_store(tmp_path) as store:
        put(store, page_keys, other)
        store.put_small(alias_of(page_keys[3]))
        store.put_small(kept[0])
        if how == "drop":
            store.drop([page_keys[1].key])
        else:
            store.discard(ALICE)
        assert list(store.aliases()) == kept
        on_disk = b"".join(path.read_bytes() for path in tmp_path.iterdir())
        assert on_disk.count(RENDERED) == 2  # the other one, in its record and in the index
    (tmp_path / "index.sqlite").unlink()
    with open_store(tmp_path) as store:
        assert list(store.aliases()) == kept


def test_an_alias_is_evicted_with_its_page_and_stays_while_that_is_used(tmp_path: Path) -> None:
    used, unused = chain(3), chain(3, 1)
    with open_store(tmp_path) as store:
        put(store, used, unused)
        store.put_small(alias_of(used[2]))
        store.put_small(alias_of(unused[2]))
        for seed in range(2, 60):
            put(store, chain(5, seed))
            store.touch([used[2].key])
        assert list(store.aliases()) == [alias_of(used[2])]
        store.gc()
        assert list(store.aliases()) == [alias_of(used[2])]


def test_aliases_of_another_model_are_not_listed(tmp_path: Path) -> None:
    page_keys = chain(3, identity=OTHER)
    with PageStore.open(tmp_path, OTHER, max_bytes=MAX_BYTES) as store:
        put(store, page_keys)
        store.put_small(alias_of(page_keys[2]))
    with open_store(tmp_path) as store:
        assert list(store.aliases()) == []


def test_an_alias_that_broke_is_found_by_verify_and_not_believed_without_the_index(tmp_path: Path) -> None:
    page_keys = chain(3)
    with open_store(tmp_path) as store:
        put(store, page_keys)
        store.put_small(alias_of(page_keys[2]))
        [path] = tmp_path.glob("segment-*")
        content = bytearray(path.read_bytes())
        content[content.index(RENDERED) + 3] ^= 1
        path.write_bytes(content)
        report = store.verify()
        assert (report.num_pages, report.bad) == (3, {"header": 1})
    (tmp_path / "index.sqlite").unlink()
    with open_store(tmp_path) as store:
        assert list(store.aliases()) == [] and list(store.page_keys()) == page_keys
        put(store, chain(2, 2))
        assert store.verify().bad == {}


def test_the_last_page_of_a_text_is_named_as_the_store_names_it() -> None:
    page_keys = chain(3)
    ids = [token for head in page_keys for token in head.token_ids]
    assert last_page_key(IDENTITY, page_keys[0].namespace, [*ids, 1, 2]) == page_keys[2].key
    assert last_page_key(IDENTITY, page_keys[0].namespace, ids[:15]) == NO_PARENT
