"""Kernels compiled into this process and called with arrays. Knows how they are called, not what they do."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tvm_ffi
from radixlm.compile.kernels.layout import ALIGNMENT
from radixlm.compile.targets import Target
from radixlm.compile.tvm_build import build_library
from radixlm.runtime.cpu import default_num_threads
from tvm.ir import Call, GlobalVar
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

HUGE_PAGE = 2 << 20


def num_threads() -> int:
    """Threads of TVM's pool in this process; as the runtime does, the first question decides it for all."""
    return int(os.environ.setdefault("TVM_NUM_THREADS", str(default_num_threads())))


class Native(Mapping[str, Callable[..., None]]):
    """`kernels` compiled for `target`, by name: each takes arrays (with an element offset, if given as a pair) and
    sizes in its own order, and None for an array that it does not read."""

    def __init__(self, kernels: Mapping[str, Any], target: Target) -> None:
        num_threads()
        functions: dict[Any, Any] = {}
        for name, kernel in kernels.items():
            variable = GlobalVar(f"kernel_{name}")
            functions |= {variable: kernel, name: _exported(name, _dtypes(kernel), variable)}
        library = build_library(functions, target)
        self._calls = {name: _caller(library[name], _dtypes(kernel)) for name, kernel in kernels.items()}

    def __getitem__(self, name: str) -> Callable[..., None]:
        return self._calls[name]

    def __iter__(self) -> Any:
        return iter(self._calls)

    def __len__(self) -> int:
        return len(self._calls)


def aligned(array: np.ndarray) -> np.ndarray:
    """A flat copy that begins on a huge page if it fills one, else on a cache line: as artifacts lie, at best."""
    alignment = HUGE_PAGE if array.nbytes >= HUGE_PAGE else ALIGNMENT
    memory = np.zeros(max(array.nbytes, 1) + alignment, np.uint8)
    start = -memory.ctypes.data % alignment
    copy: np.ndarray = memory[start : start + array.nbytes].view(array.dtype)
    copy[...] = array.reshape(-1)
    return copy


def _dtypes(kernel: Any) -> list[str | None]:
    """What each parameter points to; None for a size."""
    return [str(p.ty.element_type) if hasattr(p.ty, "element_type") else None for p in kernel.params]


def _caller(function: Any, dtypes: list[str | None]) -> Callable[..., None]:
    nothing = {dtype: tvm_ffi.from_dlpack(np.zeros(1, dtype)) for dtype in dtypes if dtype is not None}
    tensors: dict[int, tuple[np.ndarray, Any]] = {}  # an array is converted once: it takes longer than a small kernel

    def tensor(array: np.ndarray | None, dtype: str) -> Any:
        if array is None:
            return nothing[dtype]
        if id(array) not in tensors:
            tensors[id(array)] = (array, tvm_ffi.from_dlpack(array.reshape(-1).view(dtype)))
        return tensors[id(array)][1]

    def call(*values: Any) -> None:
        function(*(v if d is None else tensor(v, d) for v, d in zip(values, dtypes, strict=True)))

    return call


def _exported(name: str, dtypes: list[str | None], kernel: Any) -> Any:
    """A function that others can call: kernels take bare addresses, and are private."""
    with IRBuilder() as builder:
        with T.prim_func(s_tir=True):
            T.func_attr({"tirx.noalias": True, "global_symbol": name, "tirx.is_scheduled": True})
            handles = [T.arg(f"a{i}", T.int64() if dtype is None else T.handle()) for i, dtype in enumerate(dtypes)]
            values = [
                handle if dtype is None else T.address_of(T.match_buffer(handle, (T.int64(),), dtype)[0])
                for handle, dtype in zip(handles, dtypes, strict=True)
            ]
            T.evaluate(Call(kernel, values, ret_ty="int32"))
        return builder.get()
