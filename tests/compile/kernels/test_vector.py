"""Stored numbers become float32 exactly, on processors with an instruction for it and without; functions of vectors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from radixlm.compile.codegen.builder import SIZE, Kernel, serial
from radixlm.compile.codegen.targets import Target
from radixlm.compile.codegen.vector import LANES, lanes, tanh, to_f32

from .harness import built, every_target


def converter(n: int, has_f16c: bool) -> Any:
    """A PrimFunc `(halves, floats, count) -> 0` that takes `n` numbers at a time."""
    with Kernel() as k:
        halves, floats, count = k.arguments(halves="float16", floats="float32", count=SIZE)
        with serial(count // n) as i:
            floats[lanes(i * n, n)] = to_f32(halves[lanes(i * n, n)], "float16", n, has_f16c=has_f16c)
    return k.function


@every_target
@pytest.mark.parametrize("n", [16, 1])
def test_every_float16_is_the_same_number_in_float32(target: Target, n: int) -> None:
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    expected = halves.astype(np.float32)
    for has_f16c in {target.has_f16c, False}:
        floats = np.zeros(halves.size, np.float32)
        built(target, converter, n, has_f16c)(halves, floats, halves.size)
        finite = ~np.isnan(expected)
        assert (floats[finite].view(np.int32) == expected[finite].view(np.int32)).all()
        assert np.isnan(floats[~finite]).all()


def tangents(has_fma: bool) -> Any:
    """A PrimFunc `(x, y, count) -> 0`: `y = tanh(x)`, 16 numbers at a time."""
    with Kernel() as k:
        x, y, count = k.arguments(x="float32", y="float32", count=SIZE)
        with serial(count // LANES) as i:
            y[lanes(i * LANES)] = tanh(x[lanes(i * LANES)], has_fma)
    return k.function


@every_target
def test_tanh_is_exact_to_float32_everywhere(target: Target) -> None:
    magnitudes = np.concatenate([10.0 ** np.linspace(-30, 30, 4000), np.linspace(0, 10, 4000), [0, np.inf]])
    x = np.concatenate([magnitudes, -magnitudes]).astype(np.float32)
    x = np.concatenate([x, np.full(-len(x) % LANES, np.nan, np.float32)])
    y = np.zeros_like(x)
    built(target, tangents, target.has_fma)(x, y, len(x))
    np.testing.assert_allclose(y, np.tanh(x.astype(np.float64)), 2.5e-7, 0)
    assert (np.abs(y[~np.isnan(x)]) <= 1).all()
    assert (y * x >= 0)[~np.isnan(x)].all()
