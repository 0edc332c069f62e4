"""A transfer inserts what comes from the front at once, and what comes from the back when all before it is there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import numpy as np
import pytest
from radixlm.runtime.artifact.manifest import PAGE_SIZE
from radixlm.runtime.cache import page_sharing, prefix_match, radix_tree
from radixlm.runtime.cache.page_pool import PagePool
from radixlm.runtime.cache.prefix_cache import PrefixCache
from radixlm.runtime.cache.radix_node import encode_key
from radixlm.runtime.model.batch import UInt8Array
from radixlm.runtime.prefix.disk_index import StoredPrefix
from radixlm.runtime.prefix.disk_reader import Read
from radixlm.runtime.prefix.transfer import PageInserter, Transfer
from radixlm.runtime.store import PageKey

from ..store.pages import ALICE, PAGE_BYTES, chain, payload

HEADS = tuple(chain(6))
TOKENS = tuple(token_id for head in HEADS for token_id in head.token_ids)
PREFIX = StoredPrefix(ALICE, (*TOKENS, 7), bytes(len(TOKENS)), HEADS)


class Disk:
    """Stands in for the reader: a read is done when the test says so."""

    page_bytes = PAGE_BYTES

    def __init__(self) -> None:
        self.reads: list[tuple[Read, tuple[PageKey, ...]]] = []
        self.cancelled: list[Read] = []

    def read_pages(
        self, page_keys: tuple[PageKey, ...], done: Callable[[Read], None], *, into: UInt8Array | None = None
    ) -> Read:
        read = Read(lambda pages: 0, done, len(page_keys) * PAGE_BYTES, len(page_keys), into)
        self.reads.append((read, page_keys))
        return read

    def cancel(self, reads: Iterable[Read]) -> None:
        self.cancelled += reads

    def bring(self, num_right: int | None = None) -> None:
        """The next read is done, and so many of its pages are right."""
        read, page_keys = self.reads.pop(0)
        read.pages = np.empty((len(page_keys), PAGE_BYTES), np.uint8) if read.pages is None else read.pages
        read.pages[:] = payload(page_keys)
        read.num_right = len(page_keys) if num_right is None else num_right
        read.done(read)


class Pool:
    """A pool of pages, and the tree over them."""

    def __init__(self, num_pages: int = 16) -> None:
        self.pages = np.zeros((num_pages, PAGE_BYTES), np.uint8)
        self.cache = PrefixCache(PagePool(num_pages))

    def write_pages(self, page_ids: Sequence[int], pages: UInt8Array) -> None:
        self.pages[list(page_ids)] = pages

    def read_pages(self, page_ids: Sequence[int], out: UInt8Array) -> None:
        out[:] = self.pages[list(page_ids)]

    def found(self) -> int:
        """Pages of the prefix that the tree has; their contents must be right."""
        page_ids = self.cache.tree.find(ALICE, TOKENS).pages
        assert (self.pages[page_ids] == payload(HEADS[: len(page_ids)])).all()
        self.cache.check()
        return len(page_ids)

    def compute(self, num_pages: int) -> None:
        """As a request does that computes the first pages."""
        page_keys = HEADS[:num_pages]
        assert PageInserter(self.cache, self).insert(
            StoredPrefix(ALICE, (*TOKENS, 7), bytes(96), page_keys), 0, payload(page_keys)
        )


def begin(
    pool: Pool, disk: Disk, direction: Literal["front", "back"], start: int = 0, piece_pages: int = 2
) -> Transfer:
    def arrived(transfer: Transfer, first: int, read: Read) -> None:
        transfer.take(first, read)

    reader: Any = disk
    return Transfer(PREFIX, start, direction, PageInserter(pool.cache, pool), reader, piece_pages=2, arrived=arrived)


def test_from_the_front_each_batch_is_found_as_soon_as_it_arrives() -> None:
    pool, disk = Pool(), Disk()
    transfer = begin(pool, disk, "front")
    for arrived in (2, 4, 6):
        disk.bring()
        assert (transfer.arrived, pool.found()) == (arrived, arrived)
    assert transfer.arrived == transfer.stop and transfer.room_bytes == 0


@pytest.mark.parametrize("start", [0, 1])
def test_from_the_back_nothing_is_found_until_the_tree_has_all_before_it(start: int) -> None:
    pool, disk = Pool(), Disk()
    pool.compute(start) if start else None
    transfer = begin(pool, disk, "back", start)
    assert transfer.room_bytes == (6 - start) * PAGE_BYTES
    disk.bring()
    disk.bring()
    assert transfer.arrived == 2 and not transfer.meet() and transfer.there == start
    assert pool.found() == start
    pool.compute(3)  # further than the disk has come
    assert transfer.meet() and transfer.there == 3 and pool.found() == 6


def test_from_the_back_what_was_computed_altogether_is_not_inserted() -> None:
    pool, disk = Pool(), Disk()
    transfer = begin(pool, disk, "back")
    disk.bring()
    pool.compute(6)
    assert not transfer.meet() and transfer.there == transfer.stop and not transfer.is_broken


@pytest.mark.parametrize(("direction", "num_found"), [("front", 3), ("back", 0)])
def test_a_page_that_is_not_right_breaks_it_and_its_key_is_known(
    direction: Literal["front", "back"], num_found: int
) -> None:
    pool, disk = Pool(), Disk()
    transfer = begin(pool, disk, direction)
    disk.bring()
    disk.bring(num_right=1)
    assert transfer.is_broken and transfer.lost_key == HEADS[3].key
    assert pool.found() == num_found
    disk.bring()
    assert pool.found() == num_found, "nothing is taken any more"


def test_pages_without_room_break_it_and_change_nothing() -> None:
    pool, disk = Pool(num_pages=3), Disk()
    transfer = begin(pool, disk, "front")
    held = pool.cache.pool.allocate(2)
    disk.bring()
    pool.cache.pool.release(held)
    assert transfer.is_broken and transfer.lost_key is None and pool.found() == 0


def test_an_end_cancels_all_reads_and_drops_what_was_read() -> None:
    pool, disk = Pool(), Disk()
    transfer = begin(pool, disk, "back")
    disk.bring()
    transfer.end()
    assert transfer.is_over and transfer.room_bytes == 0 and len(disk.cancelled) == 3
    assert not transfer.meet()


def test_a_transfer_has_the_pages_of_every_prefix_that_begins_alike() -> None:
    transfer = begin(Pool(), Disk(), "front")
    other = tuple(chain(6, seed=1))
    assert transfer.has(5, PREFIX) and not transfer.has(5, StoredPrefix(ALICE, (), b"", other))
    longer = StoredPrefix(ALICE, (), b"", (*HEADS, *chain(1, seed=2, parent_key=HEADS[-1].key)))
    assert transfer.has(5, longer) and not transfer.has(6, longer)
    assert len(TOKENS) == 6 * PAGE_SIZE


@pytest.mark.parametrize("num_pages", [1_000, 8_000])
def test_a_prefix_in_pieces_takes_work_in_proportion_to_its_length(
    monkeypatch: pytest.MonkeyPatch, num_pages: int
) -> None:
    """Each piece was looked up with all before it: eight times the pages took sixty times the work."""
    num_encoded = 0

    def counted(token_ids: Sequence[int]) -> bytes:
        nonlocal num_encoded
        num_encoded += len(token_ids)
        return encode_key(token_ids)

    for module in (radix_tree, prefix_match, page_sharing):
        monkeypatch.setattr(module, "encode_key", counted)
    pool, ids = Pool(num_pages + 4), range(num_pages * PAGE_SIZE + 1)
    prefix = StoredPrefix(ALICE, tuple(ids), bytes(len(ids) - 1), HEADS[:1] * num_pages)
    inserter, end = PageInserter(pool.cache, pool), None
    for start in range(0, num_pages, 20):
        pages = np.full((20, PAGE_BYTES), start % 251, np.uint8)
        end = inserter.insert_after(end, prefix, start, pages)
        assert end is not None and end.num_pages == start + 20
    assert num_encoded < 1.2 * len(ids)
    found = pool.cache.tree.find(ALICE, ids).pages
    assert len(found) == num_pages and (pool.pages[found, 0] == np.repeat(np.arange(0, num_pages, 20) % 251, 20)).all()
    pool.cache.check()


def test_pieces_are_looked_up_again_where_pages_left_the_tree() -> None:
    pool, disk = Pool(), Disk()
    transfer = begin(pool, disk, "front")
    disk.bring()
    pool.cache.tree.remove(pool.cache.tree.find(ALICE, TOKENS).pages[1:])
    disk.bring()
    assert transfer.is_broken and pool.found() == 1
    again = begin(pool, disk, "front", 1)
    disk.reads = disk.reads[-3:]
    disk.bring()
    other = PageInserter(pool.cache, pool).insert(
        StoredPrefix(ALICE, range(17), bytes(16), HEADS[:1]), 0, payload(HEADS[:1])
    )
    pool.cache.tree.remove(pool.cache.tree.find(ALICE, range(16)).pages)
    assert other and not again.is_broken
    disk.bring()
    disk.bring()
    assert again.arrived == again.stop and pool.found() == 6
