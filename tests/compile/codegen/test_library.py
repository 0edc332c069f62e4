"""A library linked from cached objects: the same bytes, and the same bits as a module that is compiled at once."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from radixlm.compile import compile_model
from radixlm.compile.codegen import library
from radixlm.compile.codegen.builder import SIZE, SUMS_IN_ORDER, Kernel, parallel, serial
from radixlm.compile.codegen.kernel_cache import KernelCache
from radixlm.compile.codegen.library import build_library, kernel_symbol
from radixlm.compile.codegen.targets import TARGETS, Target, find_target
from radixlm.compile.kernels.integer_linear import integer_linear
from radixlm.compile.kernels.linear import LinearSpec
from radixlm.compile.weights.kinds import Scales, WeightKind
from radixlm.runtime.artifact import MODULE
from radixlm.runtime.errors import CompileError
from tvm.ir import Call, GlobalVar
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

HERE = find_target("native")


@pytest.fixture
def compiled_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Take what is missing in a test's cache from the user's, where other tests left it; undo ends that."""
    users, compiled = KernelCache.of_user(), library._compile

    def found_or_compiled(key: str, function: Any, target: Target) -> bytes:
        if (found := users.get(key)) is None:
            users.put(key, found := compiled(key, function, target))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(library, "_compile", found_or_compiled)
        yield patch


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KernelCache:
    """An empty cache that is the user's meanwhile."""
    monkeypatch.setenv("RADIXLM_KERNEL_CACHE", str(tmp_path / "kernels"))
    return KernelCache.of_user()


def scaled(
    factor: float, loop: Callable[[Any], AbstractContextManager[Any]] = parallel, *, sums_in_order: bool = False
) -> Any:
    """A kernel of sums and products that LLVM may fuse: `x = x * factor + x * x`."""
    with Kernel(sums_in_order=sums_in_order) as k:
        x, n = k.arguments(x="float32", n=SIZE)
        with loop(n) as i:
            x[i] = x[i] * T.float32(factor) + x[i] * x[i]
    return k.function


def entry(call: Any) -> Any:
    """An entry point `main(x)` whose body `call` makes, given the address of `x` and its size."""
    with IRBuilder() as builder:
        with T.prim_func(s_tir=True):
            T.func_attr({"tirx.noalias": True, "global_symbol": "main", "tirx.is_scheduled": True})
            x, size = T.arg("x", T.handle()), T.int64()
            buffer = T.match_buffer(x, (size,), "float32")
            T.evaluate(call(T.address_of(buffer[0]), size))
        return builder.get()


def compiled_at_once(kernel: Any) -> Any:
    """The obvious way: kernel and entry point in one module, without objects, cache and linker."""
    variable, target = GlobalVar("kernel"), HERE.tvm_target()
    main = entry(lambda *arguments: Call(variable, list(arguments), ret_ty="int32"))
    module = tvm.IRModule({"main": main, variable: kernel})
    module = tvm.tirx.transform.BindTarget(target.with_host(target))(module)
    pipeline, finalize_host, _ = tvm.tirx.get_default_tir_pipeline(target)
    with tvm.transform.PassContext(disabled_pass=library._DISABLED_PASSES):
        module = library._name_the_device()(pipeline(module))
    return library.tir_to_runtime(finalize_host()(module), {}, target)["main"]


