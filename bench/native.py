"""Compile kernels into this process, and call them repeatedly on the next part of their arrays, without Python between.

Knows how kernels are exported and called, not what they compute.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tvm_ffi
from radixlm.compile.codegen.kernel_cache import KernelCache
from radixlm.compile.codegen.library import build_library, kernel_symbol
from radixlm.compile.codegen.targets import Target
from radixlm.compile.weights.layout import ALIGNMENT
from radixlm.runtime.model.library import choose_num_threads
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

HUGE_PAGE = 2 << 20
Value = np.ndarray | int | None


def num_threads() -> int:
    """Return the number of threads that kernels use, as in the runtime."""
    return choose_num_threads()


class Native:
    """`kernels` compiled for `target`, by name."""

    def __init__(self, kernels: Mapping[str, Any], target: Target) -> None:
        self._dtypes = {name: _dtypes(kernel) for name, kernel in kernels.items()}
        functions = []
        for name, kernel in kernels.items():
            functions += [kernel, _repeated(name, self._dtypes[name], kernel_symbol(kernel, target))]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "kernels.so"
            build_library(functions, target, KernelCache.of_user()).export(path)
            self._library = tvm_ffi.load_module(str(path))
        self._library["set_num_threads"](num_threads())
        self._nothing = aligned(np.zeros(ALIGNMENT, np.uint8))

    def call(self, name: str, values: Sequence[Value], steps: Sequence[int] | None = None, count: int = 1) -> None:
        """Call a kernel `count` times.

        Args:
            values: arrays (None for one that it does not read) and sizes, in the kernel's order.
            steps: how many elements each array's beginning, or how much each size, advances from call to call.
        """
        dtypes = self._dtypes[name]
        arguments = [
            value if dtype is None else tvm_ffi.from_dlpack(self._flat(value, dtype))
            for value, dtype in zip(values, dtypes, strict=True)
        ]
        self._library[name](*arguments, *(steps or [0] * len(dtypes)), count)

    def _flat(self, value: Value, dtype: str) -> np.ndarray:
        assert not isinstance(value, int)
        return (self._nothing if value is None else value).reshape(-1).view(dtype)


def aligned(array: np.ndarray) -> np.ndarray:
    """Return a flat copy that begins on a huge page if it fills one, else on a cache line."""
    alignment = HUGE_PAGE if array.nbytes >= HUGE_PAGE else ALIGNMENT
    memory = np.zeros(max(array.nbytes, 1) + alignment, np.uint8)
    start = -memory.ctypes.data % alignment
    copy: np.ndarray = memory[start : start + array.nbytes].view(array.dtype)
    copy[...] = array.reshape(-1)
    return copy


def _dtypes(kernel: Any) -> list[str | None]:
    """Return the dtype that each parameter points to; None for a size."""
    return [str(p.ty.element_type) if hasattr(p.ty, "element_type") else None for p in kernel.params]


def _repeated(name: str, dtypes: list[str | None], symbol: str) -> Any:
    """Make an entry point that loops over a kernel with bare addresses."""
    with IRBuilder() as builder:
        with T.prim_func(s_tir=True):
            T.func_attr({"tirx.noalias": True, "global_symbol": name, "tirx.is_scheduled": True})
            handles = [T.arg(f"a{i}", T.int64() if dtype is None else T.handle()) for i, dtype in enumerate(dtypes)]
            steps = [T.arg(f"step{i}", T.int64()) for i in range(len(dtypes))]
            count = T.arg("count", T.int64())
            buffers = [
                None if dtype is None else T.match_buffer(handle, (T.int64(),), dtype)
                for handle, dtype in zip(handles, dtypes, strict=True)
            ]
            with T.serial(count) as i:
                values = [
                    handle + i * step if buffer is None else T.address_of(buffer[i * step])
                    for handle, buffer, step in zip(handles, buffers, steps, strict=True)
                ]
                T.evaluate(T.call_extern("int32", symbol, *values))
        return builder.get()
