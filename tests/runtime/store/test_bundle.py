"""An exported prefix is the same bytes wherever it was stored, comes in elsewhere, and is refused when it broke."""

from __future__ import annotations

import errno
import os
import random
import stat
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from radixlm.runtime.cache.cache_namespace import adapted_namespace
from radixlm.runtime.errors import RadixLMError, StoreCorrupt, StoreError, StoreMismatch
from radixlm.runtime.store import ImportReport, PageStore, export_bundle, import_bundle

from .faulty_files import FailAt, FaultyFiles
from .pages import ALICE, BOB, IDENTITY, PAGE_BYTES, chain, keys, payload

MAX_BYTES = 4 << 20
HEADS = [*chain(6), *chain(3, 1, parent_key=chain(6)[3].key)]
NUM_RANDOM_FLIPS = 300


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle of a prompt that parts in two."""
    with PageStore.open(tmp_path / "here", IDENTITY, max_bytes=MAX_BYTES) as store:
        store.put(HEADS, payload(HEADS))
        export_bundle(store, HEADS, tmp_path / "bundle")
    return tmp_path / "bundle"


def test_a_bundle_comes_in_elsewhere_for_whom_it_is_imported(bundle: Path, tmp_path: Path) -> None:
    with PageStore.open(tmp_path / "there", IDENTITY, max_bytes=MAX_BYTES) as store:
        assert import_bundle(store, bundle, BOB) == ImportReport(9, 9)
        page_keys = list(store.page_keys())
        assert {(head.namespace, head.token_ids, head.generated) for head in page_keys} == {
            (BOB, head.token_ids, head.generated) for head in HEADS
        }
        trunk = chain(6, namespace=BOB)
        out = np.empty((6, PAGE_BYTES), np.uint8)
        assert store.read(trunk, out) == 6
        assert (out == payload(HEADS[:6])).all()
        assert import_bundle(store, bundle, BOB) == ImportReport(9, 9)
        assert store.stats().num_pages_written == 9


def test_the_same_pages_give_the_same_bytes(bundle: Path, tmp_path: Path) -> None:
    with PageStore.open(tmp_path / "there", IDENTITY, max_bytes=MAX_BYTES) as store:
        store.put(chain(9, 8), payload(chain(9, 8)))
        import_bundle(store, bundle, BOB)
        page_keys = [head for head in store.page_keys() if head.namespace == BOB]
        export_bundle(store, page_keys[::-1], tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == bundle.read_bytes()


def test_a_bundle_is_its_owners_alone_as_the_store_is(tmp_path: Path) -> None:
    (tmp_path / f"bundle.{os.getpid()}.new").write_bytes(b"left by an export that was killed")
    with PageStore.open(tmp_path / "here", IDENTITY, max_bytes=MAX_BYTES) as store:
        store.put(HEADS, payload(HEADS))
        export_bundle(store, HEADS, tmp_path / "bundle")
    assert stat.S_IMODE((tmp_path / "bundle").stat().st_mode) == 0o600


def test_an_import_that_may_not_evict_takes_the_room_that_is_left_and_no_more(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("radixlm.runtime.store.bundle._BYTES_AT_ONCE", 2 * PAGE_BYTES)
    theirs = [chain(1, seed)[0] for seed in range(20, 46)]
    with PageStore.open(tmp_path / "there", IDENTITY, max_bytes=400_000) as store:
        for head in theirs:
            store.put([head], payload([head]))
        assert set(keys(theirs)) <= {head.key for head in store.page_keys()}, "the store has room for these"
        report = import_bundle(store, bundle, BOB, evicts=False)
        assert 0 < report.num_stored < report.num_pages
        assert set(keys(theirs)) <= {head.key for head in store.page_keys()}
        assert len(list(store.page_keys())) == len(theirs) + report.num_stored


def test_an_import_that_may_not_evict_meets_a_full_disk(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("radixlm.runtime.store.bundle._BYTES_AT_ONCE", 2 * PAGE_BYTES)
    files, theirs = FaultyFiles(), chain(6, 8)
    with PageStore.open(tmp_path / "there", IDENTITY, max_bytes=MAX_BYTES, files=files) as store:
        store.put(theirs, payload(theirs))
        files.before = FailAt(0, errno.ENOSPC, operations=["pwritev"])
        assert import_bundle(store, bundle, BOB, evicts=False) == ImportReport(9, 0)
        assert list(store.page_keys()) == theirs


def test_pages_without_those_before_them_and_of_two_namespaces_are_refused(tmp_path: Path) -> None:
    with PageStore.open(tmp_path / "here", IDENTITY, max_bytes=MAX_BYTES) as store:
        store.put(HEADS, payload(HEADS))
        with pytest.raises(StoreError, match="8 pages were to be exported, 0 have"):
            export_bundle(store, HEADS[1:], tmp_path / "bundle")
        with pytest.raises(StoreError, match="several namespaces"):
            export_bundle(store, [*HEADS, *chain(1, namespace=BOB)], tmp_path / "bundle")
        with pytest.raises(StoreError, match="cannot be read"):
            export_bundle(store, [*HEADS, *chain(1, 7)], tmp_path / "bundle")
        assert not (tmp_path / "bundle").exists()
        export_bundle(store, [], tmp_path / "bundle")
        assert import_bundle(store, tmp_path / "bundle", BOB) == ImportReport(0, 0)


def test_pages_of_an_adapter_are_not_exported(tmp_path: Path) -> None:
    """The import would make them pages of the model without the adapter."""
    pages = chain(3, namespace=adapted_namespace(ALICE, "digest"))
    with PageStore.open(tmp_path / "here", IDENTITY, max_bytes=MAX_BYTES) as store:
        store.put(pages, payload(pages))
        with pytest.raises(StoreError, match="were computed with a LoRA adapter are not exported"):
            export_bundle(store, pages, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("field", ["model_digest", "tokenizer_digest", "quantization", "kv_layout", "page_bytes"])
def test_another_identity_is_refused_with_both_values(bundle: Path, tmp_path: Path, field: str) -> None:
    other = replace(IDENTITY, **{field: 6000 if field == "page_bytes" else "something else"})  # type: ignore[arg-type]
    with PageStore.open(tmp_path / "there", other, max_bytes=MAX_BYTES) as store:
        with pytest.raises(StoreMismatch) as error:
            import_bundle(store, bundle, ALICE)
        assert all(str(value) in str(error.value) for value in (field, getattr(IDENTITY, field), getattr(other, field)))
        assert list(store.page_keys()) == []


def test_a_bundle_that_broke_anywhere_stores_nothing_wrong(bundle: Path, tmp_path: Path) -> None:
    data, chance = bundle.read_bytes(), random.Random(0)
    table = len(data) - 9 * PAGE_BYTES
    offsets = [*range(table), *(chance.randrange(table, len(data)) for _ in range(NUM_RANDOM_FLIPS))]
    right = {key: row.tobytes() for key, row in zip(keys(HEADS), payload(HEADS), strict=True)}
    with PageStore.open(tmp_path / "there", IDENTITY, max_bytes=MAX_BYTES) as store:
        for offset in offsets:
            broken = bytearray(data)
            broken[offset] ^= 1 << chance.randrange(8)
            (tmp_path / "broken").write_bytes(broken)
            with pytest.raises((StoreCorrupt, StoreMismatch)):
                import_bundle(store, tmp_path / "broken", ALICE)
        for head in store.page_keys():
            out = np.empty((1, PAGE_BYTES), np.uint8)
            assert store.read([head], out) == 1
            assert out.tobytes() == right[head.key]


@pytest.mark.parametrize("length", [0, 7, 8, 23, 24, 100, 1000, -PAGE_BYTES, -1])
def test_a_bundle_that_was_cut_is_refused(bundle: Path, tmp_path: Path, length: int) -> None:
    (tmp_path / "cut").write_bytes(bundle.read_bytes()[:length])
    with (
        PageStore.open(tmp_path / "there", IDENTITY, max_bytes=MAX_BYTES) as store,
        pytest.raises(StoreCorrupt),
    ):
        import_bundle(store, tmp_path / "cut", ALICE)


@pytest.mark.parametrize(
    "start",
    [
        struct.pack("<8sIIQ", b"RLXBNDL\n", 1, 1 << 31, 1),
        struct.pack("<8sIIQ", b"RLXBNDL\n", 1, 10, 1 << 63),
        struct.pack("<8sIIQ", b"RLXBNDL\n", 1, 10, 1 << 40),
        struct.pack("<8sIIQ", b"RLXBNDL\n", 2, 10, 1),
        b"\x89PNG" + bytes(20),
    ],
)
def test_sizes_are_checked_before_memory_is_taken(tmp_path: Path, start: bytes) -> None:
    (tmp_path / "bundle").write_bytes(start + bytes(10_000))
    with (
        PageStore.open(tmp_path / "there", IDENTITY, max_bytes=MAX_BYTES) as store,
        pytest.raises(RadixLMError, match=r"no bundle|table alone|version 2"),
    ):
        import_bundle(store, tmp_path / "bundle", ALICE)
