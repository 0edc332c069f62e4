"""A sequence validates before it changes anything: a refused call leaves all as it was."""

from __future__ import annotations

import pytest
from radixlm.runtime.cache.page_pool import PagePool
from radixlm.runtime.cache.prefix_cache import PrefixCache
from radixlm.runtime.cache.sequence import Sequence
from radixlm.runtime.cache.sparse_span import SparseSpan
from radixlm.runtime.errors import (
    AppendLengthError,
    ForkLengthError,
    PopLengthError,
    SparseForkError,
    SparseSpanError,
    UnknownSequence,
)

State = tuple[list[int], list[int], int, int]


def computed_sequence(cache: PrefixCache, num_tokens: int, context_length: int = 512) -> Sequence:
    """A sequence with the KV of all its tokens."""
    sequence = cache.open(cache.match(range(num_tokens)), context_length=context_length)
    with cache.begin() as transaction:
        transaction.reserve(sequence, num_tokens)
        transaction.commit()
    return sequence


def state(cache: PrefixCache, sequence: Sequence) -> State:
    cache.check()
    return list(sequence.token_ids), list(sequence.page_ids), sequence.num_computed, cache.pool.num_free


def test_pop_of_304_from_202_is_refused_and_changes_nothing() -> None:
    cache = PrefixCache(PagePool(32))
    sequence = computed_sequence(cache, 202)
    before = state(cache, sequence)
    with pytest.raises(PopLengthError, match="has 202 tokens, cannot pop 304") as refused:
        sequence.pop(304)
    assert (refused.value.length, refused.value.pop) == (202, 304)
    assert state(cache, sequence) == before


def test_a_negative_pop_is_refused() -> None:
    cache = PrefixCache(PagePool(4))
    sequence = computed_sequence(cache, 20)
    with pytest.raises(PopLengthError):
        sequence.pop(-1)
    assert len(sequence) == 20


def test_fork_past_the_computed_tokens_is_refused_and_changes_nothing() -> None:
    cache = PrefixCache(PagePool(32))
    sequence = computed_sequence(cache, 40)
    sequence.append([7])
    before = state(cache, sequence)
    with pytest.raises(ForkLengthError, match="has 40 computed tokens, cannot fork at 41"):
        cache.fork(sequence, 41)
    assert state(cache, sequence) == before
    assert cache.stats().num_sequences == 1


def test_append_past_the_context_is_refused_and_changes_nothing() -> None:
    cache = PrefixCache(PagePool(32))
    sequence = computed_sequence(cache, 40, context_length=41)
    before = state(cache, sequence)
    with pytest.raises(AppendLengthError, match="40 tokens, 2 more pass the context length of 41"):
        sequence.append([1, 2])
    assert state(cache, sequence) == before
    sequence.append([1])


def test_a_prompt_past_the_context_opens_nothing() -> None:
    cache = PrefixCache(PagePool(4))
    with pytest.raises(AppendLengthError):
        cache.open(cache.match(range(30)), context_length=29)
    assert cache.stats().num_sequences == 0
    cache.check()


def test_an_unknown_sequence_is_refused() -> None:
    cache, other = PrefixCache(PagePool(4)), PrefixCache(PagePool(4))
    with pytest.raises(UnknownSequence, match="no live sequence has the id 7"):
        cache.sequences.get(7)
    sequence = computed_sequence(cache, 20)
    computed_sequence(other, 20)
    with pytest.raises(UnknownSequence, match="of another cache"):
        other.close(sequence)
    cache.close(sequence)
    for refused in (
        lambda: cache.close(sequence),
        lambda: cache.preempt(sequence),
        lambda: cache.resume(sequence),
        lambda: cache.fork(sequence, 0),
        lambda: cache.begin().reserve(sequence, 1),
        lambda: sequence.append([1]),
        lambda: sequence.pop(0),
    ):
        with pytest.raises(UnknownSequence):
            refused()
    assert list(sequence.token_ids) == list(range(20)), "what a request said can be read after it ended"
    cache.check()
    other.check()


