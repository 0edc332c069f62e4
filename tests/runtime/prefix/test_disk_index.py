"""What is on disk is found by its tokens, whatever came and went; and knowing it takes no more than what is there."""

from __future__ import annotations

import time
import tracemalloc
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from radixlm.runtime.cache.page_pool import PagePool
from radixlm.runtime.cache.radix_node import Node
from radixlm.runtime.prefix.disk_index import DiskIndex
from radixlm.runtime.store import NO_PARENT, PageKey, PageStore, StoreIdentity

from ..store.pages import ALICE, BOB, chain, payload

IDENTITY = StoreIdentity("model", "tokenizer", "q4", "f16", 700)
PIECES = st.tuples(st.integers(0, 30), st.integers(1, 5), st.sampled_from((ALICE, BOB)))  # parent, pages, namespace


def tree(pieces: list[tuple[int, int, bytes]]) -> list[list[PageKey]]:
    """Prompts from their first page on, each of which goes on from one before it, or begins anew."""
    prompts: list[list[PageKey]] = []
    for seed, (number, num_pages, namespace) in enumerate(pieces):
        before = prompts[number % len(prompts)] if prompts and number % 4 else []
        before = before[: 1 + number % len(before)] if before else []
        namespace = before[0].namespace if before else namespace
        parent = before[-1].key if before else NO_PARENT
        more = chain(num_pages, seed, namespace=namespace, parent_key=parent, identity=IDENTITY)
        prompts.append([*before, *more])
    return prompts


def token_ids(pages: list[PageKey]) -> list[int]:
    return [token_id for page in pages for token_id in page.token_ids]


@settings(max_examples=100, deadline=None)
@given(
    pieces=st.lists(PIECES, min_size=1, max_size=12),
    moves=st.lists(st.tuples(st.booleans(), st.integers(0, 99), st.integers(0, 99)), max_size=40),
)
def test_pages_are_found_by_their_tokens_whatever_came_and_went(
    pieces: list[tuple[int, int, bytes]], moves: list[tuple[bool, int, int]]
) -> None:
    prompts, index, there = tree(pieces), DiskIndex(1000, clock=time.monotonic), set[bytes]()
    for adds, number, at in moves:
        prompt = prompts[number % len(prompts)]
        if adds:  # perhaps without the first pages, so that nobody could find it
            some = prompt[at % 2 * at % len(prompt) :]
            index.add(some)
            for page in some:
                if page.parent_key == NO_PARENT or page.parent_key in there:
                    there.add(page.key)
        else:
            key = prompt[at % len(prompt)].key
            gone = {key} & there
            while more := {p.key for each in prompts for p in each if p.parent_key in gone} & there - gone:
                gone |= more
            assert sorted(index.remove([key])) == sorted(gone)
            there -= gone
        index.check()
        assert len(index) == len(there)
    for prompt in prompts:
        found = [page.key for page in prompt if page.key in there]
        assert index.keys(prompt[0].namespace, token_ids(prompt)) == found
        assert all(key in index for key in found)


@settings(max_examples=30, deadline=None)
@given(pieces=st.lists(PIECES, min_size=1, max_size=8))
def test_the_pages_of_a_prompt_are_listed_one_after_the_other(
    pieces: list[tuple[int, int, bytes]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    prompts = tree(pieces)
    with PageStore.open(tmp_path_factory.mktemp("store"), IDENTITY, max_bytes=10_000_000) as store:
        for prompt in prompts:
            store.put(prompt, payload(prompt, IDENTITY.page_bytes))
        listed = list(store.page_keys())
    assert {page.key for page in listed} == {page.key for prompt in prompts for page in prompt}
    parents = {page.parent_key for page in listed}
    num_ends = sum(page.key not in parents for page in listed)
    num_breaks = sum(page.parent_key != before.key for before, page in pairwise(listed))
    assert num_breaks == num_ends - 1


@pytest.mark.parametrize("num_prompts", [2, 20])
def test_a_start_and_each_portion_of_a_prompt_look_at_no_page_before_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_prompts: int
) -> None:
    def no_path(node: Node) -> None:
        raise AssertionError("the pages before a run are looked at")

    trunk = chain(40, identity=IDENTITY)
    prompts = [chain(20, seed, parent_key=trunk[-1].key, identity=IDENTITY) for seed in range(1, num_prompts)]
    with PageStore.open(tmp_path, IDENTITY, max_bytes=10_000_000) as store:
        for page_keys in (trunk, *prompts):
            store.put(page_keys, payload(page_keys, IDENTITY.page_bytes))
        listed = list(store.page_keys())
    monkeypatch.setattr(Node, "path", no_path)
    monkeypatch.setattr(Node, "nearest", no_path)
    for portion in (len(listed), 7):
        index = DiskIndex(10_000, clock=time.monotonic)
        for first in range(0, len(listed), portion):
            index.add(listed[first : first + portion])
        index.check()
        assert len(index) == len(listed)
        assert index.cache.tree.num_nodes == (1 if num_prompts == 2 else num_prompts)


def num_bytes(num_records: int, num_pages: int) -> int:
    """Bytes that an index takes with so many pages, and room for `num_records` of them."""
    page_keys = chain(num_pages, identity=IDENTITY)
    tracemalloc.start()
    try:
        index = DiskIndex(num_records, num_states=num_records, clock=time.monotonic)
        index.add(page_keys)
        return tracemalloc.get_traced_memory()[1] + len(index) - num_pages
    finally:
        tracemalloc.stop()


def test_an_index_takes_memory_for_the_pages_that_are_there() -> None:
    assert num_bytes(6_000_000, 0) < 100_000
    assert num_bytes(6_000_000, 1000) - num_bytes(1001, 1000) < 10_000
    assert num_bytes(6_000_000, 4000) < 5 * num_bytes(6_000_000, 1000)


def test_looking_for_what_was_not_used_looks_at_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    now, looks = [0.0], list[int]()
    index = DiskIndex(1000, clock=lambda: now[0])
    old, new = (chain(20, seed, identity=IDENTITY) for seed in range(2))
    index.add(old)
    now[0] = 10.0
    index.add(new)
    is_in_tree = PagePool.is_in_tree
    monkeypatch.setattr(PagePool, "is_in_tree", lambda pool, page: looks.append(page) or is_in_tree(pool, page))
    assert index.drop_unused(0.0) == [] and looks == []
    assert sorted(index.drop_unused(5.0)) == sorted(page.key for page in old)
    assert len(index) == 20
