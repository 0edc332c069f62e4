"""Loops that measure a machine's limits: read memory, multiply integers, start threads and wait for them.

A module contains them with its model, for the same instructions, so that measuring needs no compiler on the serving
machine. `parts` is the number of threads, each with a contiguous part of the memory. Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script.ir_builder import tirx as T

from .codegen.builder import SIZE, Kernel, bound, parallel, prefetch, registers, serial
from .codegen.targets import Target
from .codegen.vector import LANES, Expr, lanes, splat
from .kernels.integer_dot import dot_of

STRIDE = 8 * LANES  # int32 per step of the reading loop
_AHEAD = 512  # int32; hardware prefetch stops at a page of 4 KiB
_PAGE = 1024  # int32
_MAX_LEVEL = 15  # of 4-bit weights


def touch_memory() -> Any:
    """Return the PrimFunc `(memory, sums, count, parts)` that writes to each page of `memory`.

    It uses the threads of `read_memory`. A page belongs to the NUMA node whose CPU first wrote it.
    """
    with Kernel() as k:
        memory, _, count, parts = k.arguments(memory="int32", sums="int32", count=SIZE, parts=SIZE)
        with parallel(parts) as part:
            size = bound(_num_steps(count, parts) * STRIDE)
            with serial((size + (_PAGE - 1)) // _PAGE) as page:
                memory[part * size + page * _PAGE] = T.int32(1)
    return k.function


def read_memory() -> Any:
    """Return the PrimFunc `(memory, sums, count, parts)` that adds up `count` int32.

    A remainder of the division by `parts * STRIDE` is left out.
    """
    with Kernel() as k:
        memory, sums, count, parts = k.arguments(memory="int32", sums="int32", count=SIZE, parts=SIZE)
        with parallel(parts) as part:
            acc = registers(STRIDE, "int32")
            for i in range(0, STRIDE, LANES):
                acc[lanes(i)] = splat(T.int32(0))
            steps = bound(_num_steps(count, parts))
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
    """Return the PrimFunc `(sums, count, parts)` that multiplies and adds `count` times in each part, in registers.

    Args:
        max_level: largest level of the weights, which decides the instruction on some targets.
    """
    dot = dot_of(target.integer_dot, max_level)
    # latency times throughput of a multiply-add is 8 to 10; AVX2 has only 16 registers
    num_chains = (12 if "avx512f" in target.features else 8) // dot.num_pieces
    with Kernel() as k:
        sums, count, parts = k.arguments(sums="int32", count=SIZE, parts=SIZE)
        with parallel(parts) as part:
            size = dot.piece_lanes
            # buffers of one accumulator each, so that they stay in registers
            acc = [registers(dot.accumulator_lanes, "int32") for _ in range(num_chains)]
            pieces = [lanes(piece * size, size) for piece in range(dot.num_pieces)]
            for chain in acc:
                for where in pieces:
                    chain[where] = splat(T.int32(0), size)
            with serial(count // (num_chains * LANES * 4)) as turn:
                x = T.Cast("int32", turn)
                for number, chain in enumerate(acc):
                    for where in pieces:
                        weights = T.broadcast(T.uint8(number + 1 + dot.zero), dot.piece_bytes)
                        chain[where] = dot.accumulate(chain[where], weights, x)
            outputs = [dot.outputs([chain[where] for where in pieces]) for chain in acc]
            total = outputs[0]
            for output in outputs[1:]:
                total = total + output
            sums[lanes(part * LANES)] = total
    return k.function


def launch_threads() -> Any:
    """Return the PrimFunc `(sums, count, parts)` that starts and joins `parts` threads `count` times.

    Each thread adds 1 to its own numbers.
    """
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


def _num_steps(count: Expr, parts: Expr) -> Expr:
    """Return the number of steps of the reading loop in each part."""
    return count // (parts * STRIDE)