def aligned(numbers: np.ndarray) -> np.ndarray:
    """A copy at an address that entry points expect: a multiple of 64."""
    memory = np.zeros(numbers.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    copy: np.ndarray = memory[start : start + numbers.nbytes].view(numbers.dtype)
    copy[:] = numbers
    return copy


def linked(kernel: Any, cache: KernelCache, file: Path) -> Any:
    symbol = kernel_symbol(kernel, HERE)
    main = entry(lambda *arguments: T.call_extern("int32", symbol, *arguments))
    built = build_library([kernel, main], HERE, cache)
    built.export(file)
    return tvm_ffi.load_module(str(file))["main"]


def test_kernels_that_need_an_option_of_the_process_are_compiled_alone(
    cache: KernelCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, two_at_once = threading.Lock(), threading.Barrier(2)
    running: dict[str, bool] = {}  # whether it needs the option
    met: set[tuple[bool, bool]] = set()  # of two that ran at once
    num_alone = 0

    def compiled(key: str, function: Any, target: Target) -> bytes:
        nonlocal num_alone
        needs = not isinstance(function, str) and SUMS_IN_ORDER in function.attrs
        with lock:
            met.update((needs, other) for other in running.values())
            running[key] = needs
        if needs:
            time.sleep(0.02)
            num_alone += 1
        elif not isinstance(function, str):
            two_at_once.wait(timeout=60)
        with lock:
            del running[key]
        return b""

    monkeypatch.setattr(library, "_compile", compiled)
    monkeypatch.setattr(library, "default_num_threads", lambda: 4)
    kernels = [scaled(factor, sums_in_order=factor % 2 == 0) for factor in range(12)]
    build_library(kernels, HERE, cache)
    assert num_alone == 6
    assert met == {(False, False)}


def test_two_libraries_are_not_compiled_at_once(cache: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, order = threading.Event(), threading.Event(), list[str]()

    def compiled(key: str, function: Any, target: Target) -> bytes:
        if target.name == "x86-64-v3":
            begun.set()
            assert go_on.wait(60)
        order.append(target.name)
        return b""

    monkeypatch.setattr(library, "_compile", compiled)
    first = threading.Thread(target=build_library, args=([scaled(0.1)], find_target("x86-64-v3"), cache))
    second = threading.Thread(target=build_library, args=([scaled(0.2)], find_target("x86-64-v2"), cache))
    first.start()
    assert begun.wait(60)
    second.start()
    second.join(0.2)
    assert order == []
    go_on.set()
    first.join(60)
    second.join(60)
    assert order.index("x86-64-v2") == order.count("x86-64-v3") == 2


def test_sums_in_order_make_shorter_code() -> None:
    """MXFP4's products with AVX2: sums in trees are moved to memory and back."""
    target, spec = find_target("x86-64-v3"), LinearSpec(WeightKind("fp4", Scales(32, dtype="e8m0")), 64, 2880, 64)
    kernel = integer_linear(spec, target)
    in_trees = kernel.without_attr(SUMS_IN_ORDER)
    sizes = [len(library._compile("key", function, target)) for function in (kernel, in_trees)]
    assert sizes[0] < sizes[1]


def test_a_library_that_cannot_be_written_is_an_error(cache: KernelCache, tmp_path: Path) -> None:
    built = build_library([scaled(0.1)], HERE, cache)
    with pytest.raises(CompileError, match=r"nowhere cannot be written \(No such file or directory\)"):
        built.export(tmp_path / "nowhere" / "model.so")


def test_a_linked_library_gives_the_bits_of_a_module_compiled_at_once(cache: KernelCache, tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).standard_normal(10_000).astype(np.float32)
    expected, cold, warm = aligned(numbers), aligned(numbers), aligned(numbers)
    compiled_at_once(scaled(0.1, serial))(tvm_ffi.from_dlpack(expected))
    for name, actual in (("cold.so", cold), ("warm.so", warm)):  # a library that is loaded must not be written over
        linked(scaled(0.1), cache, tmp_path / name)(tvm_ffi.from_dlpack(actual))
    assert not np.array_equal(expected, numbers)
    np.testing.assert_array_equal(cold.view(np.uint32), expected.view(np.uint32))
    np.testing.assert_array_equal(warm.view(np.uint32), expected.view(np.uint32))


def test_a_compile_with_the_cache_writes_the_same_module_and_compiles_nothing(
    compiled_before: pytest.MonkeyPatch,
    cache: KernelCache,
    tiny_source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cold = compile_model(tiny_source, tmp_path / "cold.radixlm", quantize="q4").path
    compiled_before.undo()
    assert cache.stats().num_objects > 15

    def fail(*_: Any) -> bytes:
        raise AssertionError("everything is in the cache")

    with monkeypatch.context() as patch:
        patch.setattr(library, "_compile", fail)
        warm = compile_model(tiny_source, tmp_path / "warm.radixlm", quantize="q4").path
    assert (cold / MODULE).read_bytes() == (warm / MODULE).read_bytes()

    for file in cache.directory.iterdir():  # a damaged object is compiled again
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    again = compile_model(tiny_source, tmp_path / "again.radixlm", quantize="q4").path
    assert (cold / MODULE).read_bytes() == (again / MODULE).read_bytes()


def test_another_context_length_shares_the_kernels(
    tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: list[set[str]] = []
    get = KernelCache.get
    monkeypatch.setattr(KernelCache, "get", lambda cache, key: (keys[-1].add(key), get(cache, key))[1])
    for context_length in (128, 64):
        keys.append(set())
        compile_model(tiny_source, tmp_path / "any.radixlm", quantize="q4", context_length=context_length)
    long, short = keys
    assert len(long) > 15 and 0 < len(short - long) <= len(long) // 2


@pytest.mark.usefixtures("compiled_before")
def test_compiling_needs_no_folder_for_the_cache(
    tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("RADIXLM_KERNEL_CACHE", str(tmp_path / "file"))
    assert compile_model(tiny_source, tmp_path / "tiny.radixlm", quantize="q4").path.is_dir()


def test_symbols_are_of_what_a_kernel_computes_and_of_the_target() -> None:
    assert kernel_symbol(scaled(0.5), HERE) == kernel_symbol(scaled(0.5), HERE)
    one_bit_more = float(np.nextafter(np.float32(0.5), np.float32(1)))
    assert kernel_symbol(scaled(0.5), HERE) != kernel_symbol(scaled(one_bit_more), HERE)
    assert kernel_symbol(scaled(0.5), HERE) != kernel_symbol(scaled(0.5, sums_in_order=True), HERE)
    symbols = {kernel_symbol(scaled(0.5), target) for target in TARGETS.values()}
    assert len(symbols) == len({str(target.llvm_options) for target in TARGETS.values()})


def test_symbols_are_the_same_in_every_process() -> None:
    program = (
        "from radixlm.compile.codegen.library import kernel_symbol\n"
        "from radixlm.compile.codegen.targets import TARGETS\n"
        "from radixlm.compile.kernels.sampling.top_k import top_k\n"
        "print(kernel_symbol(top_k(64), TARGETS['x86-64-v3']))\n"
    )
    runs = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
        for _ in range(2)
    ]
    assert runs[0].stdout == runs[1].stdout != ""
