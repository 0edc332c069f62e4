"""How many pages an engine takes, and when it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from radixlm.runtime.errors import InvalidParameter
from radixlm.runtime.kv_budget import KVBudget, available_memory_bytes

PAGE_BYTES = 1000


def choose(available_bytes: int = 10**9, kv_cache_bytes: int | None = None, context: int = 1600) -> KVBudget:
    manifest: Any = SimpleNamespace(context_length=context, kv=SimpleNamespace(page_bytes=PAGE_BYTES))
    return KVBudget.choose(
        manifest, kv_cache_bytes=kv_cache_bytes, max_num_seqs=4, available_bytes=available_bytes
    )


def test_plenty_of_memory_holds_every_sequences_full_context() -> None:
    assert choose() == KVBudget(4 * 100 + 1, 1600)


def test_little_memory_gives_a_quarter() -> None:
    assert choose(available_bytes=800 * PAGE_BYTES) == KVBudget(200, 1600)


def test_one_full_context_may_take_up_to_half() -> None:
    assert choose(available_bytes=300 * PAGE_BYTES) == KVBudget(101, 1600)
    assert choose(available_bytes=100 * PAGE_BYTES) == KVBudget(50, 49 * 16)


def test_given_bytes_are_used_whole() -> None:
    assert choose(kv_cache_bytes=60 * PAGE_BYTES + 1) == KVBudget(60, 59 * 16)


@pytest.mark.parametrize("kv_cache_bytes", [-5, 0, PAGE_BYTES, 8 * PAGE_BYTES])
def test_too_little_for_a_small_context_is_refused(kv_cache_bytes: int) -> None:
    with pytest.raises(InvalidParameter, match="9000 bytes are the least"):
        choose(kv_cache_bytes=kv_cache_bytes)
    assert choose(kv_cache_bytes=9 * PAGE_BYTES).context_length == 128


def test_this_machine_has_memory() -> None:
    assert available_memory_bytes() > 1 << 20
