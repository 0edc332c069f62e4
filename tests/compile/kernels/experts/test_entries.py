"""Lists of entries against sorting, and matrices of experts against the kernel of one expert alone: every bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from radixlm.compile.codegen.targets import Target
from radixlm.compile.kernels.experts.entries import (
    SLAB_ENTRIES,
    CombineSpec,
    ExpertLimits,
    ExpertRows,
    combine,
    find_slabs,
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
def test_entries_are_sorted_by_expert_and_cut_into_slabs_of_about_one_size(num_tokens: int, num_experts: int) -> None:
    limits = replace(LIMITS, num_experts=num_experts)
    chosen = chosen_of(num_tokens)
    if num_experts > 6:
        chosen = np.random.default_rng(1).integers(0, num_experts, chosen.shape).astype(np.int32)
    lists = lists_of(runnable()[0], chosen, limits)
    slabs, flat = lists[1 : 1 + 3 * lists[0]].reshape(-1, 3).tolist(), chosen.reshape(-1)
    entries = lists[1 + 3 * limits.num_slabs :]
    assert entries[: flat.size].tolist() == np.argsort(flat, kind="stable").tolist()
    assert (entries[flat.size :] == -1).all()
    end = 0
    for expert, first, count in slabs:
        assert first == end and 1 <= count <= SLAB_ENTRIES
        assert (flat[entries[first : first + count]] == expert).all()
        end += count
    assert end == flat.size
    for expert in set(flat.tolist()):
        sizes = [count for e, _, count in slabs if e == expert]
        assert max(sizes) - min(sizes) <= 1 and len(sizes) == -(-sum(sizes) // SLAB_ENTRIES)


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
    lists: np.ndarray | None,
    are_tokens: bool,
) -> np.ndarray:
    """One kernel on rows of activations: of experts if there are lists."""
    packed, y = pack(weight), y.copy()
    more = () if lists is None else (ExpertRows(LIMITS, are_tokens),)
    last = len(y) if lists is None else lists
    if isinstance(x, Rows):
        kernel = built(target, integer_linear, spec, target, *more)
        offsets = getattr(packed, "offsets", None)
        kernel(packed.codes, packed.scales, offsets, bias, *x.packed(), y, last)
    else:
        built(target, float_linear, spec, target, NUM_INPUTS, *more)(packed.codes, bias, x, y, last)
    return y


def check(target: Target, kind: WeightKind, wide: bool, are_tokens: bool, num_tokens: int) -> None:
    rng = np.random.default_rng(num_tokens)
    chosen, weight = chosen_of(num_tokens), stacked(kind, rng)
    num_rows = num_tokens if are_tokens else num_tokens * TOP_K
    spec = LinearSpec(kind, NUM_OUTPUTS, NUM_INPUTS, NUM_OUTPUTS + 32, 16, has_bias=True, wide=wide)
    x: Any = rng.standard_normal((num_rows, NUM_INPUTS)).astype(np.float32)
    if kind.is_quantized:
        limit = WIDE_LIMIT if wide else LIMIT
        codes = rng.integers(-limit, limit + 1, (num_rows, NUM_INPUTS))
        x = Rows(codes, rng.random((num_rows, NUM_INPUTS // GROUP)).astype(np.float32), wide)
    bias = rng.standard_normal(NUM_EXPERTS * NUM_OUTPUTS).astype(np.float32)
    before = rng.standard_normal((num_tokens * TOP_K, spec.y_stride)).astype(np.float32)
    found = run(target, spec, weight, bias, x, before, lists_of(target, chosen), are_tokens)
    for expert in range(NUM_EXPERTS):
        entries = np.flatnonzero(chosen.reshape(-1) == expert)
        if not entries.size:
            continue
        rows = slice(expert * NUM_OUTPUTS, (expert + 1) * NUM_OUTPUTS)
        given = x[entries // TOP_K if are_tokens else entries]
        alone = run(target, spec, part(weight, rows), bias[rows], given, before[entries], None, False)
        assert (found[entries] == alone).all(), f"expert {expert}"


@every_target
@pytest.mark.parametrize("kind", [Q4, F32], ids=lambda kind: kind.label)
def test_a_row_of_an_expert_is_what_its_matrix_alone_gives(target: Target, kind: WeightKind) -> None:
    for num_tokens in (1, 7, 190):
        check(target, kind, False, True, num_tokens)
    check(target, kind, False, False, 33)


@pytest.mark.parametrize(
    "kind", [Q8_MINIMUM, Q4_K, Q6_K, Q4_ZEROS, Q4_MINIMUM, MXFP4, BF16], ids=lambda kind: kind.label
)
@pytest.mark.parametrize("are_tokens", [True, False], ids=["tokens", "entries"])
def test_so_it_is_for_other_kinds(kind: WeightKind, are_tokens: bool) -> None:
    for num_tokens in (1, 70):
        check(runnable()[0], kind, kind == Q8_MINIMUM, are_tokens, num_tokens)


@every_target
@pytest.mark.parametrize("weighted", [True, False], ids=["weighted", "plain"])
def test_outputs_are_added_in_order_of_rank(target: Target, weighted: bool) -> None:
    rng, width, top_k = np.random.default_rng(0), 37, 3
    spec = CombineSpec(width, top_k, 48, 64, weighted)
    y = rng.standard_normal((11 * top_k, 64)).astype(np.float32)
    weights, x = rng.random((11, top_k)).astype(np.float32), np.full((11, 48), 7, np.float32)
    built(target, combine, spec, target)(y, weights, x, 11)
    factors = weights.astype(np.float64) if weighted else np.ones((11, top_k))
    expected = (y.reshape(11, top_k, 64)[..., :width] * factors[..., None]).sum(axis=1)
    np.testing.assert_allclose(x[:, :width], expected, rtol=1e-5, atol=1e-6)
    assert (x[:, width:] == 7).all()
    alone = np.full((1, 48), 7, np.float32)
    built(target, combine, spec, target)(y[12:15], weights[4:5], alone, 1)
    assert (alone[0] == x[4]).all()
