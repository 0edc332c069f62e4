"""Measure the limits of this machine, in the process that is compared with them, by loops of the same compiler.

Read bandwidth of memory, integer dot products and float32 multiply-adds in registers; with one thread, and with all.
The best of many short runs, because what other tenants of the machine take is not its limit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from radixlm.compile.codegen.builder import SIZE, Kernel, parallel, registers, serial
from radixlm.compile.codegen.targets import Target
from radixlm.compile.codegen.vector import LANES, const, fma, lanes
from radixlm.compile.machine_limits import multiply_integers, read_memory
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.model.memory import map_weights

from .native import Native, aligned, num_threads
from .timing import best_s

Result = TypeVar("Result")
READ_BYTES = 384 << 20  # far more than any cache holds
_TURNS = 200_000


@dataclass(frozen=True)
class Limits:
    """The best measured speeds; `thread` is one thread, the rest all threads.

    Integers are for weights in 4 bits, and `integer8` for those in 8, which not every target multiplies as fast.
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
    """A memory region that is read again and again: an artifact's weights as its server maps them, or its own memory.

    On a virtual machine one region is read at 34 GB/s and another at 57 in the same second, and mostly each at
    its own speed from one second to the next.
    """

    def __init__(self, target: Target, num_bytes: int = READ_BYTES, *, weights_of: Artifact | None = None) -> None:
        self._native = Native({"read": read_memory()}, target)
        if weights_of is None:
            self.memory = aligned(np.zeros(num_bytes // 4, np.int32))
            self.memory[::1024] = 1  # pages that were never written are all the same page of zeros
        else:
            weights = map_weights(weights_of)
            self.memory = weights[: weights.nbytes // 4 * 4].view(np.int32)
        self.sums = aligned(np.zeros(num_threads() * LANES, np.int32))

    def measure(self, parts: int | None = None, runs: int = 10) -> float:
        """Return GB/s of the best of `runs`; `parts` is the number of reading threads, all by default."""
        memory, threads = self.memory, num_threads() if parts is None else parts
        seconds = best_s(lambda: self._native.call("read", [memory, self.sums, memory.size, threads]), runs)
        return memory.nbytes / seconds / 1e9


class LimitsMeter:
    """The machine's limits, with memory bandwidth measured again around each piece of work.

    On a shared machine it varies by half from one second to the next, with what other guests read and on which cores
    the host runs this process. So a share refers to the bandwidth of an artifact's weights just before or just after.
    """

    def __init__(self, target: Target, artifact: Artifact | None = None) -> None:
        self.limits = measure_limits(target)
        self._reading = ReadBandwidth(target, weights_of=artifact)

    def around(self, work: Callable[[], Result], runs: int = 10) -> tuple[Result, Limits]:
        """Return the result of `work`, and the limits at that time."""
        before = self._reading.measure(runs=runs)
        result = work()
        now = max(before, self._reading.measure(runs=runs))
        return result, replace(self.limits, read_gb_per_s=now)


def measure_limits(target: Target, *, read_bytes: int = READ_BYTES, turns: int = _TURNS, runs: int = 40) -> Limits:
    """Measure for about three seconds; the loops use the instructions of `target`."""
    kernels = {f"integer{bits}": multiply_integers(target, (1 << bits) - 1) for bits in (4, 8)}
    native = Native(kernels | {"float": _multiply_adds(target)}, target)
    threads, reading = num_threads(), ReadBandwidth(target, read_bytes)
    sink = aligned(np.zeros(threads * LANES, np.float32))
    integers = aligned(np.zeros(threads * LANES, np.int32))

    def compute(name: str, out: np.ndarray, count: int, operations: int, parts: int) -> float:
        return parts * operations / best_s(lambda: native.call(name, [out, count, parts]), runs // 2) / 1e9

    def integer(bits: int, parts: int) -> float:
        count = turns * 768  # as many products as in each of `turns` of twelve chains
        return compute(f"integer{bits}", integers, count, 2 * count, parts)

    def floats(parts: int) -> float:
        return compute("float", sink, turns, turns * _float_chains(target) * LANES * 2, parts)

    return Limits(
        threads,
        reading.measure(runs=runs),
        reading.measure(1, runs),
        integer(4, threads),
        integer(4, 1),
        floats(threads),
        floats(1),
        integer(8, threads),
        integer(8, 1),
    )


def _accumulators(target: Target) -> int:
    """Return the number of accumulators: a multiply-add's latency times throughput, 8 to 10; AVX2 has 16 registers."""
    return 12 if "avx512f" in target.features else 8


def _float_chains(target: Target) -> int:
    """Return the number of independent sums of 16 float32 that fit the accumulators."""
    return _accumulators(target) // (1 if "avx512f" in target.features else 2 if "avx" in target.features else 4)


def _multiply_adds(target: Target) -> Any:
    """Return a function `(out, turns, parts)`: chains of 16 float32 multiply-adds."""
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