def test_pop_gives_back_the_pages_that_no_token_is_left_in() -> None:
    cache = PrefixCache(PagePool(8))
    sequence = computed_sequence(cache, 40)
    sequence.append([7, 8])
    sequence.pop(1)
    assert (len(sequence), sequence.num_computed, len(sequence.page_ids)) == (41, 40, 3)
    sequence.pop(8)
    assert (len(sequence), sequence.num_computed, len(sequence.page_ids)) == (33, 33, 3)
    sequence.pop(1)
    assert (len(sequence), sequence.num_computed, len(sequence.page_ids)) == (32, 32, 2)
    assert state(cache, sequence)[-1] == 6


def test_generated_tokens_are_told_from_the_clients() -> None:
    cache = PrefixCache(PagePool(8))
    sequence = cache.open(cache.match([1, 2]), context_length=8)
    sequence.append([3])
    sequence.append([4], generated=False)
    assert sequence.generated == bytes([0, 0, 1, 0])
    sequence.pop(1)
    assert sequence.generated == bytes([0, 0, 1])


def pruned_sequence(cache: PrefixCache) -> Sequence:
    """60 tokens: 32 of which are shared and exact, 20 that have 5 rows, and 8 that are computed over those."""
    cache.close(computed_sequence(cache, 32))
    match = cache.match(range(60))
    sequence = cache.open(match, sparse=SparseSpan(32, 5, tuple(range(52))), context_length=512)
    with cache.begin() as transaction:
        transaction.reserve(sequence, 8)
        transaction.commit()
    assert (sequence.num_computed, sequence.num_rows, sequence.num_shareable) == (60, 45, 32)
    assert len(sequence.page_ids) == 3
    return sequence


def test_pops_behind_a_pruned_prefix_keep_its_rows_and_pops_into_it_keep_what_is_exact() -> None:
    cache = PrefixCache(PagePool(8))
    sequence = pruned_sequence(cache)
    sequence.pop(8)
    assert (sequence.num_computed, sequence.num_rows, sequence.sparse is None) == (52, 37, False)
    sequence.pop(1)
    assert (len(sequence), sequence.num_computed, sequence.num_rows, sequence.sparse) == (51, 32, 32, None)
    assert len(sequence.page_ids) == 2
    assert state(cache, sequence)[-1] == 6
    sequence.pop(31)
    assert (len(sequence), sequence.num_computed, len(sequence.page_ids)) == (20, 20, 2)
    cache.check()


def test_a_refused_pop_or_fork_leaves_a_pruned_prefix_as_it_was() -> None:
    cache = PrefixCache(PagePool(8))
    sequence = pruned_sequence(cache)
    before = (*state(cache, sequence), sequence.sparse)
    with pytest.raises(PopLengthError):
        sequence.pop(61)
    with pytest.raises(ForkLengthError, match="has 60 computed tokens, cannot fork at 61"):
        cache.fork(sequence, 61)
    for at in (33, 51):
        with pytest.raises(SparseForkError, match=rf"32 to 52 .* cannot fork at {at}; fork at 0\.\.32, or at 52"):
            cache.fork(sequence, at)
    assert (*state(cache, sequence), sequence.sparse) == before


def test_forks_inherit_a_pruned_prefix_or_are_exact() -> None:
    cache = PrefixCache(PagePool(8))
    sequence = pruned_sequence(cache)
    tainted, exact = cache.fork(sequence, 52), cache.fork(sequence, 32)
    assert (tainted.sparse, tainted.num_rows, list(tainted.page_ids)) == (sequence.sparse, 37, list(sequence.page_ids))
    assert (exact.sparse, exact.num_rows, list(exact.page_ids)) == (None, 32, list(sequence.page_ids[:2]))
    cache.check()


@pytest.mark.parametrize(
    ("start", "num_rows", "stop"), [(8, 4, 32), (-16, 4, 32), (16, 0, 32), (16, 17, 32), (32, 1, 32)]
)
def test_a_pruned_prefix_that_contradicts_itself_is_refused(start: int, num_rows: int, stop: int) -> None:
    with pytest.raises(SparseSpanError, match=str(start)):
        SparseSpan(start, num_rows, tuple(range(stop)))
