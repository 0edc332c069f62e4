"""Sines, cosines and logarithms are rounded once, have the same bits on every target, and ask no libm."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from radixlm.compile.codegen.builder import SIZE, Kernel, serial
from radixlm.compile.codegen.float64 import cosines_and_sines, logarithm
from radixlm.compile.codegen.targets import Target
from radixlm.compile.codegen.vector import lanes

from .harness import built, every_target, runnable

LARGEST = 1 << 30
ROUNDED_ONCE = 0.5001  # units in the last place
HALF_TURNS = np.pi / 2 * np.random.default_rng(0).integers(0, LARGEST / 2, 50_000)


def angles() -> np.ndarray:
    """Angles of every size, and those where a sine or a cosine is nearly 0."""
    rng = np.random.default_rng(1)
    every = [10 ** rng.uniform(-12, 9, 50_000), rng.uniform(0, 100, 50_000), HALF_TURNS, np.arange(64) * np.pi / 4]
    return np.concatenate([[0, LARGEST], *every, np.zeros(14)]).astype(np.float32)[: 150_064 // 16 * 16]


def turned(n: int) -> Any:
    """A PrimFunc `(x, cosines, sines, count) -> 0`, `n` numbers at a time."""
    with Kernel() as k:
        x, cosines, sines, count = k.arguments(x="float32", cosines="float32", sines="float32", count=SIZE)
        with serial(count // n) as i:
            cosines[lanes(i * n, n)], sines[lanes(i * n, n)] = cosines_and_sines(x[lanes(i * n, n)], n)
    return k.function


def logarithms() -> Any:
    """A PrimFunc `(counts, y, count) -> 0`."""
    with Kernel() as k:
        counts, y, count = k.arguments(counts="int32", y="float32", count=SIZE)
        with serial(count) as i:
            y[i] = logarithm(counts[i])
    return k.function


def units_off(found: np.ndarray, exact: np.ndarray) -> float:
    """The largest difference in units of the last place of a float32."""
    return float((np.abs(found - exact) / np.spacing(np.abs(exact).astype(np.float32))).max())


def turned_by(target: Target, n: int) -> tuple[np.ndarray, np.ndarray]:
    x = angles()
    cosines, sines = np.zeros_like(x), np.zeros_like(x)
    built(target, turned, n)(x, cosines, sines, len(x))
    return cosines, sines


@every_target
def test_cosines_and_sines_are_rounded_once(target: Target) -> None:
    cosines, sines = turned_by(target, 16)
    exact = angles().astype(np.float64)
    assert units_off(cosines, np.cos(exact)) < ROUNDED_ONCE
    assert units_off(sines, np.sin(exact)) < ROUNDED_ONCE


@pytest.mark.parametrize("n", [1, 4])
def test_cosines_and_sines_are_the_same_bits_on_every_target_in_vectors_of_any_size(n: int) -> None:
    first = turned_by(runnable()[0], 16)
    for target in runnable():
        for found, expected in zip(turned_by(target, n), first, strict=True):
            assert np.array_equal(found.view(np.int32), expected.view(np.int32)), target.name


def test_logarithms_are_rounded_once_and_the_same_bits_on_every_target() -> None:
    rng = np.random.default_rng(2)
    counts = np.concatenate([np.arange(1, 70_000), rng.integers(1, 2**31 - 1, 50_000), [2**31 - 1]]).astype(np.int32)
    found = []
    for target in runnable():
        y = np.full(len(counts), np.nan, np.float32)
        built(target, logarithms)(counts, y, len(counts))
        assert y[0] == 0.0
        assert units_off(y[1:], np.log(counts[1:].astype(np.float64))) < ROUNDED_ONCE
        found.append(y)
    assert all(np.array_equal(each, found[0]) for each in found)
