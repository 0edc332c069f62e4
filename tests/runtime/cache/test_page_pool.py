"""Pages are free, cached or in use, and go back when their last owner leaves."""

from __future__ import annotations

import pytest
from radixlm.runtime.cache.page_pool import PagePool
from radixlm.runtime.errors import OutOfPages


def counts(pool: PagePool) -> tuple[int, int, int]:
    assert pool.num_free + pool.num_cached + pool.num_in_use == pool.num_pages
    return pool.num_free, pool.num_cached, pool.num_in_use


def test_a_page_is_free_when_its_last_owner_leaves() -> None:
    pool = PagePool(4)
    pages = pool.allocate(2)
    pool.retain(pages)
    pool.release(pages)
    assert counts(pool) == (2, 0, 2)
    pool.release(pages)
    assert counts(pool) == (4, 0, 0)


def test_a_page_of_the_tree_is_cached_while_no_sequence_owns_it() -> None:
    pool = PagePool(4)
    pages = pool.allocate(2)
    pool.add_to_tree(pages)
    assert [pool.ref_count(page) for page in pages] == [2, 2]
    assert counts(pool) == (2, 0, 2)
    pool.release(pages)
    assert counts(pool) == (2, 2, 0)
    pool.retain(pages[:1])
    assert counts(pool) == (2, 1, 1)
    pool.remove_from_tree(pages)
    assert counts(pool) == (3, 0, 1)


def test_only_a_page_with_one_sequence_and_no_node_is_private() -> None:
    pool = PagePool(1)
    (page,) = pool.allocate(1)
    assert pool.is_private(page)
    pool.retain([page])
    assert not pool.is_private(page)
    pool.release([page])
    pool.add_to_tree([page])
    assert not pool.is_private(page)


def test_too_few_free_pages_take_nothing() -> None:
    pool = PagePool(3)
    pool.allocate(1)
    with pytest.raises(OutOfPages, match="3 pages of 16 tokens are needed, 2 are free"):
        pool.allocate(3)
    assert counts(pool) == (2, 0, 1)


def test_a_pool_without_pages_is_refused() -> None:
    with pytest.raises(OutOfPages, match="a pool of 0 pages"):
        PagePool(0)


def test_check_notices_an_owner_that_the_count_lacks() -> None:
    pool = PagePool(2)
    pages = pool.allocate(1)
    pool.check([pages], [])
    with pytest.raises(AssertionError, match="counts 1 sequences, 2 live ones own it"):
        pool.check([pages, pages], [])
    with pytest.raises(AssertionError, match="in 1 nodes"):
        pool.check([pages], pages)


def test_pages_that_were_never_taken_have_no_owner() -> None:
    pool = PagePool(1 << 40)
    pages = pool.allocate(2)
    assert pages == [0, 1] and pool.num_free == (1 << 40) - 2
    for page in (2, (1 << 40) - 1):
        assert (pool.num_users(page), pool.ref_count(page)) == (0, 0)
        assert not pool.is_in_tree(page) and not pool.is_private(page)
    pool.check([pages], [])
    pool.release(pages)
    assert pool.allocate(3) == [1, 0, 2], "the page freed last is the warmest"
