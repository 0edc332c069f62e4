"""The threads of a library: each item of a loop is computed once, whoever takes it, and always with the same bits."""

from __future__ import annotations

import ctypes
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tvm_ffi
from hypothesis import given, settings
from hypothesis import strategies as st
from radixlm.compile import compile_model
from radixlm.compile.codegen import library
from radixlm.compile.codegen.builder import SIZE, Kernel, parallel, registers, serial
from radixlm.compile.codegen.kernel_cache import KernelCache
from radixlm.compile.codegen.library import build_library, kernel_symbol
from radixlm.compile.codegen.targets import find_target
from radixlm.runtime.artifact import MODULE, Artifact
from radixlm.runtime.model.batch import Batch
from radixlm.runtime.model.model_runner import ModelRunner
from tvm.script.ir_builder import tirx as T

MOST_ITEMS = 5000
Task = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)
Launch = ctypes.CFUNCTYPE(ctypes.c_int32, Task, ctypes.c_void_p, ctypes.c_int32)
REPLACEABLE_POOL = """
@__TVMBackendParallelLaunch = global ptr null
define i32 @parallel_items(i64 %count) {
  ret i32 0
}
define i32 @__tvm_ffi_set_num_threads(ptr %self, ptr %arguments, i32 %num_arguments, ptr %result) {
  ret i32 0
}
"""


class Environment(ctypes.Structure):
    """What a task is told: an unused pointer, and how many tasks there are."""

    _fields_ = (("unused", ctypes.c_void_p), ("num_tasks", ctypes.c_int32))


class Counter:
    """A library whose kernel adds one to each of `n` counts; `set_num_threads(n)`."""

    def __init__(self, folder: Path) -> None:
        with Kernel() as k:
            counts, n = k.arguments(counts="int32", n=SIZE)
            with parallel(n) as i:
                counts[i] = counts[i] + T.int32(1)
        target = find_target("native")
        build_library([k.function], target, KernelCache.of_user()).export(folder / "counter.so")
        self._module = tvm_ffi.load_module(str(folder / "counter.so"))
        self._count = getattr(ctypes.CDLL(str(folder / "counter.so")), kernel_symbol(k.function, target))
        self.set_num_threads = self._module["set_num_threads"]

    def count(self, n: int, times: int) -> np.ndarray:
        counts = np.zeros(MOST_ITEMS + 1, np.int32)
        for _ in range(times):
            self._count(ctypes.c_void_p(counts.ctypes.data), ctypes.c_int64(n))
        return counts


@pytest.fixture(scope="module")
def counter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Counter]:
    counter = Counter(tmp_path_factory.mktemp("counter"))
    yield counter
    counter.set_num_threads(0)


