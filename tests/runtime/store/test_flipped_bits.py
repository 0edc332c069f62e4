"""A bit that flips anywhere on the disk costs pages; it never gives a wrong one, and never a wrong list of them."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from radixlm.runtime.errors import StoreMismatch
from radixlm.runtime.store import PageKey, PageStore
from radixlm.runtime.store.files import OSFiles
from radixlm.runtime.store.page_reader import PageReader
from radixlm.runtime.store.record import BLOCK, BlockRange, Kind, Record, RecordHeader, sealed
from radixlm.runtime.store.segment import Segment

from .pages import IDENTITY, PAGE_BYTES, chain, keys, payload

MAX_BYTES = 4 << 20
HEADS = chain(8)
NUM_INDEX_FLIPS = 60
NUM_FIELD_BYTES = 490  # of a page's header; zeros up to the checksum follow
RECORD_BLOCKS = 3


def place_of(number: int) -> BlockRange:
    """Where a page lies."""
    return BlockRange(1, 1 + number * RECORD_BLOCKS, RECORD_BLOCKS)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of eight pages."""
    directory = tmp_path_factory.mktemp("stores") / "sound"
    with PageStore.open(directory, IDENTITY, max_bytes=MAX_BYTES) as store:
        assert store.put(HEADS, payload(HEADS)).stored == keys(HEADS)
    return directory


@pytest.fixture
def directory(stored: Path, tmp_path: Path) -> Path:
    """One's own."""
    return Path(shutil.copytree(stored, tmp_path / "store"))


