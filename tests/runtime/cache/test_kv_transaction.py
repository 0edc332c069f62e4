"""A step gets all its pages or gives them all back; what others can read is never written."""

from __future__ import annotations

import pytest
from radixlm.runtime.cache.page_pool import PagePool
from radixlm.runtime.cache.prefix_cache import PrefixCache
from radixlm.runtime.cache.sequence import Sequence
from radixlm.runtime.cache.sparse_span import SparseSpan
from radixlm.runtime.errors import OutOfPages, SparseSpanError
from radixlm.runtime.model.batch import PageCopy, make_batch, slots_of


def opened(cache: PrefixCache, prompt: range | list[int]) -> Sequence:
    return cache.open(cache.match(prompt), context_length=512)


def compute(cache: PrefixCache, *sequences: Sequence) -> list[PageCopy]:
    with cache.begin() as transaction:
        for sequence in sequences:
            transaction.reserve(sequence, sequence.num_uncomputed)
        copies = transaction.copies
        transaction.commit()
    cache.check()
    return copies


def test_rollback_returns_every_page() -> None:
    cache = PrefixCache(PagePool(8))
    one, two = opened(cache, range(40)), opened(cache, range(100, 140))
    with cache.begin() as transaction:
        transaction.reserve(one, 40)
        transaction.reserve(two, 20)
        assert cache.pool.num_free == 3
    assert cache.pool.num_free == 8
    assert (one.num_computed, two.num_computed, cache.tree.num_nodes) == (0, 0, 0)
    cache.check()


def test_an_error_inside_a_step_rolls_it_back() -> None:
    cache = PrefixCache(PagePool(8))
    sequence = opened(cache, range(40))
    with pytest.raises(RuntimeError, match="the forward failed"), cache.begin() as transaction:
        transaction.reserve(sequence, 40)
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
    with cache.begin() as transaction:
        transaction.reserve(one, 50)
        before = cache.stats()
        with pytest.raises(OutOfPages) as refused:
            transaction.reserve(two, 80)
        assert str(refused.value) == (
            "request needs 5 pages of 16 tokens, 2 are free and 2 can be evicted; "
            "lower --max-num-seqs or raise --kv-cache-gb"
        )
        assert cache.stats() == before
        transaction.commit()
    cache.check()


def test_a_dropped_reservation_makes_room_for_another() -> None:
    cache = PrefixCache(PagePool(4))
    one, two = opened(cache, range(60)), opened(cache, range(100, 160))
    with cache.begin() as transaction:
        transaction.reserve(one, 60)
        with pytest.raises(OutOfPages):
            transaction.reserve(two, 60)
        transaction.drop(one)
        transaction.reserve(two, 60)
        transaction.commit()
    assert (one.num_computed, two.num_computed) == (0, 60)
    cache.check()


def test_slots_and_tokens_of_a_chunk_follow_the_page_table() -> None:
    cache = PrefixCache(PagePool(8))
    sequence = opened(cache, range(40))
    with cache.begin() as transaction:
        transaction.reserve(sequence, 10)
        transaction.commit()
    with cache.begin() as transaction:
        chunk = transaction.reserve(sequence, 20)
        first, second = chunk.page_ids
        assert chunk.token_ids == list(range(10, 30))
        rows = [(first, row) for row in range(10, 16)] + [(second, row) for row in range(14)]
        assert slots_of(chunk.page_ids, chunk.rows) == [page * 16 + row for page, row in rows]
        assert (chunk.start, chunk.stop, chunk.num_tokens, chunk.copies) == (10, 30, 20, ())
        transaction.commit()
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


def test_what_a_parent_may_take_back_is_not_shared_by_its_child_either() -> None:
    cache = PrefixCache(PagePool(8))
    sequence = opened(cache, range(40))
    cache.settle(sequence, 8)
    compute(cache, sequence)
    child = cache.fork(sequence, 33)
    child.append([77] * 20)
    compute(cache, child)
    cache.check()
    cache.settle(child, None)
    cache.check()
    assert cache.tree.find(b"", range(33)).num_tokens >= 32


