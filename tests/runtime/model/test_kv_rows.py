"""Pages taken apart and put together again are the same bits, in whatever order their rows lay in between."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from radixlm.runtime.artifact.manifest import PAGE_SIZE, KVDType, KVLayout
from radixlm.runtime.errors import EngineError
from radixlm.runtime.model.kv_rows import KVRows, inverse_order

LAYOUTS = st.builds(
    KVLayout.uniform,
    dtype=st.sampled_from(["f16", "f32", "k12v8"]),
    num_layers=st.integers(1, 3),
    num_kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([2, 6, 16, 20]),
)


def layout_of(dtype: KVDType) -> KVLayout:
    return KVLayout.uniform(dtype, num_layers=2, num_kv_heads=3, head_dim=6)


def random_pages(layout: KVLayout, num_pages: int, seed: int) -> np.ndarray:
    """Any bits, NaNs too, but for what no row owns, which is zero."""
    rng = np.random.default_rng(seed)
    pages = rng.integers(0, 256, (num_pages, layout.page_bytes), np.uint8)
    each, start = layout.of_layer(0), layout.num_scale_items
    if each.has_codes:
        values = parts_of(layout, pages)[1][..., start:]
        values.reshape(*values.shape[:3], PAGE_SIZE // 4, each.value_columns, 4)[..., layout.head_dim :, :] = 0
    return pages


def parts_of(layout: KVLayout, pages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Views of the bytes of keys and values, each `[pages, layers, kv_heads, bytes]`."""
    each, size = layout.of_layer(0), layout.itemsize
    layers = pages.reshape(len(pages), layout.num_layers, each.page_items * size)
    parts = np.split(layers, [layout.num_kv_heads * each.key_items * size], axis=-1)
    sizes = each.key_items * size, each.value_items * size
    keys, values = (part.reshape(*part.shape[:2], layout.num_kv_heads, n) for part, n in zip(parts, sizes, strict=True))
    return keys, values


