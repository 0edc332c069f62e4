"""Branches that enter the residual, rows normalized or bounded in place: against float64."""

from __future__ import annotations

import numpy as np
import pytest
from radixlm.compile.codegen.targets import Target
from radixlm.compile.kernels.row_norms import AddNormSpec, NormSpec, add_norm, bound_rows, normalize_rows, scale_rows

from .harness import built, every_target

EPS = 1e-5


@every_target
@pytest.mark.parametrize(
    ("width", "normalize", "has_gain", "factor"),
    [(172, True, True, 1.0), (37, True, False, 0.22), (64, False, False, 0.22)],
)
def test_a_branch_is_normalized_scaled_and_added(
    target: Target, width: int, normalize: bool, has_gain: bool, factor: float
) -> None:
    rng, column = np.random.default_rng(width), -(-width // 16) * 16
    spec = AddNormSpec(width, column + 16, column, EPS, factor, normalize, has_gain)
    x = rng.standard_normal((11, spec.x_stride)).astype(np.float32)
    y = np.full((11, spec.y_stride), np.nan, np.float32)
    y[:, :width] = rng.standard_normal((11, width)) * 9
    gain = rng.standard_normal(width).astype(np.float32)

    def run(rows: slice) -> np.ndarray:
        out = x[rows].copy()
        built(target, add_norm, spec, target)(y[rows].copy(), gain, out, len(out))
        return out

    branch = y[:, :width].astype(np.float64)
    if normalize:
        branch /= np.sqrt((branch**2).mean(axis=1, keepdims=True) + EPS)
    branch *= factor * gain[:width] if has_gain else factor
    together = run(slice(None))
    np.testing.assert_allclose(together[:, :width], x[:, :width] + branch, rtol=1e-6, atol=3e-6)
    assert (together[:, width:] == x[:, width:]).all()
    assert (run(slice(3, 4)) == together[3]).all()


@every_target
@pytest.mark.parametrize(
    "spec",
    [
        NormSpec(172, 176, EPS),
        NormSpec(172, 176, EPS, has_gain=True),
        NormSpec(172, 176, EPS, "layer", has_gain=True),
        NormSpec(172, 176, EPS, "layer", has_gain=True, has_bias=True),
    ],
)
def test_rows_are_normalized_in_place(target: Target, spec: NormSpec) -> None:
    rng = np.random.default_rng(0)
    x, gain = rng.standard_normal((9, 176)).astype(np.float32), rng.standard_normal((2, 176)).astype(np.float32)
    rows = x[:, :172].astype(np.float64) + (3 if spec.kind == "layer" else 0)
    x[:, :172] = rows
    if spec.kind == "layer":
        rows -= rows.mean(axis=1, keepdims=True)
    rows /= np.sqrt((rows**2).mean(axis=1, keepdims=True) + EPS)
    rows = rows * gain[0, :172] if spec.has_gain else rows
    expected = x.copy()
    expected[:, :172] = rows + gain[1, :172] if spec.has_bias else rows
    built(target, normalize_rows, spec, target)(x, gain, 9)
    np.testing.assert_allclose(x, expected, rtol=1e-6, atol=3e-6 if spec.kind == "layer" else 0)


@every_target
@pytest.mark.parametrize(("factor", "soft_cap"), [(1.0, 30.0), (0.196, 20.0), (0.125, None)])
def test_logits_are_scaled_and_capped(target: Target, factor: float, soft_cap: float | None) -> None:
    stride = 2 * 4096 + 48
    x = (np.random.default_rng(0).standard_normal((3, stride)) * 60).astype(np.float32)
    x[1, :4] = [0, 1e-6, -1e9, np.nan]
    scaled = x.astype(np.float64) * factor
    expected = scaled if soft_cap is None else soft_cap * np.tanh(scaled / soft_cap)
    alone = x[2:].copy()
    kernel = built(target, bound_rows, stride, factor, soft_cap, target)
    kernel(x, 3)
    kernel(alone, 1)
    np.testing.assert_allclose(x, expected, rtol=1e-6)
    assert (alone[0] == x[2]).all()


@every_target
def test_rows_are_multiplied_by_a_stored_number(target: Target) -> None:
    x = np.random.default_rng(0).standard_normal((9, 48)).astype(np.float32)
    expected = x.copy()
    expected[:, :37] *= np.float32(0.3)
    built(target, scale_rows, 37, 48)(x, np.full(1, 0.3, np.float32), 9)
    assert (x == expected).all()
