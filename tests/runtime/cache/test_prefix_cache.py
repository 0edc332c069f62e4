"""What was computed once is found again, by live and later requests; the oldest makes room for the new."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from radixlm.runtime.cache.eviction import LeafQueue
from radixlm.runtime.cache.page_pool import PagePool
from radixlm.runtime.cache.prefix_cache import PrefixCache
from radixlm.runtime.cache.prefix_match import PartialPage, PrefixMatch
from radixlm.runtime.cache.radix_node import Node
from radixlm.runtime.cache.sequence import Sequence
from radixlm.runtime.cache.why_not_more import WhyNotMore
from radixlm.runtime.errors import EmptyPrompt
from radixlm.runtime.model.batch import PageCopy

CONTEXT_LENGTH = 2048


def opened(cache: PrefixCache, prompt: list[int], namespace: bytes = b"") -> Sequence:
    return cache.open(cache.match(prompt, namespace=namespace), context_length=CONTEXT_LENGTH)


def compute(cache: PrefixCache, sequence: Sequence) -> list[PageCopy]:
    with cache.begin() as transaction:
        copies = list(transaction.reserve(sequence, sequence.num_uncomputed).copies)
        transaction.commit()
    cache.check()
    return copies


def serve(cache: PrefixCache, prompt: list[int], reply: tuple[int, ...] = (), namespace: bytes = b"") -> int:
    """A request from prompt to end; how many tokens it reused."""
    sequence = opened(cache, prompt, namespace)
    num_reused = sequence.num_computed
    compute(cache, sequence)
    for token in reply:
        sequence.append([token])
        compute(cache, sequence)
    cache.close(sequence)
    cache.check()
    return num_reused


def conversation(which: int, num_tokens: int = 32) -> list[int]:
    """Tokens that no other conversation begins with."""
    return [1000 * which + index for index in range(num_tokens)]


def is_cached(cache: PrefixCache, which: int) -> bool:
    return cache.match([*conversation(which), 7]).num_tokens == 32


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(EmptyPrompt):
        PrefixCache(PagePool(1)).match([])


def test_a_prompts_last_token_is_always_computed() -> None:
    cache = PrefixCache(PagePool(8))
    prompt = conversation(1, 32)
    serve(cache, prompt)
    match = cache.match(prompt)
    assert (match.num_tokens, len(match.pages)) == (31, 1)
    assert match.partial is not None and match.partial.num_rows == 15
    assert match.why_not_more == WhyNotMore("complete", 31)


def test_the_second_turn_reuses_the_first_with_its_reply_and_the_partial_page() -> None:
    cache = PrefixCache(PagePool(16))
    serve(cache, conversation(1, 37), reply=(1, 2, 3))
    prompt = [*conversation(1, 37), 1, 2, 3, 4, 5]
    match = cache.match(prompt)
    assert match.tokens_by_kind == {"exact": 40}
    assert (len(match.pages), match.num_tokens) == (2, 40)
    sequence = opened(cache, prompt)
    assert match.partial is not None
    (copy,) = compute(cache, sequence)
    assert (copy.src_page, copy.num_rows) == (match.partial.page_id, 8)


def test_a_sampled_token_that_was_not_computed_is_not_reused() -> None:
    cache = PrefixCache(PagePool(16))
    sequence = opened(cache, conversation(1, 20))
    compute(cache, sequence)
    sequence.append([7])
    cache.close(sequence)
    assert cache.match([*conversation(1, 20), 7, 8]).num_tokens == 20


def test_live_sequences_share_full_pages_as_soon_as_they_are_committed() -> None:
    cache = PrefixCache(PagePool(16))
    one = opened(cache, conversation(1, 40))
    compute(cache, one)
    two = opened(cache, conversation(1, 40))
    assert (two.num_computed, list(two.page_ids)) == (32, list(one.page_ids[:2]))
    assert cache.stats().num_in_use_pages == 3


def test_a_waiting_sequence_takes_over_what_another_computed_meanwhile() -> None:
    cache = PrefixCache(PagePool(16))
    one, two = opened(cache, conversation(1, 40)), opened(cache, conversation(1, 40))
    compute(cache, one)
    assert cache.resume(two) == 32
    assert cache.resume(two) == 0
    cache.close(one)
    assert cache.resume(two) == 7, "the tail is in the tree now; the last token is left to compute"
    cache.check()


def test_runs_that_differ_inside_a_page_begin_with_the_same_rows() -> None:
    cache = PrefixCache(PagePool(16))
    prompt = conversation(1, 32)
    serve(cache, prompt)
    other = [*prompt[:21], 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18]
    match = cache.match(other)
    assert (match.num_tokens, len(match.pages), match.partial) == (21, 1, PartialPage(1, 5))
    cached_ids = tuple(range(1021, 1029))
    assert match.why_not_more == WhyNotMore("differs", 21, cached_ids, wanted_ids=(7, 8, 9, 10, 11, 12, 13, 14))
    assert serve(cache, other) == 21
    assert cache.match([*prompt, 0]).num_tokens == 32
    assert cache.match([*other, 0]).num_tokens == 33


def test_the_longest_common_run_of_many_siblings_is_reused() -> None:
    cache = PrefixCache(PagePool(64))
    for which in range(15):
        serve(cache, [5] * which + [100 + which] * 16)
    for which in range(15):
        match = cache.match([5] * which + [100 + which] * 3 + [7])
        assert match.num_tokens == which + 3


def test_a_tail_makes_room_for_the_run_that_goes_on_from_it() -> None:
    cache = PrefixCache(PagePool(16))
    serve(cache, conversation(1, 20))
    serve(cache, conversation(1, 40))
    assert cache.stats().num_cached_pages == 3, "two full pages and one tail; the tail of 4 rows is gone"


def test_namespaces_share_nothing() -> None:
    cache = PrefixCache(PagePool(16))
    serve(cache, conversation(1), namespace=b"alice")
    assert cache.match([*conversation(1), 7], namespace=b"bob").num_tokens == 0
    assert cache.match([*conversation(1), 7], namespace=b"bob").why_not_more.kind == "unseen"
    assert cache.match([*conversation(1), 7], namespace=b"alice").num_tokens == 32


def test_the_match_key_may_end_before_the_prompt_does() -> None:
    cache = PrefixCache(PagePool(16))
    serve(cache, conversation(1, 40))
    match = cache.match([*conversation(1, 40), 7], num_match=20)
    assert (match.num_tokens, match.why_not_more.kind) == (20, "complete")
    assert cache.open(match, context_length=64).num_computed == 20


def test_a_match_that_the_cache_outlived_is_matched_again() -> None:
    cache = PrefixCache(PagePool(4))
    serve(cache, conversation(1))
    match = cache.match([*conversation(1), 7])
    cache.clear()
    serve(cache, conversation(2, 60))
    sequence = cache.open(match, context_length=64)
    assert sequence.num_computed == 0
    cache.check()


def test_why_not_more_tells_evicted_from_never_seen() -> None:
    cache = PrefixCache(PagePool(3))
    serve(cache, conversation(1, 48))
    live = opened(cache, conversation(1, 17))
    serve(cache, conversation(2, 16))
    match = cache.match(conversation(1, 48))
    assert match.why_not_more == WhyNotMore("evicted", 32, wanted_ids=tuple(range(1032, 1040)))
    assert cache.match([*conversation(1, 32), 7, 8]).why_not_more == WhyNotMore("unseen", 32, wanted_ids=(7, 8))
    cache.close(live)


def test_what_was_evicted_is_told_though_another_conversation_begins_with_the_same_rows() -> None:
    system = [7] * 24
    cache = PrefixCache(PagePool(6))
    serve(cache, [*system, *conversation(1, 40)])
    serve(cache, [*system, *conversation(2, 40)])  # takes all pages of the first but those of the system prompt
    serve(cache, [*system, *conversation(3, 40)])
    why = cache.match([*system, *conversation(1, 40)]).why_not_more
    assert (why.kind, why.position) == ("evicted", 24)
    assert cache.match([*system, *conversation(4, 40)]).why_not_more.kind == "differs"
    cache.check()


def test_what_was_evicted_is_said_of_the_place_where_it_was() -> None:
    cache = PrefixCache(PagePool(4))
    serve(cache, conversation(1, 64))
    serve(cache, conversation(2, 16))  # takes the page of 1048..
    serve(cache, [7] * 32)  # takes those of 1016.. and 1032..
    why = cache.match(conversation(1, 64)).why_not_more
    assert why == WhyNotMore("evicted", 16, wanted_ids=tuple(range(1016, 1024)))
    assert cache.match([*conversation(1, 16), 1048, 7]).why_not_more == WhyNotMore("unseen", 16, wanted_ids=(1048, 7))

    cache = PrefixCache(PagePool(5))
    serve(cache, conversation(1, 48))
    serve(cache, conversation(2, 48))  # takes the page of 1032..
    serve(cache, [*conversation(1, 32), *[7] * 16])
    match = cache.match([*conversation(1, 32), *[7] * 16, 1032, 7])
    assert (match.num_tokens, match.why_not_more.kind) == (48, "unseen")


def test_a_run_that_a_client_wrote_counts_as_generated_once_a_model_made_it() -> None:
    cache = PrefixCache(PagePool(16))
    prompt, reply = conversation(1, 10), tuple(range(30))
    serve(cache, [*prompt, *reply])
    assert sum(opened(cache, [*prompt, *reply, 7]).generated) == 0
    serve(cache, prompt, reply)
    assert opened(cache, [*prompt, *reply, 7]).generated == bytes([0] * 10 + [1] * 30 + [0])


def test_rows_of_a_tail_stay_generated_in_the_run_that_takes_its_place() -> None:
    cache = PrefixCache(PagePool(16))
    client = opened(cache, [*conversation(1, 4), 1, 2, *range(50, 70)])
    serve(cache, conversation(1, 4), reply=(1, 2))
    compute(cache, client)
    cache.close(client)
    again = opened(cache, [*conversation(1, 4), 1, 2, *range(50, 71)])
    assert again.generated == bytes([0] * 4 + [1] * 2 + [0] * 21)


def test_generated_runs_are_remembered_when_a_client_sends_them_back() -> None:
    cache = PrefixCache(PagePool(16))
    serve(cache, conversation(1, 30), reply=(1, 2, 3, 4))
    sequence = opened(cache, [*conversation(1, 30), 1, 2, 3, 4, 5, 6])
    assert sequence.generated == bytes([0] * 30 + [1] * 4 + [0] * 2)


def test_a_preempted_sequence_computes_again_what_was_evicted() -> None:
    cache = PrefixCache(PagePool(6))
    sequence = opened(cache, conversation(1, 60))
    compute(cache, sequence)
    cache.preempt(sequence)
    serve(cache, conversation(2, 64))
    assert cache.resume(sequence) == 32
    cache.check()


def test_a_look_does_not_make_a_run_recent() -> None:
    cache = PrefixCache(PagePool(4))
    serve(cache, conversation(1))
    serve(cache, conversation(2))
    assert is_cached(cache, 1)
    serve(cache, conversation(3))
    assert [is_cached(cache, which) for which in (1, 2, 3)] == [False, True, True]


def test_pages_of_live_sequences_are_never_evicted() -> None:
    cache = PrefixCache(PagePool(6))
    live = opened(cache, conversation(1, 40))
    compute(cache, live)
    for which in range(2, 9):
        serve(cache, conversation(which, 48))
    assert cache.clear() == 3
    live.append([7])
    compute(cache, live)
    assert cache.match(conversation(1, 33)).num_tokens == 32


def test_the_unused_end_of_a_run_goes_before_its_used_beginning() -> None:
    cache = PrefixCache(PagePool(6))
    serve(cache, conversation(1, 64))
    serve(cache, [*conversation(1, 16), 7])
    serve(cache, conversation(2, 48))  # one page is free
    assert cache.match([*conversation(1, 64), 7]).num_tokens == 32
    serve(cache, conversation(3, 16))
    assert cache.match([*conversation(1, 64), 7]).num_tokens == 16
    assert cache.match([*conversation(1, 16), 7, 8]).num_tokens == 17


def test_what_a_cancelled_request_used_is_recent_and_the_rest_of_that_run_is_not() -> None:
    cache = PrefixCache(PagePool(6))
    serve(cache, conversation(1, 64))
    serve(cache, conversation(2, 32))
    cache.close(opened(cache, conversation(1, 17)), keep=False)
    serve(cache, conversation(3, 48))
    assert is_cached(cache, 2)
    assert cache.match(conversation(1, 64)).num_tokens == 16
    serve(cache, conversation(4, 32))
    assert not is_cached(cache, 2)
    assert cache.match(conversation(1, 64)).num_tokens == 16


def test_a_tail_that_two_sequences_were_about_to_copy_can_be_superseded() -> None:
    cache = PrefixCache(PagePool(16))
    serve(cache, conversation(1, 20))
    first, second, third = (opened(cache, [*conversation(1, 20), *[which] * 20]) for which in range(3))
    assert len(compute(cache, first)) == 1
    assert len(compute(cache, second)) == 1, "the third still owns the source"
    assert compute(cache, third) == [], "the last one writes after the rows that it found"
    assert [cache.match([*one.token_ids, 9]).num_tokens for one in (first, second, third)] == [32] * 3


@settings(max_examples=50, deadline=None)
@given(uses=st.lists(st.integers(0, 9), min_size=1, max_size=60))
def test_eviction_order_equals_a_list_sorted_by_last_use(uses: list[int]) -> None:
    cache = PrefixCache(PagePool(8))
    order: list[int] = []  # the slow, obvious version: least recently used first
    for which in uses:
        assert (serve(cache, conversation(which)) > 0) == (which in order)
        order = [*(other for other in order if other != which), which]
        held = [other for other in order if cache.match([*conversation(other), 7]).num_tokens > 0]
        assert held == order[len(order) - len(held) :], "a newer one went before an older one"
        order = held


def test_leaves_that_are_used_often_leave_no_stale_heap_behind() -> None:
    leaves = {node_id: Node(node_id, parent=None, start=0) for node_id in range(10)}
    queue = LeafQueue(leaves)
    for now in range(500):
        leaf = leaves[now % 10]
        leaf.last_used = now
        queue.push(leaf)
        assert len(queue) <= 2 * len(leaves) + 65
    assert not queue.missing()
    assert [queue.pop().node_id for _ in leaves] == [*range(10)]


def test_match_reports_the_same_as_open_takes() -> None:
    cache = PrefixCache(PagePool(16))
    serve(cache, conversation(1, 45))
    match: PrefixMatch = cache.match(conversation(1, 60))
    sequence = cache.open(match, context_length=64)
    assert sequence.num_computed == match.num_tokens == 45
    assert tuple(sequence.page_ids[:2]) == match.pages
    stats = cache.stats()
    assert (stats.num_prompt_tokens, stats.num_reused_tokens) == (45 + 60, 45)
