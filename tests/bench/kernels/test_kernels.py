"""The loops that measure: they compute what they say, and every case calls its kernel as the kernel wants it."""

from __future__ import annotations

import numpy as np
import pytest
from radixlm.compile.codegen.builder import SIZE, Kernel, serial
from radixlm.compile.codegen.targets import Target, find_target

from bench.kernels.attention import attention_cases
from bench.kernels.case import Case, Work, compile_cases, measure
from bench.kernels.linear import Arena, linear_cases
from bench.kernels.pages import page_cases
from bench.kernels.rows import row_cases
from bench.limits import Limits, ReadBandwidth, measure_limits
from bench.native import Native, aligned

LIMITS = Limits(2, 50.0, 40.0, 2000.0, 1000.0, 500.0, 250.0, 1000.0, 500.0)


@pytest.fixture(scope="module")
def target() -> Target:
    return find_target("native")


def test_repeated_calls_move_through_arrays_and_sizes(target: Target) -> None:
    with Kernel() as k:
        x, y, n = k.arguments(x="int32", y="int32", n=SIZE)
        with serial(1):
            y[n] = y[n] + x[0]
    x, y = np.arange(10, dtype=np.int32), np.zeros(10, np.int32)
    Native({"add": k.function}, target).call("add", [x, y, 1], steps=[2, 0, 1], count=4)
    assert y.tolist() == [0, 0, 2, 4, 6, 0, 0, 0, 0, 0]


def test_bandwidth_is_measured_by_reading_everything(target: Target) -> None:
    reading = ReadBandwidth(target, num_bytes=1 << 20)
    assert reading.measure(runs=1) > 0
    assert reading.sums.sum() == reading.memory.sum() > 0
    assert reading.measure(1, runs=1) > 0


def test_limits_are_positive(target: Target) -> None:
    limits = measure_limits(target, read_bytes=1 << 20, turns=100, runs=2)
    assert min(vars(limits).values()) > 0


def test_the_least_time_is_that_of_the_slower_of_memory_and_arithmetic() -> None:
    assert Work(50e9).least_s(LIMITS) == 1.0
    assert Work(50e9, integer_operations=4e12).least_s(LIMITS) == 2.0
    assert Work(50e9, integer_operations=4e12, weight_bits=8).least_s(LIMITS) == 4.0
    assert Work(50e9, integer_operations=1e12, float_operations=1e12).least_s(LIMITS) == 2.5


def first_of_each_kernel(cases: list[Case]) -> list[Case]:
    return list({case.kernel: case for case in reversed(cases)}.values())


def test_every_kind_of_case_runs(target: Target) -> None:
    small = Arena(num_bytes=4 << 20, most_rows=4)
    linears = (case for case in linear_cases(target, small) if "4096" not in case.kernel and "49152" not in case.kernel)
    chosen = [case for case in linears if case.kernel.split()[1] in ("q4_g32_min", "bf16")]
    few_rows = [case for case in row_cases(target, small) if case.size == "8 rows" and "wide" not in case.kernel]
    few_rows = [case for case in few_rows if not case.kernel.startswith("embedding") or case.kernel.endswith("g32_min")]
    attention = [
        case for case in attention_cases(target, cold_bytes=8 << 20) if case.size in ("decode after 99", "8 rows")
    ]
    pages = [case for case in page_cases(cold_bytes=16 << 20) if case.size == "8 pages"]
    cases = first_of_each_kernel([*chosen[:2], *chosen[-2:], *few_rows, *attention, *pages])
    native = compile_cases(cases, target)
    for case in cases:
        result = measure(case, native, runs=1).result(LIMITS)
        assert result.seconds > 0
        assert result.gb_per_s > 0
        assert result.share > 0


def test_aligned_copies_begin_on_a_cache_line() -> None:
    copy = aligned(np.arange(5, dtype=np.int16).reshape(5, 1))
    assert copy.tolist() == [0, 1, 2, 3, 4]
    assert copy.ctypes.data % 64 == 0