def random_order(layout: KVLayout, num_tokens: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.random((layout.num_layers, layout.num_kv_heads, num_tokens)).argsort(axis=-1)


@given(layout=LAYOUTS, num_pages=st.integers(0, 4), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_rows_in_any_order_come_back_as_the_same_bits(layout: KVLayout, num_pages: int, seed: int) -> None:
    pages = random_pages(layout, num_pages, seed)
    rows = KVRows.of_pages(layout, pages)
    assert (rows.to_pages() == pages).all()
    order = random_order(layout, rows.num_tokens, seed)
    moved = KVRows.of_pages(layout, rows.take(order).to_pages())
    assert (moved.take(inverse_order(order)).to_pages() == pages).all()


@given(layout=LAYOUTS, num_pages=st.integers(1, 4), share=st.floats(0, 1), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_pages_of_parts_are_those_of_all_their_rows(layout: KVLayout, num_pages: int, share: float, seed: int) -> None:
    rows = KVRows.of_pages(layout, random_pages(layout, num_pages, seed))
    order = random_order(layout, rows.num_tokens, seed)
    num_first = int(share * rows.num_tokens)
    parts = [rows.take(order[..., :num_first]), rows.take(order[..., num_first:])]
    some = random_order(layout, rows.num_tokens, seed + 1)[..., :num_first]
    assert (KVRows.pages_of(parts, some) == KVRows.joined(parts).take(some).to_pages()).all()


@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_a_row_is_what_the_layout_says(dtype: KVDType) -> None:
    layout = layout_of(dtype)
    pages = random_pages(layout, 2, 1)
    rows = KVRows.of_pages(layout, pages, 21)
    assert rows.num_tokens == 21
    heads = pages.view(rows.items.dtype).reshape(2, layout.num_layers, 2, layout.num_kv_heads, layout.head_items)
    for token, layer, head in ((0, 0, 0), (15, 1, 2), (16, 1, 0), (20, 0, 1)):
        page, row = divmod(token, PAGE_SIZE)
        keys, values = heads[page, layer, :, head]
        key = keys.reshape(6, PAGE_SIZE)[:, row]
        value = values.reshape(PAGE_SIZE, 6)[row]
        assert rows.items[0, layer, head, token].tobytes() == key.tobytes()
        assert rows.items[1, layer, head, token].tobytes() == value.tobytes()


def test_a_row_of_k12v8_is_what_the_layout_says() -> None:
    """Keys in pairs of numbers, values in fours of tokens and in 16 columns."""
    layout = layout_of("k12v8")
    pages = random_pages(layout, 2, 1)
    rows = KVRows.of_pages(layout, pages, 21)
    assert rows.scales is not None
    keys, values = parts_of(layout, pages)
    for token, layer, head in ((0, 0, 0), (15, 1, 2), (16, 1, 0), (20, 0, 1)):
        page, row = divmod(token, PAGE_SIZE)
        key, value = (part[page, layer, head] for part in (keys, values))
        for d in range(6):
            pair = key[64:].view(np.int16)[d // 2 * 32 + row * 2 + d % 2]
            assert rows.items[0, layer, head, token, d] == pair
            assert rows.items[1, layer, head, token, d] == value[64:].view(np.int8)[(row // 4 * 16 + d) * 4 + row % 4]
        for number, part in enumerate((key, value)):
            assert rows.scales[number, layer, head, token].tobytes() == part[4 * row : 4 * row + 4].tobytes()


@pytest.mark.parametrize("dtype", ["f16", "f32", "k12v8"])
def test_chosen_rows_fill_pages_from_the_front_and_zeros_follow(dtype: KVDType) -> None:
    layout = layout_of(dtype)
    rows = KVRows.of_pages(layout, random_pages(layout, 3, 2))
    order = random_order(layout, 48, 3)[:, :, :20]
    chosen = rows.take(order)
    whole = KVRows.of_pages(layout, chosen.to_pages())
    assert whole.num_tokens == 32
    for layer, head, i in ((0, 0, 0), (1, 2, 19), (1, 0, 16)):
        taken = rows.items[:, layer, head, order[layer, head, i]]
        assert whole.items[:, layer, head, i].tobytes() == taken.tobytes()
    assert not whole.items[:, :, :, 20:].any()
    assert whole.scales is None or not whole.scales[..., 20:].any()


def test_keys_are_codes_times_scales() -> None:
    layout = layout_of("k12v8")
    items = np.arange(2 * 2 * 3 * 4 * 6).reshape(2, 2, 3, 4, 6).astype(np.int16)
    scales = np.linspace(0.5, 1, 2 * 2 * 3 * 4, dtype=np.float32).reshape(2, 2, 3, 4)
    keys = KVRows(layout, items, scales).keys_of(2)
    assert keys.shape == (2, 4, 6)
    assert keys[1, 3, 5] == np.float32(items[0, 1, 2, 3, 5]) * scales[0, 1, 2, 3]


def test_what_does_not_fit_is_refused() -> None:
    layout = layout_of("f16")
    pages = random_pages(layout, 2, 4)
    rows = KVRows.of_pages(layout, pages)
    for wrong in (pages[:, :-2], pages.view(np.int8), pages[0]):
        with pytest.raises(EngineError, match=f"{layout.page_bytes}"):
            KVRows.of_pages(layout, wrong)
    with pytest.raises(EngineError, match="33 rows are wanted of 2 pages"):
        KVRows.of_pages(layout, pages, 33)
    with pytest.raises(EngineError, match=r"rows 0\.\.32 of 32"):
        rows.take(np.full((2, 3, 2), [0, 32]))
    with pytest.raises(EngineError, match=r"rows -1\.\.0"):
        rows.take(np.full((2, 3, 2), [0, -1]))
    with pytest.raises(EngineError, match=r"the order is \(2, 3\)"):
        rows.take(np.zeros((2, 3), int))