def flip(path: Path, offset: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


def num_listed(directory: Path) -> int:
    """Pages that are listed were put, come after those before them, and are read right; how many there are."""
    with PageStore.open(directory, IDENTITY, max_bytes=MAX_BYTES) as store:
        listed = list(store.page_keys())
        assert listed == HEADS[: len(listed)]
        assert read(store, listed) == len(listed)
        return len(listed)


def read(store: PageStore, page_keys: list[PageKey]) -> int:
    out = np.empty((len(page_keys), PAGE_BYTES), np.uint8)
    num_read = store.read(page_keys, out)
    assert (out[:num_read] == payload(page_keys[:num_read])).all()
    return num_read


def test_every_byte_of_a_header_and_any_of_a_payload_are_checked(directory: Path) -> None:
    segment, chance, number = Segment(1, IDENTITY), random.Random(0), 3
    path, reader, out = directory / segment.name, PageReader(directory, OSFiles(), IDENTITY), payload(HEADS)
    places, start = [place_of(i) for i in range(8)], place_of(number).offset
    in_header = [*range(NUM_FIELD_BYTES), *range(BLOCK - 16, BLOCK), *chance.sample(range(NUM_FIELD_BYTES, BLOCK), 30)]
    in_payload = [BLOCK, BLOCK + PAGE_BYTES - 1, *(BLOCK + chance.randrange(PAGE_BYTES) for _ in range(100))]
    for offset in in_header + in_payload:
        bit = chance.randrange(8)
        flip(path, start + offset, bit)
        result = reader.read(HEADS, places, out)
        assert (result.num_read, result.miss) == (number, "header" if offset < BLOCK else "payload"), offset
        flip(path, start + offset, bit)
    assert reader.read(HEADS, places, out).num_read == 8
    reader.close()


def test_a_record_of_another_format_is_none() -> None:
    header = Record(RecordHeader.of_page(HEADS[3]), 1, 10, b"i" * 32, PAGE_BYTES, bytes(16))
    for offset in (0, 8):  # the magic, the version
        changed = bytearray(header.encode()[:-16])
        changed[offset] ^= 1
        assert Record.decode(sealed(bytes(changed), BLOCK)) is None
    assert Record.decode(header.encode()) == header


@pytest.mark.parametrize("offset", [0, 10, BLOCK, BLOCK + 10])
def test_a_record_that_is_cut_is_short_though_its_bytes_were_there_before(directory: Path, offset: int) -> None:
    segment, places, out = Segment(1, IDENTITY), [place_of(i) for i in range(8)], payload(HEADS)
    reader = PageReader(directory, OSFiles(), IDENTITY)
    assert reader.read(HEADS, places, out).num_read == 8
    os.truncate(directory / segment.name, place_of(3).offset + offset)
    result = reader.read(HEADS, places, out)  # into memory that holds the right header and page of the read before
    assert (result.num_read, result.miss) == (3, "short")
    reader.close()


@pytest.mark.parametrize("field", ["identity", "namespace", "parent", "tokens", "key", "place", "kind"])
def test_a_whole_record_of_another_page_in_this_place_is_a_miss_of_its_kind(directory: Path, field: str) -> None:
    segment = Segment(1, IDENTITY)
    path = directory / segment.name
    data = bytearray(path.read_bytes())
    block = slice(place_of(3).offset, place_of(3).offset + BLOCK)
    record = Record.decode(data[block])
    assert record is not None
    changes: dict[str, Record] = {
        "kind": replace(record, header=replace(record.header, kind=Kind.DISCARDED)),
        "key": replace(record, header=replace(record.header, key=b"k" * 32)),
        "parent": replace(record, header=replace(record.header, parent_key=b"p" * 32)),
        "namespace": replace(record, header=replace(record.header, namespace=b"bob")),
        "tokens": replace(record, header=replace(record.header, details=bytes(64) + record.header.details[64:])),
        "place": replace(record, block=record.block + RECORD_BLOCKS),
        "identity": replace(record, identity_digest=b"i" * 32),
    }
    data[block] = changes[field].encode()
    path.write_bytes(data)
    with PageStore.open(directory, IDENTITY, max_bytes=MAX_BYTES) as store:
        assert read(store, HEADS) == 3
        assert store.stats().misses == {"gone" if field == "kind" else field: 1}
        assert read(store, HEADS) == 3
        assert store.stats().misses["absent"] == 1  # found no more
        store.put(HEADS, payload(HEADS))
        assert read(store, HEADS) == 8


def test_a_broken_header_of_a_segment_costs_the_segment(directory: Path) -> None:
    flip(directory / Segment(1, IDENTITY).name, 40, 2)
    with PageStore.open(directory, IDENTITY, max_bytes=MAX_BYTES) as store:
        assert (list(store.page_keys()), read(store, HEADS)) == ([], 0)
        assert store.stats().recovery.num_segments_dropped == 1
        store.put(HEADS, payload(HEADS))
        assert read(store, HEADS) == 8


def test_a_flipped_bit_anywhere_in_the_index_gives_nothing_wrong(stored: Path, tmp_path: Path) -> None:
    chance, size = random.Random(1), (stored / "index.sqlite").stat().st_size
    found = []
    for number in range(NUM_INDEX_FLIPS):
        directory = Path(shutil.copytree(stored, tmp_path / str(number)))
        flip(directory / "index.sqlite", chance.randrange(size), chance.randrange(8))
        found.append(num_listed(directory))
        shutil.rmtree(directory)
    assert found.count(8) > NUM_INDEX_FLIPS / 2  # most bits are of no row, or the segments have what it said


@pytest.mark.parametrize("column", ["key", "kind", "parent", "namespace", "details", "segment", "block", "num_blocks"])
def test_a_row_that_changed_is_not_believed(directory: Path, column: str) -> None:
    import sqlite3

    block = place_of(5).block
    with sqlite3.connect(directory / "index.sqlite") as sql:
        value = sql.execute(f"SELECT {column} FROM records WHERE block = {block}").fetchone()[0]
        wrong = value + 1 if isinstance(value, int) else bytes([value[0] ^ 1, *value[1:]])
        sql.execute(f"UPDATE records SET {column} = ? WHERE block = {block}", (wrong,))
    sql.close()
    assert num_listed(directory) == 5


@pytest.mark.parametrize("content", [b"", b"rubbish" * 1000, b"SQLite format 3\0" + bytes(5000)])
def test_an_index_that_is_lost_or_broken_is_made_again_from_the_segments(directory: Path, content: bytes) -> None:
    (directory / "index.sqlite").write_bytes(content)
    assert num_listed(directory) == 8


def test_without_an_index_a_last_record_whose_payload_broke_is_not_taken_in(directory: Path) -> None:
    segment = Segment(1, IDENTITY)
    flip(directory / segment.name, place_of(7).offset + BLOCK + 100, 3)
    (directory / "index.sqlite").unlink()
    assert num_listed(directory) == 7


def test_a_broken_record_in_an_older_segment_costs_what_comes_after_it_alone(tmp_path: Path) -> None:
    chains = [chain(5, seed) for seed in range(12)]
    with PageStore.open(tmp_path, IDENTITY, max_bytes=2_000_000) as store:
        for page_keys in chains:
            store.put(page_keys, payload(page_keys))
        assert store.stats().num_segments > 2
    (tmp_path / "index.sqlite").unlink()
    segment = Segment(1, IDENTITY)
    flip(tmp_path / segment.name, place_of(6).offset + 100, 0)  # the second page of the second chain
    with PageStore.open(tmp_path, IDENTITY, max_bytes=2_000_000) as store:
        assert [read(store, page_keys) for page_keys in chains] == [5, 1, *[5] * 10]


def test_a_segment_of_another_version_is_left_alone(directory: Path) -> None:
    path = directory / Segment(1, IDENTITY).name
    data = bytearray(path.read_bytes())
    data[8] = 1
    data[:BLOCK] = sealed(bytes(data[: BLOCK - 16]), BLOCK)
    path.write_bytes(data)
    with pytest.raises(StoreMismatch, match="has version 1, this radixlm reads 2; give --store another directory"):
        PageStore.open(directory, IDENTITY, max_bytes=MAX_BYTES)
    assert path.read_bytes() == data


def test_an_index_of_another_version_is_left_alone_where_no_segment_says_more(tmp_path: Path) -> None:
    """A store of the first version may have only files that were no segments yet."""
    with closing(sqlite3.connect(tmp_path / "index.sqlite")) as sql:
        sql.executescript("CREATE TABLE runs (number INTEGER); PRAGMA user_version = 1")
    (tmp_path / "ordered-1").write_bytes(b"of the first version")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(StoreMismatch, match="has version 1, this radixlm reads 2; give --store another directory"):
        PageStore.open(tmp_path, IDENTITY, max_bytes=MAX_BYTES)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


def test_an_index_of_another_version_is_made_again_from_segments_of_this_one(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(sqlite3.connect(directory / "index.sqlite")) as sql:
        sql.execute("PRAGMA user_version = 1")
    with PageStore.open(directory, IDENTITY, max_bytes=MAX_BYTES) as store:
        assert len(list(store.page_keys())) == len(HEADS)
    said = "index.sqlite has another version; it is made again from the segments, whose pages stay"
    assert [record.getMessage() for record in caplog.records] == [f"{directory / said}"]


def test_a_secret_of_another_length_is_made_anew(directory: Path) -> None:
    (directory / "SECRET").write_bytes(b"short")
    with PageStore.open(directory, IDENTITY, max_bytes=MAX_BYTES) as store:
        assert len(store.secret) == 32