def test_the_source_of_a_copy_is_kept_until_the_step_is_committed() -> None:
    cache = PrefixCache(PagePool(4))
    finished = opened(cache, range(20))
    compute(cache, finished)
    cache.close(finished)
    sequence = opened(cache, [*range(20), 5])
    other = opened(cache, range(100, 116))
    with cache.begin() as transaction:
        (copy,) = transaction.reserve(sequence, 1).copies
        with pytest.raises(OutOfPages, match="2 pages of 16 tokens, 1 are free and 0 can be evicted"):
            other.append([1])
            transaction.reserve(other, 17)
        assert cache.pool.ref_count(copy.src_page) == 2
        transaction.commit()
    assert cache.pool.ref_count(copy.src_page) == 1


def test_tokens_after_a_pruned_prefix_keep_their_positions_and_lie_right_behind_its_rows() -> None:
    cache = PrefixCache(PagePool(8))
    exact, match = opened(cache, range(100, 103)), cache.match(range(60))
    sequence = cache.open(match, sparse=SparseSpan(0, 13, tuple(range(50))), context_length=512)
    (first,) = sequence.page_ids
    with cache.begin() as transaction:
        chunk, other = transaction.reserve(sequence, 5), transaction.reserve(exact, 3)
        (second,) = chunk.new_page_ids
        slots = [first * 16 + 13, first * 16 + 14, first * 16 + 15, second * 16, second * 16 + 1]
        assert (chunk.start, chunk.stop, chunk.num_pages) == (50, 55, 2)
        arrays = make_batch([chunk, other], [True, True]).arrays
        transaction.commit()
    assert arrays.token_ids.tolist() == [*range(50, 55), *range(100, 103)]
    assert arrays.positions.tolist() == [*range(50, 55), *range(3)]
    assert arrays.kv_lengths.tolist() == [*range(14, 19), *range(1, 4)]
    assert arrays.slots.tolist() == [*slots, *(other.new_page_ids[0] * 16 + row for row in range(3))]
    assert arrays.page_table.tolist() == [[first, second], [other.new_page_ids[0], 0]]
    assert arrays.logit_rows.tolist() == [4, 7]
    assert (sequence.num_computed, sequence.num_rows) == (55, 18)
    cache.check()


def test_a_fork_of_a_pruned_sequence_copies_the_rows_of_the_page_that_both_write_to() -> None:
    cache = PrefixCache(PagePool(8))
    sequence = cache.open(cache.match(range(60)), sparse=SparseSpan(0, 20, tuple(range(50))), context_length=512)
    child = cache.fork(sequence, 50)
    child.append([77])
    (copy,) = compute(cache, child)
    assert (copy.src_page, copy.num_rows) == (sequence.page_ids[1], 4)
    assert compute(cache, sequence) == [], "the page is the parent's alone again"
    assert child.page_ids[0] == sequence.page_ids[0] and child.page_ids[1] != sequence.page_ids[1]


def test_pages_for_the_rows_of_a_pruned_prefix_are_all_taken_or_none() -> None:
    cache = PrefixCache(PagePool(4))
    finished = opened(cache, range(48))
    compute(cache, finished)
    cache.close(finished)
    match, before = cache.match([*range(16), *range(200, 300)]), cache.stats()
    token_ids = match.prompt_ids[:100]
    with pytest.raises(OutOfPages, match="request needs 4 pages of 16 tokens, 1 are free and 2 can be evicted"):
        cache.open(match, sparse=SparseSpan(16, 49, token_ids), context_length=512)
    assert cache.stats() == before and cache.match(range(60)).num_tokens == 48
    sequence = cache.open(match, sparse=SparseSpan(16, 48, token_ids), context_length=512)
    assert (cache.pool.num_free, cache.pool.num_cached, len(sequence.page_ids)) == (0, 0, 4)
    cache.check()


def test_a_pruned_prefix_of_another_prompt_or_without_what_is_before_it_opens_nothing() -> None:
    cache = PrefixCache(PagePool(8))
    compute(cache, opened(cache, range(20)))
    match, before = cache.match(range(60)), cache.stats()
    for pruned, message in (
        (SparseSpan(0, 8, (*range(30), 7)), "31 tokens, and not the first of the 59"),
        (SparseSpan(0, 8, tuple(range(60))), "60 tokens, and not the first of the 59"),
        (SparseSpan(32, 8, tuple(range(50))), "goes on from 32 tokens, 16 are cached"),
    ):
        with pytest.raises(SparseSpanError, match=message):
            cache.open(match, sparse=pruned, context_length=512)
        assert cache.stats() == before
        cache.check()
