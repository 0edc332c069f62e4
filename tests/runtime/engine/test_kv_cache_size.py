"""How many pages an engine takes, and when it refuses."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from radixlm.runtime.artifact.window_layers import WindowLayers
from radixlm.runtime.engine.kv_cache_size import KVCacheSize
from radixlm.runtime.errors import InvalidParameter
from radixlm.runtime.system import available_memory_bytes

PAGE_BYTES = 1000


def choose(
    available_bytes: int = 10**9,
    kv_cache_bytes: int | None = None,
    context: int = 1600,
    model_bytes: int = 100,
    context_length: int | None = None,
    state_bytes: int = 0,
    state_cache_bytes: int | None = None,
    page_bytes: int = PAGE_BYTES,
    window_layers: WindowLayers | None = None,
) -> KVCacheSize:
    module = SimpleNamespace(weights_bytes=model_bytes - 100, workspace_bytes=100, max_num_tokens=64)
    manifest: Any = SimpleNamespace(
        name="fake",
        context_length=context,
        kv=SimpleNamespace(page_bytes=page_bytes),
        module=module,
        model=SimpleNamespace(state_bytes=state_bytes),
    )
    return KVCacheSize.choose(
        manifest,
        kv_cache_bytes=kv_cache_bytes,
        max_num_seqs=4,
        context_length=context_length,
        available_bytes=available_bytes,
        state_cache_bytes=state_cache_bytes,
        window_layers=window_layers,
    )


def test_plenty_of_memory_holds_every_sequences_full_context() -> None:
    assert choose() == KVCacheSize(4 * 100 + 1, 1600)


def test_little_memory_gives_a_quarter() -> None:
    assert choose(available_bytes=800 * PAGE_BYTES) == KVCacheSize(200, 1600)


def test_one_full_context_may_take_up_to_half() -> None:
    assert choose(available_bytes=300 * PAGE_BYTES) == KVCacheSize(101, 1600)
    assert choose(available_bytes=100 * PAGE_BYTES) == KVCacheSize(50, 49 * 16)


def test_given_bytes_are_used_whole() -> None:
    assert choose(kv_cache_bytes=60 * PAGE_BYTES + 1) == KVCacheSize(60, 59 * 16)


@pytest.mark.parametrize("kv_cache_bytes", [-5, 0, PAGE_BYTES, 8 * PAGE_BYTES])
def test_too_little_for_a_small_context_is_refused(kv_cache_bytes: int) -> None:
    with pytest.raises(InvalidParameter, match="9000 bytes are the least"):
        choose(kv_cache_bytes=kv_cache_bytes)
    assert choose(kv_cache_bytes=9 * PAGE_BYTES).context_length == 128


def test_more_than_the_memory_is_refused_with_what_would_do() -> None:
    with pytest.raises(InvalidParameter, match=r"the 3000000 bytes of available memory; lower --kv-cache-gb to 0\.00"):
        choose(available_bytes=3000 * PAGE_BYTES, kv_cache_bytes=3000 * PAGE_BYTES)
    with pytest.raises(InvalidParameter, match=r"lower --kv-cache-gb to 2\.00 or less"):
        choose(available_bytes=5 * 10**9, kv_cache_bytes=2_000_001_000, model_bytes=3 * 10**9)
    budget = choose(available_bytes=5 * 10**9, kv_cache_bytes=2 * 10**9, model_bytes=3 * 10**9)
    assert budget.num_pages == 2 * 10**6


def test_the_model_leaves_less_for_pages() -> None:
    most = choose(available_bytes=1000 * PAGE_BYTES, model_bytes=900 * PAGE_BYTES, context=2000)
    assert most.num_pages == 100
    with pytest.raises(InvalidParameter, match="9000 bytes are the least"):
        choose(available_bytes=1000 * PAGE_BYTES, model_bytes=1001 * PAGE_BYTES)


def test_a_draft_takes_a_quarter_at_most_and_no_more_pages_than_the_model() -> None:
    def of_draft(page_bytes: int, num_pages: int, available_bytes: int = 10**9) -> KVCacheSize:
        module = SimpleNamespace(weights_bytes=1000, workspace_bytes=0)
        model: Any = SimpleNamespace(context_length=1600, kv=SimpleNamespace(page_bytes=PAGE_BYTES), module=module)
        draft: Any = SimpleNamespace(context_length=1200, kv=SimpleNamespace(page_bytes=page_bytes), module=module)
        size = KVCacheSize(num_pages, 1600)
        return KVCacheSize.of_draft(draft, model=model, size=size, available_bytes=available_bytes)

    assert of_draft(PAGE_BYTES, 400) == KVCacheSize(100, 1200)
    assert of_draft(PAGE_BYTES // 10, 400) == KVCacheSize(400, 1200)
    assert of_draft(PAGE_BYTES, 60) == KVCacheSize(15, 14 * 16)
    assert of_draft(PAGE_BYTES, 20) == KVCacheSize(9, 128)  # the least
    with pytest.raises(InvalidParameter, match="the draft's 101000 bytes and the model's 401000 do not fit the 500000"):
        of_draft(PAGE_BYTES, 400, 500_000)


def test_this_machine_has_memory() -> None:
    assert available_memory_bytes() > 1 << 20


def test_a_cache_that_shortens_the_context_says_so_and_how_much_would_not() -> None:
    notice = choose(kv_cache_bytes=60 * PAGE_BYTES).notice
    assert notice is not None and "a KV cache of 60000 bytes holds 944 tokens of the model's context of 1600" in notice
    assert "raise --kv-cache-gb to 0.01" in notice and "--context-length 944" in notice
    by_memory = choose(available_bytes=100 * PAGE_BYTES).notice
    assert by_memory is not None and "half of the 100000 bytes of available memory" in by_memory
    assert choose(kv_cache_bytes=101 * PAGE_BYTES).notice is None


def test_a_context_length_that_is_asked_for_is_given_and_no_more_memory_than_it_needs() -> None:
    asked = choose(context_length=320)
    assert asked == KVCacheSize(4 * 20 + 1, 320) and asked.notice is None
    assert choose(context_length=320, kv_cache_bytes=60 * PAGE_BYTES) == KVCacheSize(60, 320)
    assert choose(context=64, context_length=64).context_length == 64


@pytest.mark.parametrize("context_length", [0, -1, 127, 1601])
def test_a_context_length_that_the_model_does_not_have_is_refused(context_length: int) -> None:
    with pytest.raises(InvalidParameter, match=f"context_length is {context_length}; this artifact allows 128 to 1600"):
        choose(context_length=context_length)


def test_a_context_length_that_the_cache_does_not_hold_is_refused_with_what_would_do() -> None:
    with pytest.raises(
        InvalidParameter, match=r"holds 944 tokens.* and 1200 are asked for; raise --kv-cache-gb to 0.01"
    ):
        choose(kv_cache_bytes=60 * PAGE_BYTES, context_length=1200)


def test_states_have_an_eighth_of_the_memory_or_what_was_asked_for() -> None:
    assert choose().num_state_slots == 0
    assert choose(state_bytes=1000).num_state_slots == 65_536
    assert choose(available_bytes=8 * 10**6, state_bytes=1000).num_state_slots == 1001
    assert choose(state_bytes=1000, state_cache_bytes=7500).num_state_slots == 8
    assert choose(available_bytes=800 * PAGE_BYTES, state_bytes=1000, state_cache_bytes=400_000).num_pages == 101
    with pytest.raises(
        InvalidParameter, match=r"state_cache_bytes is 2999, and fake needs 3 states of 1000 bytes at least"
    ):
        choose(state_bytes=1000, state_cache_bytes=2999)
    with pytest.raises(InvalidParameter, match=r"state_cache_bytes is 9, and fake keeps no states"):
        choose(state_cache_bytes=9)


HALF = WindowLayers(128, tuple((50_000 * layer, 50_000) for layer in range(10)))  # of pages of a million bytes
ALL = WindowLayers(128, tuple((100_000 * layer, 100_000) for layer in range(10)))


@given(
    kv_cache_pages=st.integers(9, 500),
    size=st.sampled_from((3_000, 50_000, 99_000, 100_000)),
    context=st.sampled_from((160, 1600, 16_000)),
    window=st.sampled_from((16, 128, 1024)),
)
def test_rows_of_windows_for_a_part_of_the_pages_take_no_more_memory(
    kv_cache_pages: int, size: int, context: int, window: int
) -> None:
    layers = WindowLayers(window, tuple((size * layer, size) for layer in range(10)))
    sizes = {"kv_cache_bytes": kv_cache_pages * 10**6, "page_bytes": 10**6, "available_bytes": 10**10}
    whole, some = choose(**sizes, context=context), choose(**sizes, context=context, window_layers=layers)
    assert some.context_length >= whole.context_length
    if some.notice is not None:
        enough = float(re.findall("raise --kv-cache-gb to ([0-9.]+)", some.notice)[0]) * 1e9
        more = choose(**{**sizes, "kv_cache_bytes": round(enough)}, context=context, window_layers=layers)
        assert more.context_length == context
    if (num_windows := some.num_window_pages) is None:
        assert some == whole
        return
    assert whole.num_pages < some.num_pages <= 4 * context // 16 + 1
    system_pages = 10 * 4096  # of a run of pages of whatever length; runs are of several
    assert some.num_pages * (10**6 - 10 * size) + num_windows * (10 * size + system_pages) <= kv_cache_pages * 10**6
    assert num_windows >= some.num_pages // 4
    assert num_windows * 16 >= 4 * window + 64, "all four sequences fit"


def test_pages_that_hold_everything_are_whole() -> None:
    sizes = {"page_bytes": 10**6, "available_bytes": 10**10, "window_layers": HALF}
    assert choose(**sizes, kv_cache_bytes=401 * 10**6) == KVCacheSize(401, 1600)
    assert choose(**sizes, kv_cache_bytes=400 * 10**6).num_window_pages is not None
    assert choose(**sizes) == KVCacheSize(401, 1600)


def test_rows_of_windows_for_a_part_of_the_pages_make_room_for_longer_contexts() -> None:
    sizes = {"page_bytes": 10**6, "kv_cache_bytes": 100 * 10**6, "available_bytes": 10**9, "context": 16_000}
    assert choose(**sizes) == KVCacheSize(100, 99 * 16)
    assert choose(**sizes, window_layers=HALF) == KVCacheSize(148, 147 * 16, num_window_pages=48)
    assert choose(**sizes, window_layers=ALL) == KVCacheSize(384, 383 * 16, num_window_pages=96)
