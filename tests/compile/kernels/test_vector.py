"""Stored numbers become float32 exactly, on processors with an instruction for it and without."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from radixlm.compile.codegen.builder import SIZE, Kernel, serial
from radixlm.compile.codegen.targets import Target
from radixlm.compile.codegen.vector import lanes, to_f32

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
