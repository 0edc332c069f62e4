"""What this machine can do at most, measured in the process that is measured against it, by loops of the same compiler.

Read bandwidth of memory, integer dot products and float32 multiply-adds in registers; with one thread, and with all of
TVM's pool. The best of many short runs: what other tenants of the machine take away is not its limit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from radixlm.compile.codegen.builder import SIZE, Kernel, parallel, registers, serial
from radixlm.compile.codegen.targets import Target
from radixlm.compile.codegen.vector import LANES, const, fma, lanes, splat
from radixlm.compile.kernels.integer_dot import dot_of
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.model.memory import map_weights
from tvm.script.ir_builder import tirx as T

from .native import Native, aligned, num_threads
from .timing import best_s

Result = TypeVar("Result")
READ_BYTES = 384 << 20  # far more than any cache holds
_STRIDE = 8 * LANES  # int32 of one step of the reading loop
_TURNS = 200_000


@dataclass(frozen=True)
class Limits:
    """The best that was seen; `thread` is one thread, the rest all threads.

    Integers are of weights in 4 bits, and `integer8` of those in 8, which not every target multiplies as fast.
    """

    num_threads: int
    read_gb_per_s: float
    read_gb_per_s_thread: float
    integer_gop_per_s: float
    integer_gop_per_s_thread: float
    float_gflop_per_s: float
    float_gflop_per_s_thread: float
    integer8_gop_per_s: float
    integer8_gop_per_s_thread: float


class ReadBandwidth:
    """Memory that is read again and again: an artifact's weights as its server has them mapped, or memory of its own.

    On a virtual machine one piece of memory is read at 34 GB/s and another at 57 in the same second, and mostly each at
    its own speed from one second to the next.
    """

    def __init__(self, target: Target, num_bytes: int = READ_BYTES, *, weights_of: Artifact | None = None) -> None:
        self._native = Native({"read": _read()}, target)
        if weights_of is None:
            self.memory = aligned(np.zeros(num_bytes // 4, np.int32))
            self.memory[::1024] = 1  # pages that were never written are all the same page of zeros
        else:
            weights = map_weights(weights_of)
            self.memory = weights[: weights.nbytes // 4 * 4].view(np.int32)
        self.sums = aligned(np.zeros(num_threads() * LANES, np.int32))

    def measure(self, parts: int | None = None, runs: int = 10) -> float:
        """GB/s of the best of `runs`; `parts` is how many threads read, all by default."""
        memory, threads = self.memory, num_threads() if parts is None else parts
        seconds = best_s(lambda: self._native.call("read", [memory, self.sums, memory.size, threads]), runs)
        return memory.nbytes / seconds / 1e9


class LimitsMeter:
    """The machine's limits, with memory bandwidth measured again around each piece of work.

    On a shared machine it varies by half from one second to the next, with what other guests read and on which cores
    the host runs this process. So a share is of what could be read of an artifact's weights just before or just after.
    """

    def __init__(self, target: Target, artifact: Artifact | None = None) -> None:
        self.limits = measure_limits(target)
        self._reading = ReadBandwidth(target, weights_of=artifact)

    def around(self, work: Callable[[], Result], runs: int = 10) -> tuple[Result, Limits]:
        """What `work` returns, and the limits at that time."""
        before = self._reading.measure(runs=runs)
        result = work()
        now = max(before, self._reading.measure(runs=runs))
        return result, replace(self.limits, read_gb_per_s=now)


def measure_limits(target: Target, *, read_bytes: int = READ_BYTES, turns: int = _TURNS, runs: int = 40) -> Limits:
    """Measure for about three seconds; the loops compute what `target` computes with."""
    kernels = {f"integer{bits}": _integer_dots(target, bits) for bits in (4, 8)}
    native = Native(kernels | {"float": _multiply_adds(target)}, target)
    threads, reading = num_threads(), ReadBandwidth(target, read_bytes)
    sink = aligned(np.zeros(threads * LANES, np.float32))
    integers = aligned(np.zeros(threads * LANES, np.int32))

    def compute(name: str, out: np.ndarray, operations: int, parts: int) -> float:
        return parts * turns * operations / best_s(lambda: native.call(name, [out, turns, parts]), runs // 2) / 1e9

    operations4, operations8 = (_integer_chains(target, bits) * LANES * 4 * 2 for bits in (4, 8))
    float_operations = _float_chains(target) * LANES * 2
    return Limits(
        threads,
        reading.measure(runs=runs),
        reading.measure(1, runs),
        compute("integer4", integers, operations4, threads),
        compute("integer4", integers, operations4, 1),
        compute("float", sink, float_operations, threads),
        compute("float", sink, float_operations, 1),
        compute("integer8", integers, operations8, threads),
        compute("integer8", integers, operations8, 1),
    )


def _accumulators(target: Target) -> int:
    """Registers to add up in: latency times throughput of a multiply-add is 8 to 10, and AVX2 has 16 for all."""
    return 12 if "avx512f" in target.features else 8


def _integer_chains(target: Target, bits: int) -> int:
    """Independent sums of 16 outputs that fit the accumulators."""
    return _accumulators(target) // dot_of(target.integer_dot, (1 << bits) - 1).num_pieces


def _float_chains(target: Target) -> int:
    """Independent sums of 16 float32 that fit the accumulators."""
    return _accumulators(target) // (1 if "avx512f" in target.features else 2 if "avx" in target.features else 4)


def _read() -> Any:
    """`(memory, sums, count, parts)`: add up `count` int32, each of `parts` threads a contiguous part."""
    with Kernel() as k:
        memory, sums, count, parts = k.arguments(memory="int32", sums="int32", count=SIZE, parts=SIZE)
        with parallel(parts) as part:
            acc = registers(_STRIDE, "int32")
            for i in range(0, _STRIDE, LANES):
                acc[lanes(i)] = splat(T.int32(0))
            steps = count // (parts * _STRIDE)
            with serial(steps) as step:
                for i in range(0, _STRIDE, LANES):
                    acc[lanes(i)] = acc[lanes(i)] + memory[lanes((part * steps + step) * _STRIDE + i)]
            total = acc[lanes(0)]
            for i in range(LANES, _STRIDE, LANES):
                total = total + acc[lanes(i)]
            sums[lanes(part * LANES)] = total
    return k.function


def _integer_dots(target: Target, bits: int) -> Any:
    """`(out, turns, parts)`: chains of the target's dot product for such weights, 16 outputs times 4 inputs."""
    dot, chains = dot_of(target.integer_dot, (1 << bits) - 1), _integer_chains(target, bits)
    with Kernel() as k:
        out, turns, parts = k.arguments(out="int32", turns=SIZE, parts=SIZE)
        with parallel(parts) as part:
            size, width = dot.piece_lanes, dot.accumulator_lanes
            # buffers of one accumulator each: they stay in registers
            acc = [registers(width, "int32") for _ in range(chains)]
            for chain in range(chains):
                for piece in range(dot.num_pieces):
                    acc[chain][lanes(piece * size, size)] = splat(T.int32(0), size)
            with serial(turns) as turn:
                x = T.Cast("int32", turn)
                for chain in range(chains):
                    for piece in range(dot.num_pieces):
                        where = lanes(piece * size, size)
                        weights = T.broadcast(T.uint8(chain + 1), dot.piece_bytes)
                        acc[chain][where] = dot.accumulate(acc[chain][where], weights, x)
            outputs = [dot.outputs([a[lanes(piece * size, size)] for piece in range(dot.num_pieces)]) for a in acc]
            total = outputs[0]
            for output in outputs[1:]:
                total = total + output
            out[lanes(part * LANES)] = total
    return k.function


def _multiply_adds(target: Target) -> Any:
    """`(out, turns, parts)`: chains of 16 float32 multiply-adds."""
    with Kernel() as k:
        out, turns, parts = k.arguments(out="float32", turns=SIZE, parts=SIZE)
        with parallel(parts) as part:
            acc = [registers(LANES, "float32") for _ in range(_float_chains(target))]
            for a in acc:
                a[lanes(0)] = const(0)
            with serial(turns):
                for chain, a in enumerate(acc):
                    a[lanes(0)] = fma(a[lanes(0)], const(0.5 + chain / 64), const(1), target.has_fma)
            total = acc[0][lanes(0)]
            for a in acc[1:]:
                total = total + a[lanes(0)]
            out[lanes(part * LANES)] = total
    return k.function
