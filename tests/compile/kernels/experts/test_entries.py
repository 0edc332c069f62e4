"""Lists of entries against sorting, and matrices of experts against the kernel of one expert alone: every bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from radixlm.compile.codegen.targets import Target
from radixlm.compile.kernels.experts.entries import (
    PLACES,
    SLAB_ENTRIES,
    CombineSpec,
    ExpertLimits,
    ExpertRows,
    RowOrder,
    combine,
    find_slabs,
    spread_rows,
    weigh_rows,
)
from radixlm.compile.kernels.float_linear import float_linear
from radixlm.compile.kernels.integer_linear import integer_linear
from radixlm.compile.kernels.linear import LinearSpec
from radixlm.compile.weights.kinds import BF16, F32, Q4, Q8_MINIMUM, Scales, WeightKind
from radixlm.compile.weights.layout import GROUP
from radixlm.compile.weights.packing import pack
from radixlm.compile.weights.quantization import DTYPES, Weight

from ..harness import built, every_target, runnable
from ..random_weights import random_weight
from ..test_integer_linear import LIMIT, WIDE_LIMIT, Rows

NUM_EXPERTS, TOP_K, NUM_OUTPUTS, NUM_INPUTS = 6, 2, 112, 512
LIMITS = ExpertLimits(NUM_EXPERTS, TOP_K, 400)
Q6_K = WeightKind("q6", Scales(16, nested=True))
Q4_K = WeightKind("q4", Scales(32, "minimum", nested=True))
Q4_ZEROS = WeightKind("q4", Scales(32, "integers"))
Q4_MINIMUM = WeightKind("q4", Scales(64, "minimum"))
MXFP4 = WeightKind("fp4", Scales(32, dtype="e8m0"))
KINDS = (Q8_MINIMUM, Q4_K, Q6_K, Q4_ZEROS, Q4_MINIMUM, MXFP4, BF16)


def chosen_of(num_tokens: int) -> np.ndarray:
    """Expert 4 is every token's first one, expert 2 no token's; the others get one entry, a few and many."""
    second = np.array([0, 1, 1, 1, 3, 3, 3, 3, 3, 5])[np.random.default_rng(0).integers(0, 10, num_tokens)]
    return np.stack([np.full(num_tokens, 4), second], 1).astype(np.int32)


def lists_of(target: Target, chosen: np.ndarray, limits: ExpertLimits = LIMITS) -> np.ndarray:
    lists = np.full(limits.num_ints, -1, np.int32)
    built(target, find_slabs, limits)(chosen, lists, len(chosen))
    return lists


@pytest.mark.parametrize("num_tokens", [1, 2, 9, 63, 64, 65, 400])
@pytest.mark.parametrize("num_experts", [6, 300])
def test_entries_have_places_by_expert_cut_into_slabs_of_about_one_size(num_tokens: int, num_experts: int) -> None:
    limits = replace(LIMITS, num_experts=num_experts)
    chosen = chosen_of(num_tokens)
    if num_experts > 6:
        chosen = np.random.default_rng(1).integers(0, num_experts, chosen.shape).astype(np.int32)
    lists = lists_of(runnable()[0], chosen, limits)
    slabs, flat = lists[1 : 1 + 3 * lists[0]].reshape(-1, 3).tolist(), chosen.reshape(-1)
    entries = lists[1 + 3 * limits.num_slabs :][: limits.num_places]
    places = places_of(lists, limits)
    assert (entries[places[: flat.size]] == np.arange(flat.size)).all() and (places[flat.size :] == -1).all()
    assert np.count_nonzero(entries != -1) == flat.size
    assert entries[entries != -1].tolist() == np.argsort(flat, kind="stable").tolist()
    end, num_found = 0, 0
    for expert, block, count in slabs:
        first = block * PLACES
        assert 0 <= first - end < PLACES and 1 <= count <= SLAB_ENTRIES
        assert (flat[entries[first : first + count]] == expert).all()
        end, num_found = first + count, num_found + count
    assert num_found == flat.size and end <= limits.num_places
    for expert in set(flat.tolist()):
        sizes = [count for e, _, count in slabs if e == expert]
        assert max(sizes) - min(sizes) < 2 * PLACES and len(sizes) == -(-sum(sizes) // SLAB_ENTRIES)


def places_of(lists: np.ndarray, limits: ExpertLimits = LIMITS) -> np.ndarray:
    return lists[1 + 3 * limits.num_slabs + limits.num_places :]


def stacked(kind: WeightKind, rng: np.random.Generator) -> Weight:
    """Matrices of all experts, one below the other."""
    if kind.is_quantized:
        return random_weight(kind, NUM_EXPERTS * NUM_OUTPUTS, NUM_INPUTS, rng)
    numbers = rng.standard_normal((NUM_EXPERTS * NUM_OUTPUTS, NUM_INPUTS))
    return Weight(kind, numbers.astype(DTYPES[kind.codes]))


def part(weight: Weight, rows: slice) -> Weight:
    arrays = ("codes", "scales", "minima", "zeros", "sub_scales", "sub_minima")
    kept = {name: getattr(weight, name)[rows] for name in arrays if getattr(weight, name, None) is not None}
    return replace(weight, **kept)


def run(
    target: Target,
    spec: LinearSpec,
    weight: Weight,
    bias: np.ndarray,
    x: Any,
    y: np.ndarray,
    lists: np.ndarray | None = None,
    orders: tuple[RowOrder, RowOrder] = ("entries", "entries"),
) -> np.ndarray:
    """One kernel on rows of activations: of experts if there are lists."""
    packed, y = pack(weight), y.copy()
    more = () if lists is None else (ExpertRows(LIMITS, *orders),)
    last = len(y) if lists is None else lists
    if isinstance(x, Rows):
        kernel = built(target, integer_linear, spec, target, *more)
        offsets = getattr(packed, "offsets", None)
        kernel(packed.codes, packed.scales, offsets, bias, *x.packed(), y, last)
    else:
        built(target, float_linear, spec, target, NUM_INPUTS, *more)(packed.codes, bias, x, y, last)
    return y


def check(target: Target, kind: WeightKind, wide: bool, orders: tuple[RowOrder, RowOrder], num_tokens: int) -> None:
    rng = np.random.default_rng(num_tokens)
    chosen, weight = chosen_of(num_tokens), stacked(kind, rng)
    lists = lists_of(target, chosen)
    of_entries = np.arange(num_tokens * TOP_K)
    rows_by = {"tokens": of_entries // TOP_K, "entries": of_entries, "places": places_of(lists)[: num_tokens * TOP_K]}
    x_rows, y_rows = (rows_by[order] for order in orders)
    num_rows = int(x_rows.max()) + 1
    spec = LinearSpec(kind, NUM_OUTPUTS, NUM_INPUTS, NUM_OUTPUTS + 32, 16, has_bias=True, wide=wide)
    x: Any = rng.standard_normal((num_rows, NUM_INPUTS)).astype(np.float32)
    if kind.is_quantized:
        limit = WIDE_LIMIT if wide else LIMIT
        codes = rng.integers(-limit, limit + 1, (num_rows, NUM_INPUTS))
        x = Rows(codes, rng.random((num_rows, NUM_INPUTS // GROUP)).astype(np.float32), wide)
    bias = rng.standard_normal(NUM_EXPERTS * NUM_OUTPUTS).astype(np.float32)
    before = rng.standard_normal((int(y_rows.max()) + 1, spec.y_stride)).astype(np.float32)
    found = run(target, spec, weight, bias, x, before, lists, orders)
    for expert in range(NUM_EXPERTS):
        entries = np.flatnonzero(chosen.reshape(-1) == expert)
        if not entries.size:
            continue
        rows = slice(expert * NUM_OUTPUTS, (expert + 1) * NUM_OUTPUTS)
        alone = run(target, spec, part(weight, rows), bias[rows], x[x_rows[entries]], before[y_rows[entries]])
        assert (found[y_rows[entries]] == alone).all(), f"expert {expert}"
    others = np.setdiff1d(np.arange(len(before)), y_rows)
    assert (found[others] == before[others]).all(), "rows at places without an entry"


@every_target
@pytest.mark.parametrize("kind", [Q4, F32], ids=lambda kind: kind.label)
def test_a_row_of_an_expert_is_what_its_matrix_alone_gives(target: Target, kind: WeightKind) -> None:
    for num_tokens in (1, 7, 190):
        check(target, kind, False, ("places", "places"), num_tokens)
    check(target, kind, False, ("tokens", "places"), 33)
    check(target, kind, False, ("entries", "entries"), 33)


@pytest.mark.parametrize(
    "kind", [Q8_MINIMUM, Q4_K, Q6_K, Q4_ZEROS, Q4_MINIMUM, MXFP4, BF16], ids=lambda kind: kind.label
)
@pytest.mark.parametrize("orders", [("tokens", "places"), ("places", "places"), ("entries", "entries")], ids="-".join)
def test_so_it_is_for_other_kinds(kind: WeightKind, orders: tuple[RowOrder, RowOrder]) -> None:
    for num_tokens in (1, 70):
        check(runnable()[0], kind, kind == Q8_MINIMUM, orders, num_tokens)


@every_target
@pytest.mark.parametrize("num_tokens", [1, 3, 70])
def test_quantized_rows_of_tokens_are_spread_to_the_places_of_their_entries(target: Target, num_tokens: int) -> None:
    rng, groups = np.random.default_rng(0), NUM_INPUTS // GROUP
    lists = lists_of(target, chosen_of(num_tokens))
    codes = rng.integers(-LIMIT, LIMIT + 1, (num_tokens, NUM_INPUTS))
    x = Rows(codes, rng.random((num_tokens, groups)).astype(np.float32), False)
    count = int(places_of(lists).max()) + 1
    spread = Rows(np.zeros((count, NUM_INPUTS), np.int64), np.zeros((count, groups), np.float32), False)
    expected = Rows(spread.codes.copy(), spread.scales.copy(), False)
    of_entries = np.arange(num_tokens * TOP_K) // TOP_K
    expected.codes[places_of(lists)[: of_entries.size]] = x.codes[of_entries]
    expected.scales[places_of(lists)[: of_entries.size]] = x.scales[of_entries]
    found = spread.packed()
    built(target, spread_rows, groups, LIMITS)(*x.packed(), lists, *found, of_entries.size)
    for one, other in zip(found, expected.packed(), strict=True):
        np.testing.assert_array_equal(one, other)


@every_target
def test_rows_of_entries_are_weighed_at_their_places(target: Target) -> None:
    rng = np.random.default_rng(0)
    lists, weights = lists_of(target, chosen_of(9)), rng.random(18).astype(np.float32)
    x = rng.standard_normal((int(places_of(lists).max()) + 1, 48)).astype(np.float32)
    expected = x.copy()
    expected[places_of(lists)[:18], :32] *= weights[:, None]
    built(target, weigh_rows, 32, 48, LIMITS)(x, weights, lists, 18)
    assert (x == expected).all()


@every_target
@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "plain"])
def test_outputs_are_added_in_order_of_rank(target: Target, weighted: bool) -> None:
    rng, width, num_tokens = np.random.default_rng(0), 37, 11
    spec = CombineSpec(LIMITS, width, 48, 64, weighted)
    lists = lists_of(target, chosen_of(num_tokens))
    places = places_of(lists)[: num_tokens * TOP_K].reshape(num_tokens, TOP_K)
    y = rng.standard_normal((int(places.max()) + 1, 64)).astype(np.float32)
    weights, x = rng.random((num_tokens, TOP_K)).astype(np.float32), np.full((num_tokens, 48), 7, np.float32)
    built(target, combine, spec, target)(y, weights, lists, x, num_tokens)
    factors = weights.astype(np.float64) if weighted else np.ones((num_tokens, TOP_K))
    expected = (y[places][..., :width] * factors[..., None]).sum(axis=1)
    np.testing.assert_allclose(x[:, :width], expected, rtol=1e-5, atol=1e-6)
    assert (x[:, width:] == 7).all()
    alone, of_one = np.full((1, 48), 7, np.float32), lists_of(target, chosen_of(num_tokens)[4:5])
    at = np.zeros((int(places_of(of_one).max()) + 1, 64), np.float32)
    at[places_of(of_one)[:TOP_K]] = y[places[4]]
    built(target, combine, spec, target)(at, weights[4:5], of_one, alone, 1)
    assert (alone[0] == x[4]).all()
