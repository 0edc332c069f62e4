"""The convolution over the last tokens, against the recurrence in NumPy, and against itself in other steps."""

from __future__ import annotations

import numpy as np
import pytest
from radixlm.compile.codegen.targets import Target
from radixlm.compile.kernels.recurrent.short_convolution import ConvolutionShape, short_convolution
from radixlm.compile.ops.reference_mixers import convolved

from ..harness import built, every_target, runnable

FIRST, NUM_SLOTS = 11, 7


class Case:
    """A layer, and the rows of some sequences of unequal length."""

    def __init__(self, width: int, kernel_size: int, *, has_bias: bool, lengths: tuple[int, ...]) -> None:
        rng = np.random.default_rng(width * kernel_size)
        self.width, self.size, self.lengths = width, kernel_size, lengths
        self.slot_items = FIRST + (kernel_size - 1) * width + 5
        self.shape = ConvolutionShape(width, kernel_size, 3 * width + 8, width + 16, self.slot_items, has_bias=has_bias)
        self.taps = rng.standard_normal((width, kernel_size)).astype(np.float32)
        self.bias = rng.standard_normal(width).astype(np.float32) if has_bias else None
        self.rows = [rng.standard_normal((length, 3 * width + 8)).astype(np.float32) for length in lengths]
        self.pool = rng.standard_normal((NUM_SLOTS, self.slot_items)).astype(np.float32)
        self.pool[0] = 0

    def run(self, target: Target, spans: dict[int, range], state_in: list[int], state_out: list[int]) -> np.ndarray:
        """One step: tokens `spans[i]` of sequence i, rows of the batch in their order; `[tokens, width]`."""
        x = np.concatenate([self.rows[i][span.start : span.stop] for i, span in spans.items()])
        row_of_token = np.repeat(np.arange(len(spans)), [len(span) for span in spans.values()]).astype(np.int32)
        y = np.full((len(x), self.shape.y_stride), np.nan, np.float32)
        slots = np.array(state_in, np.int32), np.array(state_out, np.int32)
        kernel = built(target, short_convolution, self.shape, target)
        kernel(x, row_of_token, *slots, self.taps, self.bias, self.pool, y, FIRST, len(x))
        assert (y[:, self.width :] == 0).all()
        return y[:, : self.width]

    def expected(self, i: int) -> np.ndarray:
        b, c, x = np.split(self.rows[i][:, : 3 * self.width].astype(np.float64), 3, axis=1)
        mixed = convolved(b * x, self.taps.astype(np.float64))
        return c * (mixed if self.bias is None else mixed + self.bias)


@every_target
@pytest.mark.parametrize(
    ("width", "kernel_size", "has_bias"), [(64, 3, False), (150, 3, True), (96, 7, False), (24, 2, True)]
)
def test_sequences_side_by_side_are_convolved_from_zeros(
    target: Target, width: int, kernel_size: int, has_bias: bool
) -> None:
    case = Case(width, kernel_size, has_bias=has_bias, lengths=(1, 33, 2, 9))
    before = case.pool.copy()
    spans = {i: range(length) for i, length in enumerate(case.lengths)}
    y = case.run(target, spans, [0] * 4, [1, 2, 3, 4])
    expected = np.concatenate([case.expected(i) for i in spans])
    assert np.abs(y - expected).max() < 1e-5 * expected.std()
    for i, length in enumerate(case.lengths):
        b, _, x = np.split(case.rows[i][:, : 3 * width], 3, axis=1)
        kept = np.concatenate([np.zeros((kernel_size, width), np.float32), b * x])[length + 1 :]
        state = case.pool[1 + i, FIRST : FIRST + kept.size]
        assert (state == kept.ravel()).all()
        before[1 + i, FIRST : FIRST + kept.size] = state
    assert (case.pool == before).all()  # no other slot, and nothing of other layers


@pytest.mark.parametrize(("width", "kernel_size"), [(64, 3), (40, 5)])
def test_a_token_has_the_same_bits_in_any_step(width: int, kernel_size: int) -> None:
    target = runnable()[0]
    case = Case(width, kernel_size, has_bias=True, lengths=(40, 23))
    whole = [case.run(target, {i: range(length)}, [0], [6]) for i, length in enumerate(case.lengths)]
    parts: dict[int, list[np.ndarray]] = {0: [], 1: []}
    done = [0, 0]
    for counts in ((1, 7), (13, 0), (1, 1), (2, 15), (23, 0)):  # one alone, too
        spans = {i: range(done[i], done[i] + n) for i, n in enumerate(counts) if n}
        states = [1 + i if done[i] else 0 for i in spans]
        y = case.run(target, spans, states, [1 + i for i in spans])
        for i, span in spans.items():
            parts[i].append(y[: len(span)])
            y, done[i] = y[len(span) :], span.stop
    for i in parts:
        assert (np.concatenate(parts[i]) == whole[i]).all()


def test_a_slot_that_is_only_read_starts_several_sequences() -> None:
    target = runnable()[0]
    case = Case(64, 3, has_bias=False, lengths=(30,))
    whole = case.run(target, {0: range(30)}, [0], [6])
    case.run(target, {0: range(12)}, [0], [1])
    snapshot, layer = case.pool[1].copy(), slice(FIRST, FIRST + 2 * 64)
    for out in (2, 3):
        assert (case.run(target, {0: range(12, 30)}, [1], [out]) == whole[12:]).all()
    assert (case.pool[1] == snapshot).all() and (case.pool[2, layer] == case.pool[3, layer]).all()
