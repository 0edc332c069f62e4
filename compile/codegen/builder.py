"""Write a PrimFunc with TVMScript's builder: loops are `with` blocks, and repetition is a Python `for`.

Kernels are plain Python, not the parsed decorator, because each kernel is a family. Differences between weight kinds
and targets are decided while building, with ordinary functions and `if`.

Kernels take bare pointers and int64 sizes, and return 0. `forward` calls them like C functions. Knows no arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from .vector import LANES, Expr

SIZE = "size"
SUMS_IN_ORDER = "radixlm.sums_in_order"
CACHE_LINE = 64  # bytes
_ANY_SIZE = 1 << 40  # the size of a pointer's buffer, which TVM demands and nothing uses


@dataclass
class Memory:
    """A flat buffer: `memory[i]` reads, `memory[i] = value` emits a store. A ramp as the index moves a vector."""

    buffer: Any

    def __getitem__(self, index: Expr) -> Expr:
        return self.buffer[index]

    def __setitem__(self, index: Expr, value: Expr) -> None:
        T.buffer_store(self.buffer, value, [index])

    def at(self, index: Expr) -> Expr:
        """Return the address of an element."""
        return T.address_of(self.buffer[index])


class Kernel:
    """A context that builds one function: declare the arguments, then emit the body; then read `function`.

    >>> with Kernel() as k:
    ...     x, n = k.arguments(x="float32", n=SIZE)
    ...     with parallel(n) as i:
    ...         x[i] = x[i] * T.float32(2)

    Args:
        sums_in_order: for x86, LLVM keeps the order in which integers are added; see `library.py`.
    """

    def __init__(self, *, sums_in_order: bool = False) -> None:
        self._attributes = {"tirx.noalias": True, "tirx.is_scheduled": True}
        if sums_in_order:
            self._attributes[SUMS_IN_ORDER] = True
        self._builder = IRBuilder()
        self._frame = T.prim_func(is_private=True, s_tir=True)
        self.function: Any = None

    def __enter__(self) -> Kernel:
        self._builder.__enter__()
        self._frame.__enter__()
        T.func_attr(self._attributes)
        T.func_ret(T.int32().ty)
        return self

    def __exit__(self, *error: Any) -> None:
        self._frame.__exit__(*error)
        self._builder.__exit__(*error)
        if error[0] is None:
            self.function = self._builder.get()

    def arguments(self, **dtypes: str) -> tuple[Any, ...]:
        """Declare all arguments, in order: `name="float32"` is the address of such numbers, `name=SIZE` an int64."""
        # the builder requires every argument before the first declared buffer
        values = [
            (dtype, T.arg(name, T.int64() if dtype == SIZE else T.handle(dtype, "global")))
            for name, dtype in dtypes.items()
        ]
        return tuple(
            value if dtype == SIZE else Memory(T.decl_buffer((T.int64(_ANY_SIZE),), dtype, data=value, layout=None))
            for dtype, value in values
        )


def registers(size: int, dtype: str) -> Memory:
    """Return scratch memory of `size` elements.

    Below 1024 bytes LLVM keeps it on the stack or in registers. Above, it comes from the thread's workspace pool of
    TVM.
    """
    return Memory(T.alloc_buffer((size,), dtype, layout=None))


def bound(value: Expr) -> Expr:
    """Bind `value` to a name, so that it is computed once; a bare expression is computed at each use."""
    return T.bind(value)


def prefetch(memory: Memory, start: Expr, num_bytes: int, element_bytes: int) -> None:
    """Prefetch cache lines that will be read soon; an address beyond the memory is harmless.

    The lines go into the L2 cache, because the concurrent prefetches of a kernel exceed the L1 cache.
    """
    for offset in range(0, num_bytes, CACHE_LINE):
        address = memory.at(start + offset // element_bytes)
        # read access (0), L2 cache (2), data cache (1)
        T.evaluate(T.call_llvm_intrin("void", "llvm.prefetch.p0", address, T.int32(0), T.int32(2), T.int32(1)))


def _extent(stop: Expr) -> Expr:
    """Return a loop bound as an int64."""
    return T.int64(stop) if isinstance(stop, int) else stop


@contextmanager
def serial(stop: Expr) -> Iterator[Expr]:
    """Open a loop from 0 to `stop`; yields the index."""
    with T.serial(_extent(stop)) as i:
        yield i


@contextmanager
def parallel(stop: Expr) -> Iterator[Expr]:
    """Open a parallel loop from 0 to `stop`: idle threads of `thread_pool.ll` take contiguous runs of indices."""
    T.evaluate(T.call_extern("int32", "parallel_items", _extent(stop)))
    with T.parallel(_extent(stop)) as i:
        yield i


@contextmanager
def when(condition: Expr) -> Iterator[None]:
    """Open a block that runs only if `condition` holds."""
    with T.If(condition), T.Then():
        yield


@contextmanager
def either(condition: Expr) -> Iterator[tuple[Any, Any]]:
    """Open two branches: `with either(c) as (then, otherwise): with then: ...; with otherwise: ...`."""
    with T.If(condition):
        yield T.Then(), T.Else()


def for_each_row(count: Expr, body: Callable[[Expr], None], serial_up_to: int = 8) -> None:
    """Emit `body(row)` for each row: up to `serial_up_to` on the calling thread, more on the thread pool."""
    with either(count <= serial_up_to) as (then, otherwise):
        with then, serial(count) as row:
            body(row)
        with otherwise, parallel(count) as row:
            body(row)


def for_each_lanes(width: int, some: Callable[[Expr, int], None]) -> None:
    """Emit `some(i, n)` for all elements of a row: whole vectors, then single ones."""
    with serial(width // LANES) as i:
        some(i * LANES, LANES)
    for i in range(width // LANES * LANES, width):
        some(T.int64(i), 1)
