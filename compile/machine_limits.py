"""Loops that measure what a machine can do at most: read memory, multiply integers, start threads and wait for them.

A module has them beside its model, for the same instructions: what is measured needs no compiler where it is served.
`parts` is how many threads take part, each with a contiguous part of the memory. Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script.ir_builder import tirx as T

from .codegen.builder import SIZE, Kernel, bound, parallel, prefetch, registers, serial
from .codegen.targets import Target
from .codegen.vector import LANES, Expr, lanes, splat
from .kernels.integer_dot import dot_of

STRIDE = 8 * LANES  # int32 of one step of the reading loop
_AHEAD = 512  # int32: prefetchers of the hardware end at a page of 4 KiB
_PAGE = 1024  # int32
_MAX_LEVEL = 15  # of weights in 4 bits


def touch_memory() -> Any:
    """`(memory, sums, count, parts)`: write to each page of `memory`, on the thread that `read_memory` reads it with.

    A page belongs to the NUMA node whose processor first wrote it.
    """
    with Kernel() as k:
        memory, _, count, parts = k.arguments(memory="int32", sums="int32", count=SIZE, parts=SIZE)
        with parallel(parts) as part:
            size = bound(_steps(count, parts) * STRIDE)
            with serial((size + (_PAGE - 1)) // _PAGE) as page:
                memory[part * size + page * _PAGE] = T.int32(1)
    return k.function


def read_memory() -> Any:
    """`(memory, sums, count, parts)`: add up `count` int32, less what `parts * STRIDE` does not divide."""
    with Kernel() as k:
        memory, sums, count, parts = k.arguments(memory="int32", sums="int32", count=SIZE, parts=SIZE)
        with parallel(parts) as part:
            acc = registers(STRIDE, "int32")
            for i in range(0, STRIDE, LANES):
                acc[lanes(i)] = splat(T.int32(0))
            steps = bound(_steps(count, parts))
            with serial(steps) as step:
                first = bound((part * steps + step) * STRIDE)
                prefetch(memory, first + _AHEAD, STRIDE * 4, 4)
                for i in range(0, STRIDE, LANES):
                    acc[lanes(i)] = acc[lanes(i)] + memory[lanes(first + i)]
            total = acc[lanes(0)]
            for i in range(LANES, STRIDE, LANES):
                total = total + acc[lanes(i)]
            sums[lanes(part * LANES)] = total
    return k.function


def multiply_integers(target: Target, max_level: int = _MAX_LEVEL) -> Any:
    """`(sums, count, parts)`: `count` products and as many sums in each part, in registers, as `target` computes them.

    Args:
        max_level: of the weights, which decides the instruction on some targets.
    """
    dot = dot_of(target.integer_dot, max_level)
    # latency times throughput of a multiply-add is 8 to 10, and AVX2 has 16 registers for all
    num_chains = (12 if "avx512f" in target.features else 8) // dot.num_pieces
    with Kernel() as k:
        sums, count, parts = k.arguments(sums="int32", count=SIZE, parts=SIZE)
        with parallel(parts) as part:
            size = dot.piece_lanes
            # buffers of one accumulator each: they stay in registers
            acc = [registers(dot.accumulator_lanes, "int32") for _ in range(num_chains)]
            pieces = [lanes(piece * size, size) for piece in range(dot.num_pieces)]
            for chain in acc:
                for where in pieces:
                    chain[where] = splat(T.int32(0), size)
            with serial(count // (num_chains * LANES * 4)) as turn:
                x = T.Cast("int32", turn)
                for number, chain in enumerate(acc):
                    for where in pieces:
                        weights = T.broadcast(T.uint8(number + 1), dot.piece_bytes)
                        chain[where] = dot.accumulate(chain[where], weights, x)
            outputs = [dot.outputs([chain[where] for where in pieces]) for chain in acc]
            total = outputs[0]
            for output in outputs[1:]:
                total = total + output
            sums[lanes(part * LANES)] = total
    return k.function


def launch_threads() -> Any:
    """`(sums, count, parts)`: have `parts` threads start and end `count` times, each adding 1 to its own numbers."""
    with Kernel() as k:
        sums, count, parts = k.arguments(sums="int32", count=SIZE, parts=SIZE)
        with serial(count), parallel(parts) as part:
            where = lanes(part * LANES)
            sums[where] = sums[where] + splat(T.int32(1))
    return k.function


LIMIT_LOOPS: dict[str, Callable[[Target], Any]] = {
    "touch_memory": lambda _: touch_memory(),
    "read_memory": lambda _: read_memory(),
    "multiply_integers": multiply_integers,
    "launch_threads": lambda _: launch_threads(),
}
"""The kernels by the names of their entry points."""


def _steps(count: Expr, parts: Expr) -> Expr:
    return count // (parts * STRIDE)
