"""Integer matrices times quantized rows, against int64 and float64 arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from radixlm.compile.codegen.targets import Target
from radixlm.compile.kernels.integer_linear import integer_candidates, integer_linear
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
from radixlm.compile.weights.packing import pack, packed_shape
from radixlm.compile.weights.quantization import Weight, levels

from .harness import built, every_target, examples, runnable
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
# a build takes about half a second, so rare kinds meet random shapes only on the best target that this machine runs,
# half of them with wide activations
every_kind_and_target = pytest.mark.parametrize(
    ("kind", "target", "wide"),
    [
        pytest.param(
            kind, *param.values, wide, id=f"{kind.label}-{param.id}-{'wide' if wide else 'narrow'}", marks=param.marks
        )
        for kind in COMMON
        for param in every_target.args[1]
        for wide in (False, True)
    ]
    + [
        pytest.param(kind, target, number % 2 == 1, id=f"{kind.label}-{target.name}")
        for number, kind in enumerate(RARE)
        for target in runnable()[:1]
    ],
)


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
    def draw(cls, kind: WeightKind, draw: st.DrawFn, num_rows: int, wide: bool) -> Case:
        # the largest come first: with few examples, Hypothesis begins with the first of each
        unit = SUPER_GROUP if kind.is_nested else max(kind.group, GROUP)
        sizes = {GROUP: [45, 13, 3, 1], SUPER_GROUP: [3, 4, 1]}.get(unit, [13, 3, 1])
        num_outputs, groups = draw(st.sampled_from([112, 40, 16])), draw(st.sampled_from(sizes)) * unit // GROUP
        inputs = groups * GROUP - (16 if kind.group == 16 and not kind.is_nested else 0)
        before, after = draw(st.sampled_from([(16, 48), (0, 0)]))
        rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
        stacked = round_up(num_outputs, ROW_BLOCK)
        spec = LinearSpec(
            kind,
            stacked,
            groups * GROUP,
            before + stacked + after,
            before,
            has_bias=draw(st.booleans()),
            add_to_output=draw(st.booleans()),
            wide=wide,
            factor=draw(st.sampled_from([0.22, 1.0])),
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

    def run(self, target: Target, rows: np.ndarray | slice = slice(None)) -> np.ndarray:
        """What the kernel makes of some of the rows."""
        y, packed = self.y[rows].copy(), pack(self.weight)
        codes, scales, sums = self.rows[rows].packed()
        bias = self.bias if self.spec.has_bias else None
        kernel = built(target, integer_linear, self.spec, target)
        kernel(packed.codes, packed.scales, packed.offsets, bias, codes, scales, sums, y, len(y))
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


@every_kind_and_target
def test_products_are_those_of_the_dequantized_matrix(target: Target, kind: WeightKind, wide: bool) -> None:
    @examples(2)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        case = Case.draw(kind, data.draw, data.draw(st.sampled_from([67, 11, 7, 2, 1])), wide)
        y, expected = case.run(target), case.expected()
        given = case.given()
        assert np.abs(y - expected)[:, given].max() <= 2e-6 * np.abs(expected[:, given]).max()
        assert (y == case.y)[:, case.untouched()].all()

    check()


@every_kind_and_target
def test_a_row_is_the_same_bits_alone_and_among_others(target: Target, kind: WeightKind, wide: bool) -> None:
    @examples(1)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        case = Case.draw(kind, data.draw, 131, wide)
        together = case.run(target)
        for row in (0, 3, 64, 130):
            assert (case.run(target, slice(row, row + 1)) == together[row]).all()
        for count in (2, 3, 5, 8, 9, 64, 65):
            rows = np.random.default_rng(count).permutation(131)[:count]
            assert (case.run(target, rows) == together[rows]).all()

    check()


@pytest.mark.parametrize("num_rows", [1, 2, 9])
@pytest.mark.parametrize("kind", [Q8, Q4_MINIMUM, Q6_K, Q4_K], ids=lambda kind: kind.label)
@every_target
def test_candidates_get_the_bits_of_the_whole_matrix(target: Target, kind: WeightKind, num_rows: int) -> None:
    @examples(2)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        case = Case.draw(kind, data.draw, num_rows, wide=True)
        case.spec = replace(case.spec, column=0, factor=1.0, add_to_output=False)
        num_outputs = case.weight.shape[0]
        candidates = np.random.default_rng(num_rows).integers(0, num_outputs, (num_rows, 32)).astype(np.int32)
        candidates[:, 0], candidates[:, 1:4] = num_outputs - 1, 0
        y, packed, whole = case.y.copy(), pack(case.weight), case.run(target)
        codes, scales, sums = case.rows.packed()
        bias = case.bias if case.spec.has_bias else None
        kernel = built(target, integer_candidates, case.spec, 32, target)
        kernel(packed.codes, packed.scales, packed.offsets, bias, codes, scales, sums, y, candidates, num_rows)
        is_candidate = np.zeros(y.shape, bool)
        np.put_along_axis(is_candidate, candidates.astype(np.int64), True, axis=1)
        assert (y == np.where(is_candidate, whole, case.y)).all()

    check()


@pytest.mark.parametrize("kind", COMMON, ids=lambda kind: kind.label)
@pytest.mark.parametrize("wide", [False, True], ids=["narrow", "wide"])
@pytest.mark.parametrize("num_rows", [1, 5, 9])
def test_the_largest_codes_give_exact_integers_on_every_target(kind: WeightKind, wide: bool, num_rows: int) -> None:
    """With scales of 1 an output is the sum of its groups' integers, each rounded to float32 once."""
    rng, num_inputs = np.random.default_rng(3), SUPER_GROUP if kind.is_nested else GROUP
    limit, worth = WIDE_LIMIT if wide else LIMIT, levels(kind, np.arange(num_codes(kind), dtype=np.uint8))
    highest, lowest = worth.argmax(), worth.argmin()
    codes = rng.choice([lowest, highest], (16, num_inputs)).astype(np.uint8)
    codes[0], codes[1] = highest, lowest
    x = rng.choice([-limit, limit], (num_rows, num_inputs))
    x[0] = limit
    x[-1, ::2] = -limit
    if wide:
        x[num_rows // 2] = 127 * 256 - 128  # the bytes 127 and -128
    rows = Rows(x, np.ones((num_rows, num_inputs // GROUP), np.float32), wide)
    spec, y = LinearSpec(kind, 16, num_inputs, 16, wide=wide), np.zeros((num_rows, 16), np.float32)
    case = Case(spec, unit_weight(kind, codes), np.zeros(16), rows, y)
    signed = (levels(kind, codes).astype(np.int64) - kind.zero).reshape(16, -1, min(kind.group, GROUP))
    groups = np.einsum("ngk,mgk->mng", signed, x.reshape(num_rows, -1, min(kind.group, GROUP)))
    expected = np.zeros((num_rows, 16), np.float32)
    for group in range(groups.shape[-1]):
        expected = expected + groups[..., group].astype(np.float32)
    for target in runnable():
        assert (case.run(target) == expected).all(), target.name
