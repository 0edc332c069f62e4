"""Integer matrices times quantized rows, against int64 and float64 arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from radixlm.compile.codegen.targets import Target
from radixlm.compile.kernels import integer_linear as kernels
from radixlm.compile.kernels.integer_linear import MANY_SPANS, integer_candidates, integer_linear
from radixlm.compile.kernels.integer_tile import TILINGS
from radixlm.compile.kernels.linear import LinearSpec
from radixlm.compile.kernels.quantized_rows import ROW_TILE
from radixlm.compile.weights.kinds import (
    Q4,
    Q4_GROUP16,
    Q4_GROUP16_MINIMUM,
    Q4_MINIMUM,
    Q5,
    Q5_MINIMUM,
    Q8,
    Q8_GROUP16,
    Q8_MINIMUM,
    SUPER_GROUP,
    Scales,
    WeightKind,
)
from radixlm.compile.weights.layout import GROUP, ROW_BLOCK, round_up
from radixlm.compile.weights.packing import PackedWeight, pack, packed_shape
from radixlm.compile.weights.quantization import Weight, joined, levels

from .harness import TARGETS_HERE, built, by_rows, examples, of_each_size, runnable
from .pairwise import pairwise
from .random_weights import num_codes, random_weight, unit_weight

Q4_K = WeightKind("q4", Scales(32, "minimum", nested=True))
Q6_K = WeightKind("q6", Scales(16, nested=True))
MXFP4 = WeightKind("fp4", Scales(32, dtype="e8m0"))
COMMON = (Q4, Q4_MINIMUM, Q8, Q8_MINIMUM, Q5, Q4_K, Q6_K, MXFP4)
RARE = (
    Q4_GROUP16,
    Q8_GROUP16,
    Q4_GROUP16_MINIMUM,
    Q5_MINIMUM,
    WeightKind("q8", Scales(16, "minimum")),
    WeightKind("q2", Scales(128)),
    WeightKind("q2", Scales(16, "minimum", nested=True)),
    WeightKind("q3", Scales(16, nested=True)),
    WeightKind("q5", Scales(32, "minimum", nested=True)),
    WeightKind("q8", Scales(32, nested=True)),
    WeightKind("fp4", Scales(16, dtype="e4m3")),
    WeightKind("iq4", Scales(32)),
    WeightKind("iq4", Scales(32, nested=True)),
    WeightKind("q4", Scales(64)),
    WeightKind("q4", Scales(128, "integers")),
    WeightKind("q8", Scales(32, "integers")),
    WeightKind("q4", Scales(64, "minimum")),
)
KINDS = {kind.label: kind for kind in (*COMMON, *RARE)}
LIMIT, WIDE_LIMIT = 127, 127 * 256
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
NUM_ROWS = 131  # two slabs, and a last tile of one, two or three rows
# Groups of 32: more and fewer than a panel of 14, in whole panels and not, odd and even.
LENGTHS = {GROUP: (45, 13, 3, 1), 64: (13, 7, 3, 1), 128: (13, 3, 1), SUPER_GROUP: (3, 4, 1)}  # in units of so many
SIZES: dict[str, Sequence[Any]] = {
    "num_outputs": (112, 40, 16),  # blocks of 16: more than a tile has, padded, one
    "length": range(4),
    "place": ((16, 48), (0, 0)),  # columns before and after the outputs
    "has_bias": (True, False),
    "add_to_output": (True, False),
    "factor": (0.22, 1.0),
}
# Common kinds meet every target; rare ones only the best that this machine runs.
COMMON_SPECS = pairwise(kind=COMMON, target=TARGETS_HERE, wide=(False, True), **SIZES)
SPECS = [
    *COMMON_SPECS,
    *({**row, "kind": kind, "target": runnable()[0]} for kind, row in zip(RARE, COMMON_SPECS, strict=False)),
]


@dataclass
class Rows:
    """Quantized activations: `codes` `[M, K]` are whole numbers, `scales` `[M, K/32]`."""

    codes: np.ndarray
    scales: np.ndarray
    wide: bool

    def __getitem__(self, rows: np.ndarray | slice) -> Rows:
        return Rows(self.codes[rows], self.scales[rows], self.wide)

    def packed(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """As `quantized_rows.py` lays them out: codes, scales, sums; what fills up the last tile is poison."""
        num_rows, groups = self.scales.shape
        codes = self.codes.reshape(num_rows, groups, GROUP).astype(np.int64)
        sums = codes.reshape(num_rows, groups, 2, GROUP // 2).sum(-1).astype(np.int32)
        scaled_sums = self.scales * sums.sum(-1).astype(np.float32)
        high = (codes + 128) >> 8
        parts = [high, codes - (high << 8)] if self.wide else [codes]
        return (
            in_tiles(np.concatenate(parts, -1).astype(np.int8), 77),
            in_tiles(np.stack([self.scales, scaled_sums], -1), np.nan),
            in_tiles(sums, 1 << 20),
        )


def in_tiles(rows: np.ndarray, filling: float) -> np.ndarray:
    """`[rows, groups, n]` as `[tiles, groups, ROW_TILE, n]`."""
    num_rows, groups, size = rows.shape
    tiles = np.full((round_up(num_rows, ROW_TILE), groups, size), filling, rows.dtype)
    tiles[:num_rows] = rows
    return np.ascontiguousarray(tiles.reshape(-1, ROW_TILE, groups, size).swapaxes(1, 2))


@dataclass
class Case:
    """A matrix, its rows, and what the output holds before."""

    spec: LinearSpec
    weight: Weight
    bias: np.ndarray
    rows: Rows
    y: np.ndarray

    @classmethod
    def of(cls, row: dict[str, Any], num_rows: int, seed: int) -> Case:
        """Random numbers for a row of the table of specs."""
        kind, wide, num_outputs = row["kind"], row["wide"], row["num_outputs"]
        unit = SUPER_GROUP if kind.is_nested else max(kind.group, GROUP)
        lengths = LENGTHS[unit]
        groups = lengths[row["length"] % len(lengths)] * unit // GROUP
        inputs = groups * GROUP - (16 if kind.group == 16 and not kind.is_nested else 0)
        before, after = row["place"]
        rng = np.random.default_rng(seed)
        stacked = round_up(num_outputs, ROW_BLOCK)
        spec = LinearSpec(
            kind,
            stacked,
            groups * GROUP,
            before + stacked + after,
            before,
            has_bias=row["has_bias"],
            add_to_output=row["add_to_output"],
            wide=wide,
            factor=row["factor"],
        )
        limit = WIDE_LIMIT if wide else LIMIT
        codes = rng.integers(-limit, limit + 1, (num_rows, groups * GROUP))
        codes[:, inputs:] = 0
        return cls(
            spec,
            random_weight(kind, num_outputs, inputs, rng),
            rng.standard_normal(stacked).astype(np.float32),
            Rows(codes, rng.random((num_rows, groups)).astype(np.float32), wide),
            rng.standard_normal((num_rows, spec.y_stride)).astype(np.float32),
        )

    @cached_property
    def packed(self) -> PackedWeight:
        """The matrix as kernels read it."""
        return pack(self.weight)

    def run(self, target: Target, rows: np.ndarray | slice = slice(None)) -> np.ndarray:
        """What the kernel makes of some of the rows."""
        y = self.y[rows].copy()
        codes, scales, sums = self.rows[rows].packed()
        bias = self.bias if self.spec.has_bias else None
        kernel = built(target, integer_linear, self.spec, target)
        kernel(self.packed.codes, self.packed.scales, self.packed.offsets, bias, codes, scales, sums, y, len(y))
        return y

    def expected(self) -> np.ndarray:
        """The same in float64."""
        spec, num_outputs, inputs = self.spec, *self.weight.shape
        scale = np.repeat(self.rows.scales.astype(np.float64), GROUP, axis=1)
        product = (self.rows.codes * scale)[:, :inputs] @ self.weight.dequantize().astype(np.float64).T
        if spec.has_bias:
            product += self.bias[:num_outputs]
        product *= spec.factor
        y = self.y.astype(np.float64)
        columns = slice(spec.column, spec.column + num_outputs)
        y[:, columns] = product + (y[:, columns] if spec.add_to_output else 0)
        return y

    def untouched(self) -> np.ndarray:
        """Columns that no output belongs to, `[y_stride]` bool."""
        columns = np.arange(self.spec.y_stride) - self.spec.column
        return (columns < 0) | (columns >= self.spec.num_outputs)

    def given(self) -> np.ndarray:
        """Columns of outputs that are no padding, `[y_stride]` bool."""
        columns = np.arange(self.spec.y_stride) - self.spec.column
        return (columns >= 0) & (columns < self.weight.shape[0])


@every_kind
@pytest.mark.parametrize("shape", [(40, 96), (16, 32), (48, 576)])
def test_packed_arrays_have_the_planned_sizes(kind: WeightKind, shape: tuple[int, int]) -> None:
    shape = shape[0], round_up(shape[1], SUPER_GROUP if kind.is_nested else kind.group)
    packed = pack(random_weight(kind, *shape, np.random.default_rng(0)))
    planned = packed_shape(kind, *shape)
    sizes = [0 if array is None else array.nbytes for array in (packed.codes, packed.scales, packed.offsets)]
    assert sizes == [planned.codes, planned.scales, planned.offsets]


@by_rows(SPECS)
def test_products_are_those_of_the_dequantized_matrix_in_every_batch(row: dict[str, Any]) -> None:
    """A row has the same bits alone and among others, in tiles of every height, and in slabs."""

    @examples(3)
    @given(st.integers(0, 1 << 30), st.lists(st.integers(0, NUM_ROWS - 1), min_size=1, max_size=100))
    def check(seed: int, some: list[int]) -> None:
        case = Case.of(row, NUM_ROWS, seed)
        together, expected = case.run(row["target"]), case.expected()
        given = case.given()
        assert np.abs(together - expected)[:, given].max() <= 2e-6 * np.abs(expected[:, given]).max()
        assert (together == case.y)[:, case.untouched()].all()
        for one in (0, 3, 64, 130):
            assert (case.run(row["target"], slice(one, one + 1)) == together[one]).all()
        for count in (*range(2, 18), 27, 64, 65, 67):  # all heights of tiles, alone and after others
            rows = np.random.default_rng(seed + count).permutation(NUM_ROWS)[:count]
            assert (case.run(row["target"], rows) == together[rows]).all()
        assert (case.run(row["target"], np.array(some)) == together[some]).all()

    check()


@by_rows(of_each_size(kind=(Q8, Q4_K), wide=(False, True)))
def test_a_matrix_that_is_cut_into_wider_spans_computes_the_same(row: dict[str, Any]) -> None:
    """One row, if it is long, meets spans of several blocks of a matrix of many; one of few is cut into single ones."""
    plain = {"length": 2, "place": (0, 0), "has_bias": False, "add_to_output": False, "factor": 1.0}
    first, middle, last = (Case.of(row | plain | {"num_outputs": count}, 8, seed=count) for count in (112, 1328, 96))
    num_outputs = 112 + 1328 + 96
    assert num_outputs // ROW_BLOCK >= MANY_SPANS * max(tiling.blocks for tiling in TILINGS.values())
    large = replace(
        first,
        spec=replace(first.spec, num_outputs=num_outputs, y_stride=num_outputs),
        weight=joined([each.weight for each in (first, middle, last)]),
        y=np.zeros((8, num_outputs), np.float32),
    )
    for num_rows in (1, 3, 8):
        with patch.object(kernels, "LONG_ROW", GROUP):
            found = large.run(row["target"], slice(num_rows))
        assert (found[:, :112] == first.run(row["target"], slice(num_rows))).all()
        assert (found[:, -96:] == replace(last, rows=first.rows).run(row["target"], slice(num_rows))).all()


REPLACED = {"wide": True, "place": (0, 48), "add_to_output": False, "factor": 1.0}  # what candidates replace
CANDIDATES = pairwise(
    kind=(Q8, Q4_MINIMUM, Q6_K, Q4_K),
    target=TARGETS_HERE,
    num_outputs=SIZES["num_outputs"],
    length=range(4),
    has_bias=(True, False),
)


@by_rows(CANDIDATES)
def test_candidates_get_the_bits_of_the_whole_matrix(row: dict[str, Any]) -> None:
    @examples(4)
    @given(st.integers(0, 1 << 30), st.sampled_from([9, 1, 2]))
    def check(seed: int, num_rows: int) -> None:
        case = Case.of(row | REPLACED, num_rows, seed)
        num_outputs = case.weight.shape[0]
        candidates = np.random.default_rng(seed).integers(0, num_outputs, (num_rows, 32)).astype(np.int32)
        candidates[:, 0], candidates[:, 1:4] = num_outputs - 1, 0
        y, packed, whole = case.y.copy(), case.packed, case.run(row["target"])
        codes, scales, sums = case.rows.packed()
        bias = case.bias if case.spec.has_bias else None
        kernel = built(row["target"], integer_candidates, case.spec, 32, row["target"])
        kernel(packed.codes, packed.scales, packed.offsets, bias, codes, scales, sums, y, candidates, num_rows)
        is_candidate = np.zeros(y.shape, bool)
        np.put_along_axis(is_candidate, candidates.astype(np.int64), True, axis=1)
        assert (y == np.where(is_candidate, whole, case.y)).all()

    check()


@by_rows(COMMON_SPECS)
def test_the_largest_codes_give_exact_integers(row: dict[str, Any]) -> None:
    """With scales of 1 an output is the sum of its groups' integers, each rounded to float32 once."""
    for num_rows in (1, 5, 9):
        case = Case.of(row, num_rows, seed=3)
        kind, wide, num_inputs = row["kind"], row["wide"], case.spec.num_inputs
        rng, num_outputs = np.random.default_rng(3), case.spec.num_outputs
        limit, worth = WIDE_LIMIT if wide else LIMIT, levels(kind, np.arange(num_codes(kind), dtype=np.uint8))
        highest, lowest = worth.argmax(), worth.argmin()
        codes = rng.choice([lowest, highest], (num_outputs, num_inputs)).astype(np.uint8)
        codes[0], codes[1] = highest, lowest
        x = rng.choice([-limit, limit], (num_rows, num_inputs))
        x[0] = limit
        x[-1, ::2] = -limit
        if wide:
            x[num_rows // 2] = 127 * 256 - 128  # the bytes 127 and -128
        rows = Rows(x, np.ones((num_rows, num_inputs // GROUP), np.float32), wide)
        no_bias, before = np.zeros(num_outputs, np.float32), np.zeros_like(case.y)
        case = Case(case.spec, unit_weight(kind, codes), no_bias, rows, before)
        signed = (levels(kind, codes).astype(np.int64) - kind.zero).reshape(num_outputs, -1, min(kind.group, GROUP))
        groups = np.einsum("ngk,mgk->mng", signed, x.reshape(num_rows, -1, min(kind.group, GROUP)))
        expected = np.zeros((num_rows, num_outputs), np.float32)
        for group in range(groups.shape[-1]):
            expected = expected + groups[..., group].astype(np.float32)
        found = case.run(row["target"])[:, case.given()]
        assert (found == expected * np.float32(case.spec.factor)).all(), num_rows
