"""Sum the sampling weights of a row's tokens by block, so that a draw reads one block instead of the row.

Knows rows of numbers, not how they are drawn. Numbers are float64 and added in fixed order, so that a sum does not
depend on the division of work.
"""

from __future__ import annotations

import math
from typing import Any

from radixlm.runtime.artifact.manifest import WEIGHT_BLOCK
from tvm.script.ir_builder import tirx as T

from ...codegen.builder import SIZE, Kernel, Memory, bound, either, parallel, registers, serial
from ...codegen.targets import Target
from ...codegen.vector import Expr, fma, lanes, splat

_WIDTH = 8  # lanes of a vector
_NUM_VECTORS = 4  # vectors added in parallel; an addition waits for the one before it
_STEP = _WIDTH * _NUM_VECTORS
_TERMS = 10  # terms of the series, whose error is 2e-13 relative
_LEAST = -1000.0  # smaller exponents of 2 count as this one
_WHOLE = 1.5 * 2**52 + 1023  # added to so large a number, only integers are distinct; 1023 is the exponent bias


def weight_sums(target: Target) -> Any:
    """Return the PrimFunc `(logits, largest, scale, sums, row, stride, largest_stride, vocab_size) -> 0`.

    `sums[b]` is the sum of `2 ** ((logit - largest) * scale)` over the `b`-th `WEIGHT_BLOCK` logits of a row, in the
    last block only over those below `vocab_size`. `logits` is `[rows, stride]`, and `largest[row * largest_stride]` is
    the row's largest.
    """
    with Kernel() as k:
        logits, largest, scale, sums, row, stride, largest_stride, vocab_size = k.arguments(
            logits="float32",
            largest="float32",
            scale="float64",
            sums="float64",
            row=SIZE,
            stride=SIZE,
            largest_stride=SIZE,
            vocab_size=SIZE,
        )
        with parallel((vocab_size + (WEIGHT_BLOCK - 1)) // WEIGHT_BLOCK) as block:
            start = block * WEIGHT_BLOCK
            top = T.Cast("float64", largest[row * largest_stride])
            with either(vocab_size - start >= WEIGHT_BLOCK) as (then, otherwise):
                with then:
                    sums[block] = _sum(logits, row * stride + start, top, scale[0], target.has_fma)
                with otherwise:
                    rest = registers(WEIGHT_BLOCK, "float32")
                    for i in range(0, WEIGHT_BLOCK, _WIDTH):
                        rest[lanes(i, _WIDTH)] = splat(T.float32(float("-inf")), _WIDTH)
                    with serial(vocab_size - start) as i:
                        rest[i] = logits[row * stride + start + i]
                    sums[block] = _sum(rest, T.int64(0), top, scale[0], target.has_fma)
    return k.function


def _sum(logits: Memory, start: Expr, largest: Expr, scale: Expr, has_fma: bool) -> Expr:
    """Return the sum of a block, emitted here: every 32nd weight in order, then halves of the results."""
    partial = registers(_STEP, "float64")
    for i in range(0, _STEP, _WIDTH):
        partial[lanes(i, _WIDTH)] = splat(T.float64(0), _WIDTH)
    with serial(WEIGHT_BLOCK // _STEP) as step:
        for i in range(0, _STEP, _WIDTH):
            part = T.Cast(f"float64x{_WIDTH}", logits[lanes(start + step * _STEP + i, _WIDTH)])
            weight = _power_of_2((part - splat(largest, _WIDTH)) * splat(scale, _WIDTH), has_fma)
            partial[lanes(i, _WIDTH)] = partial[lanes(i, _WIDTH)] + weight
    width = _STEP // 2
    while width:
        for i in range(0, width, _WIDTH):
            n = min(width, _WIDTH)
            partial[lanes(i, n)] = partial[lanes(i, n)] + partial[lanes(i + width, n)]
        width //= 2
    return partial[0]


def _power_of_2(x: Expr, has_fma: bool) -> Expr:
    """Return 2 to the power of each lane, none of which is above 0."""
    x = bound(T.max(x, splat(T.float64(_LEAST), _WIDTH)))
    bits = bound(T.reinterpret(f"int64x{_WIDTH}", x + splat(T.float64(_WHOLE), _WIDTH)))
    # TVM would fold an addition that it sees
    r = bound(x - (T.reinterpret(f"float64x{_WIDTH}", bits) - splat(T.float64(_WHOLE), _WIDTH)))
    terms = [1.0]
    for n in range(1, _TERMS + 1):
        terms.append(terms[-1] * math.log(2) / n)  # Taylor series of e ** (r * log(2))
    p = splat(T.float64(terms[-1]), _WIDTH)
    for term in reversed(terms[:-1]):
        p = fma(p, r, splat(T.float64(term), _WIDTH), has_fma, _WIDTH, bits=64)
    return p * T.reinterpret(f"float64x{_WIDTH}", T.shift_left(bits, splat(T.int64(52), _WIDTH)))
