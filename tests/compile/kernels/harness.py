"""Build one kernel for a target and call it with NumPy arrays. Knows how kernels are called, not what they compute.

Kernels are C functions of a library. Each array is
copied to memory of its own, aligned as artifacts align theirs, between canaries that must outlive the call; afterwards
the array holds what the kernel left there.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm_ffi
from hypothesis import HealthCheck, settings
from radixlm.compile.codegen.kernel_cache import KernelCache
from radixlm.compile.codegen.library import build_library, kernel_symbol
from radixlm.compile.codegen.targets import TARGETS, Target
from radixlm.compile.weights.layout import ALIGNMENT
from radixlm.runtime.artifact.cpu import is_of_this_machine

from ...conftest import digest_of_compiler
from . import emulated

Caller = Callable[..., None]  # takes arrays and sizes in the kernel's order; None for an array that it does not read
_CANARY_BYTES = 4 * ALIGNMENT
_CANARY = 0xFF  # NaN in every float type: a number read from here shows


# In tables of specs, which are of targets here, an emulated target gets those of another one.
_SPECS_OF = {"armv8.2-i8mm": "x86-64-v4-vnni", "armv8.2-dotprod": "x86-64-v3", "armv8": "x86-64-v2"}
# Those of this machine's architecture, and those that an emulator runs, where there is one.
TARGETS_HERE = tuple(target for target in TARGETS.values() if is_of_this_machine(target.triple))
EMULATED = () if emulated.PYTHON is None else tuple(target for target in TARGETS.values() if target.name in _SPECS_OF)


def runnable() -> list[Target]:
    """The targets that this machine can run."""
    return [target for target in TARGETS_HERE if target.runs_here]


def runs_here(target: Target) -> bool:
    """Whether this machine can run the target, or emulates one that does."""
    return target.runs_here or target in EMULATED


def needs(target: Target) -> pytest.MarkDecorator:
    """Skip a test where this machine cannot run the target."""
    return pytest.mark.skipif(not runs_here(target), reason=f"this CPU does not run {target.name}")


@functools.cache
def often_run() -> frozenset[str]:
    """Return the targets that `make test` runs kernels on; `make test-long` runs them on the others.

    They are the best one that this machine runs, the one that every machine runs, and one that is drawn. The digest of
    the compiler draws it, so that all workers have the same one, and most changes of a kernel another one.
    """
    names = [target.name for target in runnable()]
    between = names[1:-1] or names
    return frozenset((names[0], between[int(digest_of_compiler(), 16) % len(between)], names[-1]))


def marks_of(target: Target) -> list[pytest.MarkDecorator]:
    """Mark a test of a target: whether it is skipped here, and whether it waits for `make test-long`."""
    return [needs(target), *([] if target.name in often_run() or target in EMULATED else [pytest.mark.long])]


every_target = pytest.mark.parametrize(
    "target", [pytest.param(target, id=target.name, marks=marks_of(target)) for target in (*TARGETS_HERE, *EMULATED)]
)


# Targets that differ in how they multiply integers alone, or in what LLVM may choose: kernels of floats are the same.
ALIKE = (("x86-64-v4-vnni", "x86-64-v4"), ("x86-64-v3-vnni", "x86-64-v3"), ("x86-64-v2", "x86-64"))


def of_each_size(**values: Sequence[Any]) -> list[dict[str, Any]]:
    """Return rows in which each combination of values meets one target of each size of registers.

    Of two targets that are alike the combinations take turns, and where one does not run here all take the other.
    """
    rows = []
    for number, combination in enumerate(product(*values.values())):
        for names in ALIKE:
            here = [TARGETS[name] for name in names if runs_here(TARGETS[name])] or [TARGETS[names[-1]]]
            rows.append({**dict(zip(values, combination, strict=True)), "target": here[number % len(here)]})
    return rows


def by_rows(rows: Iterable[dict[str, Any]]) -> pytest.MarkDecorator:
    """Parametrize a test by rows of a table of `pairwise.py`, each with a target; its values name it."""
    rows = [*rows]
    for target in EMULATED:
        rows += [{**row, "target": target} for row in rows if row["target"].name == _SPECS_OF[target.name]]
    return pytest.mark.parametrize(
        "row", [pytest.param(row, marks=marks_of(row["target"]), id=_name(row)) for row in rows]
    )


def _name(row: dict[str, Any]) -> str:
    return "-".join(f"{name}={_label(value)}" for name, value in row.items())


def _label(value: Any) -> str:
    named = getattr(value, "label", None) or getattr(value, "name", None)
    return named or str(value).replace(" ", "")


def examples(count: int) -> settings:
    """A few examples, the same in every run."""
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@functools.cache
def built(target: Target, make: Callable[..., Any], *arguments: Any, **options: Any) -> Caller:
    """The kernel `make(*arguments, **options)`, compiled for `target` once in a run of the tests."""
    kernel = make(*arguments, **options)
    dtypes = [_element_type(parameter) for parameter in kernel.params]
    function = _loaded(kernel, target)

    def call(*values: Any) -> None:
        assert len(values) == len(dtypes), f"the kernel takes {len(dtypes)} arguments"
        memories = [
            None if dtype is None else _Canaried(np.zeros(1, dtype) if value is None else value, dtype)
            for value, dtype in zip(values, dtypes, strict=True)
        ]
        function([value if memory is None else memory for value, memory in zip(values, memories, strict=True)])
        for value, memory in zip(values, memories, strict=True):
            if memory is not None and value is not None:
                memory.check()
                value.view(memory.inside.dtype).reshape(-1)[...] = memory.inside

    return call


class _Canaried:
    """A flat aligned copy of an array, with canaries on both sides."""

    def __init__(self, array: np.ndarray, dtype: str) -> None:
        data = np.ascontiguousarray(array).view(dtype).reshape(-1)
        size = max(data.nbytes, ALIGNMENT)  # an empty array needs an address too
        self._memory = memory = np.full(size + 2 * _CANARY_BYTES + ALIGNMENT, _CANARY, np.uint8)
        start = -memory.ctypes.data % ALIGNMENT + _CANARY_BYTES
        self.inside = memory[start : start + size].view(dtype)[: data.size]
        self.inside[...] = data
        self._start = start
        self._outside = (memory[:start], memory[start + data.nbytes :])

    def array(self) -> emulated.Array:
        """The same for an emulated machine."""
        return emulated.Array(memoryview(self._memory), self._start)

    def check(self) -> None:
        """Nothing was written outside."""
        assert all((part == _CANARY).all() for part in self._outside), "the kernel wrote outside of an array"


def _element_type(parameter: Any) -> str | None:
    """The dtype of what a parameter points to; None for a size."""
    return str(parameter.ty.element_type) if hasattr(parameter.ty, "element_type") else None


def _loaded(kernel: Any, target: Target) -> Callable[[Sequence[int | _Canaried]], None]:
    """The kernel as a function that takes its arguments."""
    folder = Path(tempfile.mkdtemp())
    path, symbol = folder / "kernel.so", kernel_symbol(kernel, target)
    build_library([kernel], target, KernelCache.of_user()).export(path)
    if not target.runs_here:
        atexit.register(shutil.rmtree, folder)
        return lambda arguments: emulated.machine().call(
            str(path), symbol, [one if isinstance(one, int) else one.array() for one in arguments]
        )
    module = tvm_ffi.load_module(str(path))
    module["set_num_threads"](2)  # so that kernels which race are noticed
    function = getattr(ctypes.CDLL(str(path)), symbol)
    function.module = module
    shutil.rmtree(folder)

    def call(arguments: Sequence[int | _Canaried]) -> None:
        function(
            *(
                ctypes.c_int64(one) if isinstance(one, int) else ctypes.c_void_p(one.inside.ctypes.data)
                for one in arguments
            )
        )

    return call
