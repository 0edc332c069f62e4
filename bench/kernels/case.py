"""A kernel at one size: how it is made, its arguments, its necessary work, and how long that took.

Knows nothing of particular kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from radixlm.compile.codegen.targets import Target

from ..limits import Limits
from ..native import Native, Value
from ..timing import best_s

_RUN_S = 0.03  # approximate time of a run; the fastest of several counts


@dataclass(frozen=True)
class Work:
    """The necessary work of one call: bytes that it reads and writes, and operations (a multiply-add is two)."""

    num_bytes: float
    integer_operations: float = 0.0
    float_operations: float = 0.0
    weight_bits: int = 4  # of the integers

    def least_s(self, limits: Limits) -> float:
        """Return the seconds at the machine's limits: memory and arithmetic at once, integers after floats."""
        integer_gop_per_s = limits.integer_gop_per_s if self.weight_bits == 4 else limits.integer8_gop_per_s
        arithmetic = self.integer_operations / integer_gop_per_s + self.float_operations / limits.float_gflop_per_s
        return max(self.num_bytes / limits.read_gb_per_s, arithmetic) / 1e9


@dataclass(frozen=True)
class Case:
    """A case; `values` and `steps` are `Native.call`'s; `most_calls` is how often it can advance by `steps`."""

    kernel: str  # cases with the same share the compiled function
    build: Callable[[], Any]
    size: str
    values: Sequence[Value]
    work: Work
    steps: Sequence[int] | None = None
    most_calls: int = 1 << 20


@dataclass(frozen=True)
class Timed:
    """The seconds of a call of a case."""

    case: Case
    seconds: float

    def result(self, limits: Limits) -> Result:
        """Return the time as speeds and as a share of the limits."""
        work, seconds = self.case.work, self.seconds
        return Result(
            self.case.kernel,
            self.case.size,
            seconds,
            work.num_bytes / seconds / 1e9,
            (work.integer_operations + work.float_operations) / seconds / 1e9,
            limits.read_gb_per_s,
            work.least_s(limits) / seconds,
        )


@dataclass(frozen=True)
class Result:
    """The time of a case, and its share of the machine's limit."""

    kernel: str
    size: str
    seconds: float
    gb_per_s: float
    gop_per_s: float
    limit_gb_per_s: float
    share: float  # of the time at the limits


def compile_cases(cases: Sequence[Case], target: Target) -> Native:
    """Compile all kernels of the cases into one library."""
    builds = {case.kernel: case.build for case in cases}
    return Native({_symbol(kernel): build() for kernel, build in builds.items()}, target)


def measure(case: Case, native: Native, runs: int = 9) -> Timed:
    """Run a case of the compiled kernels `runs` times, each of many calls; return the time of a call in the fastest."""

    def run(count: int) -> None:
        native.call(_symbol(case.kernel), case.values, case.steps, count)

    few = min(2, case.most_calls)
    estimate = best_s(lambda: run(few), 2) / few
    count = max(1, min(case.most_calls, int(_RUN_S / estimate)))
    return Timed(case, best_s(lambda: run(count), runs) / count)


def _symbol(kernel: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in kernel)
