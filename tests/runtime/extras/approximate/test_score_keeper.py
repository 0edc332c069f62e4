"""Nodes of the prefix tree are named as the disk names them, and no page is hashed for each node after it."""

from __future__ import annotations

from typing import Any

import pytest
from radixlm.runtime.cache.page_pool import PagePool
from radixlm.runtime.cache.prefix_cache import PrefixCache
from radixlm.runtime.extras.approximate.score_keeper import page_keys_of
from radixlm.runtime.store import NO_PARENT, PageKey, StoreIdentity

IDENTITY = StoreIdentity("model", "tokenizer", "q4", "f16", 8)


def test_the_pages_of_all_nodes_of_a_prompt_are_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, ids = PrefixCache(PagePool(40)), [number // 16 for number in range(40 * 16)]
    generated = bytes(token_id % 2 for token_id in ids)
    pages = cache.pool.allocate(40)
    cache.tree.insert_after(b"a", None, 0, ids, pages, generated)
    for num_pages in (30, 20, 10):  # four nodes
        cache.tree.touch(pages[:num_pages])
    expected, parent_key = [], NO_PARENT
    for at in range(0, len(ids), 16):
        expected.append(PageKey.of(IDENTITY, b"a", parent_key, ids[at : at + 16], generated[at : at + 16]))
        parent_key = expected[-1].key
    calls, of = [], PageKey.of

    def counted(*args: Any) -> PageKey:
        calls.append(args)
        return of(*args)

    monkeypatch.setattr(PageKey, "of", counted)
    for page in pages[::-10]:
        node = cache.tree.node_of(page)
        assert node is not None and page_keys_of(IDENTITY, node) == expected[node.start : node.start + 10]
    assert len(calls) == 40
