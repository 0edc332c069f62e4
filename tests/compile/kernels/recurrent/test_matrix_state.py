"""The gated delta rule and what stands around it, against the recurrence in NumPy, and in other steps."""

from __future__ import annotations

import numpy as np
import pytest
from radixlm.compile.codegen.targets import Target
from radixlm.compile.kernels.recurrent.matrix_state import (
    GatedNorm,
    HeadScalars,
    MatrixShape,
    UnitHeads,
    gated_norm,
    head_scalars,
    matrix_state,
    unit_heads,
)
from radixlm.compile.ops.functions import FUNCTIONS, sigmoid
from radixlm.compile.ops.reference_mixers import delta_rule, mamba_scan
from radixlm.runtime.artifact.model_config import GatedDelta, Mamba2

from ..harness import built, every_target, runnable

FIRST, NUM_SLOTS, NUM_TOKENS = 11, 5, 37
DELTAS = {
    "shared": GatedDelta(num_key_heads=2, num_value_heads=6, key_dim=32, value_dim=64, kernel_size=2),
    "tiled": GatedDelta(num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=32, kernel_size=2, tiled=True),
    "odd": GatedDelta(num_key_heads=17, num_value_heads=17, key_dim=16, value_dim=48, kernel_size=2),
}


class Case:
    """Rows of queries, keys and values, and of what fades and learns."""

    def __init__(self, name: str) -> None:
        rng = np.random.default_rng(3)
        self.delta = delta = DELTAS[name]
        heads, width = delta.num_value_heads, delta.convolved_width
        self.half = -(-heads // 16) * 16
        self.slot_items = FIRST + heads * delta.key_dim * delta.value_dim + 3
        self.shape = MatrixShape(
            delta.num_key_heads,
            heads,
            delta.key_dim,
            delta.value_dim,
            delta.tiled,
            0,
            delta.keys_width,
            2 * delta.keys_width,
            width + 16,
            2 * self.half,
            delta.values_width + 16,
            self.slot_items,
            corrects=True,
        )
        self.x = rng.standard_normal((NUM_TOKENS, width + 16)).astype(np.float32)
        self.joined = rng.standard_normal((NUM_TOKENS, 2 * self.half + 32)).astype(np.float32)
        self.rate = -np.abs(rng.standard_normal(self.half)).astype(np.float32)
        self.dt_bias = rng.standard_normal(self.half).astype(np.float32)
        self.pool = rng.standard_normal((NUM_SLOTS, self.slot_items)).astype(np.float32)
        self.pool[0] = 0

    def run(self, target: Target, rows: slice, state_in: int, state_out: int, row: int = 0) -> np.ndarray:
        """One step of one sequence, which is row `row` of the batch; `[tokens, value heads, value_dim]`."""
        x, joined = self.x[rows].copy(), self.joined[rows]
        num_tokens = len(x)
        scalars = np.full((num_tokens, 2 * self.half), np.nan, np.float32)
        unit = UnitHeads(self.delta.num_key_heads, self.delta.key_dim, x.shape[1])
        built(target, unit_heads, unit, target)(x, num_tokens)
        inputs = HeadScalars(16 + self.half, 16, joined.shape[1], 2 * self.half)
        built(target, head_scalars, inputs, target)(joined, self.rate, self.dt_bias, scalars, num_tokens)
        y = np.full((num_tokens, self.shape.y_stride), np.nan, np.float32)
        slots = np.zeros((2, row + 1), np.int32)
        slots[:, row] = state_in, state_out
        row_of_token = np.full(num_tokens, row, np.int32)
        built(target, matrix_state, self.shape, target)(
            x, scalars, row_of_token, slots[0], slots[1], None, self.pool, y, FIRST, num_tokens
        )
        return y[:, : self.delta.values_width]

    def expected(self) -> np.ndarray:
        heads = slice(self.delta.num_value_heads)
        b, a = (part.astype(np.float64)[:, heads] for part in np.split(self.joined[:, 16:-16], 2, axis=1))
        fading = np.exp(self.rate[heads] * FUNCTIONS["softplus"](a + self.dt_bias[heads]))
        x = self.x[:, : self.delta.convolved_width].astype(np.float64)
        return delta_rule(x, fading, sigmoid(b), self.delta).reshape(NUM_TOKENS, -1)


@every_target
@pytest.mark.parametrize("name", DELTAS)
def test_a_sequence_is_computed_from_zeros(target: Target, name: str) -> None:
    case = Case(name)
    before = case.pool.copy()
    y, expected = case.run(target, slice(None), 0, 2), case.expected()
    assert np.abs(y - expected).max() < 1e-5 * expected.std()
    layer = slice(FIRST, -3)
    before[2, layer] = case.pool[2, layer]
    assert (case.pool == before).all()  # no other slot, and nothing of other layers


@pytest.mark.parametrize("name", DELTAS)
def test_a_token_has_the_same_bits_in_any_step(name: str) -> None:
    target, case = runnable()[0], Case(name)
    whole = case.run(target, slice(None), 0, 1)
    state, start, parts = 0, 0, []
    for stop, into in ((1, 2), (2, 2), (19, 3), (20, 2), (NUM_TOKENS, 2)):  # in place, and into another slot
        kept = case.pool[state].copy()
        parts.append(case.run(target, slice(start, stop), state, into, row=start % 3))
        assert state == into or (case.pool[state] == kept).all()
        state, start = into, stop
    assert (np.concatenate(parts) == whole).all()
    assert (case.pool[1, FIRST:-3] == case.pool[2, FIRST:-3]).all()


@every_target
def test_without_correction_a_token_adds_its_value_and_skips(target: Target) -> None:
    mamba = Mamba2(num_heads=6, head_dim=48, num_groups=2, state_dim=20, kernel_size=2)
    rng, width, keys = np.random.default_rng(5), mamba.values_width, mamba.num_groups * mamba.state_dim
    x = rng.standard_normal((NUM_TOKENS, mamba.convolved_width)).astype(np.float32)
    scalars = rng.random((NUM_TOKENS, 32)).astype(np.float32)
    skip, items = rng.standard_normal(16).astype(np.float32), FIRST + mamba.state_size(0)
    shape = MatrixShape(
        2, 6, 20, 48, False, width + keys, width, 0, x.shape[1], 32, width, items, corrects=False, skips=True
    )
    expected = mamba_scan(x.astype(np.float64), scalars[:, :6], scalars[:, 16:22], mamba)
    expected += x[:, :width].reshape(expected.shape) * skip[:6, None]
    kernel, pool = built(target, matrix_state, shape, target), np.zeros((3, items), np.float32)
    y, parts = np.empty((NUM_TOKENS, width), np.float32), []
    slots = np.array([[0], [1], [2]], np.int32)
    kernel(x, scalars, np.zeros(NUM_TOKENS, np.int32), slots[0], slots[1], skip, pool, y, FIRST, NUM_TOKENS)
    assert np.abs(y.reshape(expected.shape) - expected).max() < 1e-5 * expected.std()
    for rows, state in ((slice(0, 5), 0), (slice(5, NUM_TOKENS), 2)):
        part = np.empty((len(x[rows]), width), np.float32)
        of_one = np.zeros(len(part), np.int32)
        kernel(x[rows], scalars[rows], of_one, slots[state], slots[2], skip, pool, part, FIRST, len(part))
        parts.append(part)
    assert (np.concatenate(parts) == y).all() and (pool[1] == pool[2]).all()


@every_target
def test_gates_come_first_where_parts_have_gains_of_their_own(target: Target) -> None:
    rng = np.random.default_rng(6)
    y, gates, gain = (rng.standard_normal(shape).astype(np.float32) for shape in ((9, 96), (9, 128), (96,)))
    through = y.astype(np.float64) * FUNCTIONS["silu"](gates[:, 16:112].astype(np.float64))
    parts = through.reshape(9, 2, 48)
    expected = (parts / np.sqrt(np.square(parts).mean(axis=-1, keepdims=True) + 1e-3)).reshape(9, 96) * gain
    shape = GatedNorm(2, 48, 96, 128, 16, 1e-3, gates_first=True, own_gains=True)
    built(target, gated_norm, shape, target)(y, gates, gain, 9)
    assert np.abs(y - expected).max() < 1e-5


@every_target
def test_heads_are_normalized_and_gated(target: Target) -> None:
    rng = np.random.default_rng(4)
    y, gates = (rng.standard_normal((11, width)).astype(np.float32) for width in (3 * 32 + 16, 5 * 32))
    gain = rng.standard_normal(32).astype(np.float32)
    heads, through = y[:, :96].astype(np.float64).reshape(11, 3, 32), gates[:, 16:112].reshape(11, 3, 32)
    normed = heads / np.sqrt(np.square(heads).mean(axis=-1, keepdims=True) + 1e-3) * gain
    expected = normed * FUNCTIONS["silu"](through.astype(np.float64))
    built(target, gated_norm, GatedNorm(3, 32, 112, 160, 16, 1e-3), target)(y, gates, gain, 11)
    assert np.abs(y[:, :96].reshape(expected.shape) - expected).max() < 1e-5
