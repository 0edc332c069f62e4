"""The threads of a library on macOS's calls, which are made of Linux's here."""

from __future__ import annotations

import ctypes
import platform
import time
from pathlib import Path

import numpy as np
import pytest
import tvm_ffi
from radixlm.compile.codegen import library
from radixlm.compile.codegen.builder import SIZE, Kernel, parallel
from radixlm.compile.codegen.kernel_cache import KernelCache
from radixlm.compile.codegen.library import Library, build_library, kernel_symbol
from radixlm.compile.codegen.targets import find_target
from tvm.script.ir_builder import tirx as T

CALLS = Path(__file__).with_name("macos_calls.ll")
SHIM = Path(library.__file__).with_name("thread_pool_macos.ll")
NUM_ITEMS = 1000


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the stand-ins for macOS's calls are of x86-64")
def test_threads_sleep_wake_and_compute_each_item_once(tmp_path: Path) -> None:
    with Kernel() as k:
        counts, n = k.arguments(counts="int32", n=SIZE)
        with parallel(n) as i:
            counts[i] = counts[i] + T.int32(1)
    target = find_target("native")
    text = SHIM.read_text()
    assert "arm64-apple-macos14.4-elf" in text
    texts = (text.replace("arm64-apple-macos14.4-elf", target.triple), CALLS.read_text())
    beside = [library._object_file(library._loaded_ir(text)) for text in texts]
    path = tmp_path / "counter.so"
    Library((*build_library([k.function], target, KernelCache.of_user()).objects, *beside)).export(path)
    opened = ctypes.CDLL(str(path))
    count, sleeps = getattr(opened, kernel_symbol(k.function, target)), ctypes.c_int32.in_dll(opened, "num_sleeps")
    set_num_threads = tvm_ffi.load_module(str(path))["set_num_threads"]
    result = np.zeros(NUM_ITEMS + 1, np.int32)
    for num_threads in (2, 5, 1, 3):
        set_num_threads(num_threads)
        before = sleeps.value
        for _ in range(50):
            count(ctypes.c_void_p(result.ctypes.data), ctypes.c_int64(NUM_ITEMS))
        while sleeps.value < before + num_threads - 1:  # workers sleep when there has been nothing to do
            time.sleep(0.001)
        count(ctypes.c_void_p(result.ctypes.data), ctypes.c_int64(NUM_ITEMS))  # and wake
    set_num_threads(0)
    assert set(result[:NUM_ITEMS]) == {4 * 51} and result[NUM_ITEMS] == 0
