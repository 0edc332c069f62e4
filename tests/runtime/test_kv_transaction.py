"""A step gets all its pages or gives them all back; what others can read is never written."""

from __future__ import annotations

import pytest
from radixlm.runtime.batch import PageCopy
from radixlm.runtime.errors import OutOfPages
from radixlm.runtime.page_pool import PagePool
from radixlm.runtime.prefix_cache import PrefixCache
from radixlm.runtime.sequence import Sequence


def opened(cache: PrefixCache, prompt: range | list[int]) -> Sequence:
    return cache.open(cache.match(prompt), context_length=512)


def compute(cache: PrefixCache, *sequences: Sequence) -> list[PageCopy]:
    with cache.begin() as step:
        for sequence in sequences:
            step.reserve(sequence, sequence.num_uncomputed)
        copies = step.copies
        step.commit()
    cache.check()
    return copies


def test_rollback_returns_every_page() -> None:
    cache = PrefixCache(PagePool(8))
    one, two = opened(cache, range(40)), opened(cache, range(100, 140))
    with cache.begin() as step:
        step.reserve(one, 40)
        step.reserve(two, 20)
        assert cache.pool.num_free == 3
    assert cache.pool.num_free == 8
    assert (one.num_computed, two.num_computed, cache.tree.num_nodes) == (0, 0, 0)
    cache.check()


def test_an_error_inside_a_step_rolls_it_back() -> None:
    cache = PrefixCache(PagePool(8))
    sequence = opened(cache, range(40))
    with pytest.raises(RuntimeError, match="the forward failed"), cache.begin() as step:
        step.reserve(sequence, 40)
        raise RuntimeError("the forward failed")
    assert (cache.pool.num_free, sequence.num_computed) == (8, 0)
    cache.check()


def test_rollback_after_commit_changes_nothing() -> None:
    cache = PrefixCache(PagePool(8))
    sequence = opened(cache, range(40))
    compute(cache, sequence)
    assert (sequence.num_computed, len(sequence.page_ids), cache.pool.num_free) == (40, 3, 5)


def test_too_few_pages_take_and_evict_nothing_and_the_message_says_what_to_do() -> None:
    cache = PrefixCache(PagePool(8))
    finished = opened(cache, range(32))
    compute(cache, finished)
    cache.close(finished)
    one, two = opened(cache, range(100, 150)), opened(cache, range(200, 280))
    with cache.begin() as step:
        step.reserve(one, 50)
        before = cache.stats()
        with pytest.raises(OutOfPages) as refused:
            step.reserve(two, 80)
        assert str(refused.value) == (
            "request needs 5 pages of 16 tokens, 2 are free and 2 can be evicted; "
            "lower --max-num-seqs or raise --kv-cache-gb"
        )
        assert cache.stats() == before
        step.commit()
    cache.check()


def test_a_dropped_reservation_makes_room_for_another() -> None:
    cache = PrefixCache(PagePool(4))
    one, two = opened(cache, range(60)), opened(cache, range(100, 160))
    with cache.begin() as step:
        step.reserve(one, 60)
        with pytest.raises(OutOfPages):
            step.reserve(two, 60)
        step.drop(one)
        step.reserve(two, 60)
        step.commit()
    assert (one.num_computed, two.num_computed) == (0, 60)
    cache.check()


def test_slots_and_tokens_of_a_chunk_follow_the_page_table() -> None:
    cache = PrefixCache(PagePool(8))
    sequence = opened(cache, range(40))
    with cache.begin() as step:
        step.reserve(sequence, 10)
        step.commit()
    with cache.begin() as step:
        chunk = step.reserve(sequence, 20)
        first, second = chunk.page_ids
        assert chunk.token_ids == list(range(10, 30))
        rows = [(first, row) for row in range(10, 16)] + [(second, row) for row in range(14)]
        assert chunk.slots == [page * 16 + row for page, row in rows]
        assert (chunk.start, chunk.stop, chunk.num_tokens, chunk.copies) == (10, 30, 20, ())
        step.commit()
    assert sequence.page_ids == chunk.page_ids


def test_a_page_that_the_tree_holds_is_copied_before_it_is_written_after_a_pop() -> None:
    cache = PrefixCache(PagePool(8))
    sequence = opened(cache, range(32))
    compute(cache, sequence)
    shared = sequence.page_ids[1]
    sequence.pop(6)
    sequence.append([77])
    (copy,) = compute(cache, sequence)
    assert (copy.src_page, copy.num_rows) == (shared, 10)
    assert copy.dst_page == sequence.page_ids[1] != shared
    assert cache.match([*range(32), 5]).num_tokens == 32, "the popped tokens can still be found"


def test_a_partial_page_of_ones_own_is_written_in_place_after_a_pop() -> None:
    cache = PrefixCache(PagePool(8))
    sequence = opened(cache, range(30))
    compute(cache, sequence)
    sequence.pop(4)
    sequence.append([77])
    assert compute(cache, sequence) == []


def test_a_fork_shares_whole_pages_and_copies_the_partial_one() -> None:
    cache = PrefixCache(PagePool(8))
    sequence = opened(cache, range(40))
    compute(cache, sequence)
    child = cache.fork(sequence, 36)
    assert list(child.page_ids) == list(sequence.page_ids)
    child.append([77])
    (copy,) = compute(cache, child)
    assert (copy.src_page, copy.num_rows) == (sequence.page_ids[2], 4)
    assert child.page_ids[:2] == sequence.page_ids[:2]
    sequence.append([78])
    assert compute(cache, sequence) == [], "the page is the parent's alone again"


def test_the_source_of_a_copy_is_kept_until_the_step_is_committed() -> None:
    cache = PrefixCache(PagePool(4))
    finished = opened(cache, range(20))
    compute(cache, finished)
    cache.close(finished)
    sequence = opened(cache, [*range(20), 5])
    other = opened(cache, range(100, 116))
    with cache.begin() as step:
        (copy,) = step.reserve(sequence, 1).copies
        with pytest.raises(OutOfPages, match="2 pages of 16 tokens, 1 are free and 0 can be evicted"):
            other.append([1])
            step.reserve(other, 17)
        assert cache.pool.ref_count(copy.src_page) == 2
        step.commit()
    assert cache.pool.ref_count(copy.src_page) == 1