@pytest.fixture
def busy_processors() -> Iterator[None]:
    """Processes that compete for every processor, so that threads lose theirs in the middle of a task."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    yield
    for other in others:
        other.kill()
        other.wait()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 7), st.integers(0, MOST_ITEMS), st.integers(1, 40))
def test_each_item_is_computed_once(counter: Counter, num_threads: int, n: int, times: int) -> None:
    counter.set_num_threads(num_threads)
    expected = np.where(np.arange(MOST_ITEMS + 1) < n, times, 0)
    np.testing.assert_array_equal(counter.count(n, times), expected)


def test_each_item_is_computed_once_on_busy_processors(counter: Counter, busy_processors: None) -> None:
    counter.set_num_threads(4)
    for n in (1, 2, 3, 31, 127, 128, 129, MOST_ITEMS):
        assert set(counter.count(n, 300)[:n]) == {300}


def test_several_callers_at_once(counter: Counter) -> None:
    counter.set_num_threads(3)
    with ThreadPoolExecutor(4) as callers:
        for counts in callers.map(lambda n: counter.count(n, 500)[:n], (40, 41, 900, 2)):
            assert set(counts) == {500}


def test_scratch_memory_belongs_to_one_task_at_a_time(tmp_path: Path) -> None:
    """Blocks are kept for the next task; four callers and their threads ask for two sizes each."""
    with Kernel() as k:
        sums, n = k.arguments(sums="int32", n=SIZE)
        with parallel(n) as i:
            first, second = registers(300, "int32"), registers(700, "int32")  # more than TVM puts on the stack
            with serial(300) as j:
                first[j] = T.Cast("int32", i + j)
            with serial(700) as j:
                second[j] = first[j % 300] * 2
            sums[i] = T.int32(0)
            with serial(700) as j:
                sums[i] = sums[i] + second[j]
    target = find_target("native")
    build_library([k.function], target, KernelCache.of_user()).export(tmp_path / "scratch.so")
    set_num_threads = tvm_ffi.load_module(str(tmp_path / "scratch.so"))["set_num_threads"]
    kernel = getattr(ctypes.CDLL(str(tmp_path / "scratch.so")), kernel_symbol(k.function, target))

    def computed(count: int) -> np.ndarray:
        sums = np.zeros(count, np.int32)
        for _ in range(20):
            kernel(ctypes.c_void_p(sums.ctypes.data), ctypes.c_int64(count))
        return sums

    expected = np.array([2 * sum(i + j % 300 for j in range(700)) for i in range(200)], np.int32)
    for num_threads in (1, 3):
        set_num_threads(num_threads)
        with ThreadPoolExecutor(4) as callers:
            for found in callers.map(computed, (200, 150, 7, 64)):
                np.testing.assert_array_equal(found, expected[: len(found)])
    set_num_threads(0)


def in_any_order(rng: random.Random) -> Callable[..., int]:
    """Another launch: any number of tasks, one after the other in any order."""

    def launch(task: Callable[..., int], data: int, _: int) -> int:
        num_tasks = rng.choice((1, 2, 3, 7, 64))
        environment = Environment(None, num_tasks)
        numbers = rng.sample(range(num_tasks), num_tasks)
        return max(task(number, ctypes.addressof(environment), data) for number in numbers)

    return launch


def logits(runner: ModelRunner) -> np.ndarray:
    """Of the last token of a prompt, and of three more tokens one by one."""
    rows = []
    for start, stop in ((0, 140), (140, 141), (141, 144)):
        positions = np.arange(start, stop, dtype=np.int32)
        pages = np.arange(-(-stop // 16), dtype=np.int32)[None]
        last = np.array([stop - start - 1], np.int32)
        ids = positions * 7 % 90
        batch = Batch(ids, positions, positions, positions * 0, pages, positions + np.int32(1), last)
        rows.append(runner.forward(batch).copy())
    return np.concatenate(rows).view(np.uint32)


@pytest.fixture
def with_replaceable_pool(tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An artifact whose loops go to TVM's pool until another launch is set."""
    (tmp_path / "pool.ll").write_text(REPLACEABLE_POOL)
    monkeypatch.setattr(library, "_THREAD_POOL", tmp_path / "pool.ll")
    return compile_model(tiny_source, tmp_path / "tiny.radixlm", quantize="q4").path


def test_neither_cut_nor_order_of_tasks_changes_bits(with_replaceable_pool: Path) -> None:
    runner = ModelRunner(Artifact.open(with_replaceable_pool), num_pages=16)
    module = ctypes.CDLL(str((with_replaceable_pool / MODULE).resolve()))
    expected = logits(runner)
    assert len({row.tobytes() for row in expected}) == len(expected)
    for seed in range(6):
        launch = Launch(in_any_order(random.Random(seed)))
        address = ctypes.cast(launch, ctypes.c_void_p).value
        ctypes.c_void_p.in_dll(module, "__TVMBackendParallelLaunch").value = address
        np.testing.assert_array_equal(logits(runner), expected)
    runner.close()


def test_the_number_of_threads_does_not_change_bits(tiny_artifact: Path, busy_processors: None) -> None:
    found = []
    for num_threads in (1, 2, 5):
        runner = ModelRunner(Artifact.open(tiny_artifact), num_pages=16, num_threads=num_threads)
        found.append(logits(runner))
        runner.close()
    np.testing.assert_array_equal(found[1], found[0])
    np.testing.assert_array_equal(found[2], found[0])
