"""What a namespace's owner sees of it and clears of it, and what grows too old: nothing that others have or use."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from radixlm.runtime.artifact.manifest import PAGE_SIZE
from radixlm.runtime.cache import cache_tree
from radixlm.runtime.cache.cache_tree import CachedText, CacheTree
from radixlm.runtime.cache.cache_uses import MAX_ENDED, MAX_NAMESPACES, CacheUse, CacheUses, PageMark, UseState
from radixlm.runtime.cache.page_pool import PagePool
from radixlm.runtime.cache.prefix_cache import PrefixCache
from radixlm.runtime.cache.reply_alias import ReplyAlias
from radixlm.runtime.cache.sequence import Sequence
from radixlm.runtime.engine.background_work import CacheExpiry
from radixlm.runtime.errors import InvalidParameter
from radixlm.runtime.memory import ForgetResult

ALICE, BOB = b"alice", b"bob"
ALIAS = ReplyAlias((1, 2), b" Sure.")


class Clocked:
    """A cache on a clock that stands still unless told."""

    def __init__(self, num_pages: int = 64) -> None:
        self.now = 1000.0
        self.cache = PrefixCache(PagePool(num_pages), clock=lambda: self.now)

    def open(self, prompt: list[int], namespace: bytes = ALICE) -> Sequence:
        sequence = self.cache.open(self.cache.match(prompt, namespace=namespace), context_length=2048)
        self.compute(sequence)
        return sequence

    def compute(self, sequence: Sequence) -> None:
        with self.cache.begin() as transaction:
            transaction.reserve(sequence, sequence.num_uncomputed)
            transaction.commit()

    def serve(self, prompt: list[int], namespace: bytes = ALICE, reply: tuple[int, ...] = ()) -> None:
        sequence = self.open(prompt, namespace)
        for token in reply:
            sequence.append([token])
            self.compute(sequence)
        self.cache.close(sequence)
        self.cache.check()

    def num_cached(self, prompt: list[int], namespace: bytes = ALICE) -> int:
        return self.cache.match([*prompt, 7], namespace=namespace).num_tokens

    def tree(self, namespace: bytes = ALICE, max_runs: int = 100) -> CacheTree:
        return CacheTree.of(self.cache, namespace, self.now, max_runs=max_runs)


def prompt(which: int, num_tokens: int = 32) -> list[int]:
    return [1000 * which + index for index in range(num_tokens)]


def test_a_tree_shows_runs_where_they_go_on_and_how_old_they_are() -> None:
    clocked = Clocked()
    clocked.serve(prompt(1, 32), reply=tuple(range(500, 520)))
    clocked.now += 60
    live = clocked.open([*prompt(1, 32), *prompt(2, 16)])
    clocked.now += 5
    tree = clocked.tree()
    assert (tree.num_runs, tree.num_tokens, tree.num_pages, tree.num_used_pages) == (3 + 1, 32 + 20 + 16, 5, 3)
    assert tree.is_whole and tree.is_counted
    shared, *others = tree.runs
    assert (shared.parent, shared.start, shared.num_tokens, shared.num_users) == (None, 0, 32, 1)
    assert (shared.num_generated, shared.num_children, shared.first_ids) == (0, 2, tuple(prompt(1, 24)))
    by_start = {run.first_ids[0]: run for run in others}
    assert {run.parent for run in (by_start[500], by_start[2000])} == {0}
    assert (by_start[500].num_generated, by_start[500].num_users, by_start[500].unused_s) == (16, 0, 65.0)
    assert (by_start[2000].num_generated, by_start[2000].num_users, by_start[2000].unused_s) == (0, 1, 5.0)
    tail = by_start[516]
    assert tree.runs[tail.parent or 0] is by_start[500] and (tail.start, tail.num_tokens, tail.num_pages) == (48, 4, 1)
    clocked.cache.close(live)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=40), max_size=8))
def test_siblings_say_how_much_they_share_and_each_run_is_read_whole(prompts: list[list[int]]) -> None:
    clocked = Clocked()
    for tokens in prompts:
        clocked.serve([7, *tokens])
    runs = clocked.tree().runs
    whole = [CachedText.of(clocked.cache, ALICE, run.node_id) for run in runs]
    texts = [() if text is None else text.token_ids for text in whole]
    before: dict[int | None, tuple[int, ...]] = {}
    for run, text, tokens in zip(runs, whole, texts, strict=True):
        assert text is not None and (text.start, len(tokens)) == (run.start, run.num_tokens)
        sibling = before.get(run.parent, ())
        differ = (place for place, pair in enumerate(zip(tokens, sibling, strict=False)) if pair[0] != pair[1])
        assert run.num_shared == min(next(differ, len(tokens)), len(sibling), PAGE_SIZE)
        before[run.parent] = tokens
        path = tokens
        while run.parent is not None:
            path, run = (*texts[run.parent], *path), runs[run.parent]
        assert any(tuple([7, *tokens][: len(path)]) == path for tokens in prompts)
    assert CachedText.of(clocked.cache, BOB, runs[0].node_id if runs else 0) is None
    assert CachedText.of(clocked.cache, ALICE, 1 << 40) is None


def test_a_tree_has_its_own_namespace_only() -> None:
    clocked = Clocked()
    clocked.serve(prompt(1), ALICE)
    clocked.cache.aliases.record(BOB, [1], ALIAS)
    assert clocked.tree(BOB) == CacheTree(0, 0, 0, 0, 1, (), is_whole=True, is_counted=True)
    assert (clocked.tree(ALICE).num_tokens, clocked.tree(ALICE).num_aliases) == (32, 0)


def test_a_large_tree_is_cut_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    clocked = Clocked()
    for which in range(20):
        clocked.serve([which] * 16)
    tree = clocked.tree(max_runs=5)
    assert (len(tree.runs), tree.num_runs, tree.num_tokens) == (5, 20, 320)
    assert tree.is_counted and not tree.is_whole
    monkeypatch.setattr(cache_tree, "MAX_RUNS_COUNTED", 7)
    tree = clocked.tree()
    assert (len(tree.runs), tree.num_runs, tree.is_counted, tree.is_whole) == (7, 7, False, False)


def test_clearing_frees_what_no_request_uses_and_nothing_of_another_namespace() -> None:
    clocked = Clocked()
    for namespace in (ALICE, BOB):
        clocked.serve(prompt(1, 40), namespace)
        clocked.serve([*prompt(1, 20), *prompt(3, 30)], namespace)
        clocked.cache.aliases.record(namespace, [1], ALIAS)
    before = clocked.tree(BOB)
    num_pages = clocked.tree(ALICE).num_pages
    assert clocked.cache.forget(ALICE) == ForgetResult(num_pages, 0)
    clocked.cache.check()
    assert clocked.tree(ALICE).num_pages == 0 == clocked.num_cached(prompt(1, 40), ALICE)
    assert clocked.tree(BOB) == before and clocked.num_cached(prompt(1, 40), BOB) == 40
    assert (clocked.tree(ALICE).num_aliases, clocked.tree(BOB).num_aliases) == (0, 1)
    assert clocked.cache.forget(ALICE) == ForgetResult(0, 0)


def test_clearing_keeps_what_a_live_request_uses_and_remembers_nothing_of_the_rest() -> None:
    clocked = Clocked()
    clocked.serve(prompt(1, 64))
    live = clocked.open(prompt(1, 33))
    assert clocked.cache.forget(ALICE) == ForgetResult(2, 2)
    clocked.cache.check()
    assert clocked.cache.match(prompt(1, 64), namespace=ALICE).why_not_more.kind == "unseen", "nor was it evicted"
    clocked.cache.close(live)
    assert clocked.num_cached(prompt(1, 64)) == 33


def test_what_no_request_used_for_long_is_dropped_and_what_is_used_stays() -> None:
    clocked = Clocked()
    clocked.serve(prompt(1, 64))
    live = clocked.open(prompt(2, 40))
    clocked.now += 50
    clocked.serve(prompt(1, 20))
    clocked.now += 50
    assert clocked.cache.drop_unused(clocked.now - 60) == 2, "all past the page that was used again in part"
    clocked.cache.check()
    assert clocked.num_cached(prompt(1, 64)) == 32
    assert clocked.cache.match(prompt(1, 64), namespace=ALICE).why_not_more.kind == "evicted"
    clocked.cache.close(live)
    assert clocked.num_cached(prompt(2, 40)) == 40
    clocked.now += 100
    clocked.cache.drop_unused(clocked.now - 60)
    assert clocked.cache.stats().num_nodes == 0 == clocked.cache.stats().num_cached_pages


def test_aliases_grow_too_old_unless_they_are_used() -> None:
    clocked = Clocked()
    for number in (1, 2, 3, 1):
        clocked.now += 50
        clocked.cache.aliases.record(ALICE, [number], ALIAS)
    clocked.cache.drop_unused(clocked.now - 60)
    assert clocked.tree().num_aliases == 2
    clocked.now += 61
    clocked.cache.drop_unused(clocked.now - 60)
    assert clocked.tree().num_aliases == 0


@pytest.mark.parametrize("seed", range(20))
def test_random_uses_drops_and_clears_leave_what_a_slow_list_says(seed: int) -> None:
    drawn, clocked = random.Random(seed), Clocked(num_pages=400)
    used_at: dict[tuple[bytes, int], float] = {}
    live: list[tuple[tuple[bytes, int], Sequence]] = []
    for _ in range(120):
        clocked.now += drawn.choice((0, 1, 10))
        key = (drawn.choice((ALICE, BOB)), drawn.randrange(6))
        match drawn.randrange(8):
            case 0:
                since = clocked.now - 20
                num_unused = clocked.cache.tree.eviction.num_unused(since)
                assert clocked.cache.drop_unused(since) == num_unused
                used_at = {k: at for k, at in used_at.items() if at >= since or k in dict(live)}
            case 1:
                clocked.cache.clear(key[0])
                used_at = {k: at for k, at in used_at.items() if k[0] != key[0] or k in dict(live)}
            case 2 if key not in dict(live):
                live.append((key, clocked.open(prompt(key[1], 48), key[0])))
                used_at[key] = clocked.now
            case 3 if live:
                ended, sequence = live.pop(drawn.randrange(len(live)))
                clocked.cache.close(sequence)
                used_at[ended] = clocked.now
            case _ if key not in dict(live):
                clocked.serve(prompt(key[1], 48), key[0])
                used_at[key] = clocked.now
        clocked.cache.check()
        for namespace in (ALICE, BOB):
            for which in range(6):
                expected = 48 if (namespace, which) in used_at else 0
                assert clocked.num_cached(prompt(which, 48), namespace) == expected


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("inf"), float("nan")])
def test_a_time_to_live_is_a_number_of_seconds(ttl_s: float) -> None:
    with pytest.raises(InvalidParameter):
        CacheExpiry(ttl_s, clock=lambda: 0.0, drop=print)


def test_expiry_is_checked_ten_times_within_a_time_to_live() -> None:
    now, dropped = [0.0], list[float]()
    expiry = CacheExpiry(100.0, clock=lambda: now[0], drop=dropped.append)
    assert expiry.wait_s == 0.0
    for now[0] in (0.0, 9.0, 10.0, 15.0, 50.0):
        expiry.run()
    assert dropped == [-100.0, -90.0, -50.0]
    assert expiry.wait_s == 10.0


def use_of(name: str, sequence: Sequence | None, now: float, ended_at: float | None = None) -> CacheUse:
    state: UseState = "running" if ended_at is None else "ended"
    mark = None if sequence is None or not sequence.page_ids else PageMark.of(sequence)
    return CacheUse(name, state, 5, {}, 0, now, ended_at, None, None, mark)


def test_a_tree_shows_where_requests_run_and_where_those_that_ended_did() -> None:
    clocked = Clocked()
    uses = clocked.cache.uses
    ended = clocked.open(prompt(1, 40))
    uses.record(ALICE, use_of("ended", ended, 1.0, clocked.now))
    clocked.cache.close(ended)
    short = clocked.open(prompt(9, 5))
    uses.record(ALICE, use_of("short", short, 1.5, clocked.now))
    clocked.cache.close(short)
    uses.record(BOB, use_of("foreign", None, 2.0, clocked.now))
    live = clocked.open([*prompt(1, 32), *prompt(2, 20)])
    tree = CacheTree.of(clocked.cache, ALICE, clocked.now, live=[use_of("live", live, 3.0)])
    assert [use.request_id for use in tree.uses] == ["live", "short", "ended"]
    places = [tree.runs[use.run or 0] for use in tree.uses if use.run is not None]
    assert [(run.start, run.first_ids[0]) for run in places] == [(32, 2000), (0, 9000), (32, 1032)]
    clocked.cache.close(live)


def test_where_a_request_ended_is_not_shown_once_that_is_another_text() -> None:
    clocked = Clocked(num_pages=4)
    sequence = clocked.open(prompt(1, 32))
    clocked.cache.uses.record(ALICE, use_of("first", sequence, 1.0, clocked.now))
    clocked.cache.close(sequence)
    assert [use.run for use in clocked.tree().uses] == [0]
    clocked.serve(prompt(2, 64))  # in all pages that there are
    assert [use.run for use in clocked.tree().uses] == [None]


def test_what_requests_used_is_bounded_and_forgotten_with_what_they_used() -> None:
    clocked = Clocked()
    uses = clocked.cache.uses
    for number in range(MAX_ENDED + 3):
        uses.record(ALICE, use_of(str(number), None, 0.0, clocked.now + number))
    uses.record(BOB, use_of("bob", None, 0.0, clocked.now))
    assert [use.request_id for use in uses.ended(ALICE)][:: MAX_ENDED - 1] == [str(MAX_ENDED + 2), "3"]
    clocked.cache.drop_unused(clocked.now + MAX_ENDED + 1)
    assert [use.request_id for use in uses.ended(ALICE)] == [str(MAX_ENDED + 2), str(MAX_ENDED + 1)]
    assert uses.ended(BOB) == ()
    clocked.cache.clear(BOB)
    assert len(uses.ended(ALICE)) == 2
    clocked.cache.clear(ALICE)
    assert uses.ended(ALICE) == ()
    for number in range(MAX_NAMESPACES + 1):
        uses.record(str(number).encode(), use_of("one", None, 0.0, clocked.now))
    assert (uses.ended(b"0"), len(uses.ended(b"1"))) == ((), 1)


def test_forgetting_old_requests_is_no_use_of_the_others() -> None:
    uses = CacheUses()
    names = [str(number).encode() for number in range(MAX_NAMESPACES)]
    for name in [*names, names[0]]:
        uses.record(name, use_of("a", None, 1.0, 2.0))
    uses.forget_unused(1.0)
    uses.record(b"one too many", use_of("a", None, 1.0, 2.0))
    assert uses.ended(names[0])
    assert not uses.ended(names[1])
