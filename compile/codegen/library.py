"""Build a shared library from PrimFuncs: one object per function, cached or compiled, then one link.

Kernels are private functions, called by the symbol that `kernel_symbol` gives. Functions with a `global_symbol` are the
library's entry points. Each library has the threads of `thread_pool.ll` linked in. Knows no model.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import tvm
from radixlm.runtime.artifact.cpu import architecture_of, default_num_threads
from radixlm.runtime.errors import CompileError
from tvm.ir.transform import Sequential
from tvm.script.ir_builder import tirx as T
from tvm.tirx.build import tir_to_runtime

from .builder import SUMS_IN_ORDER
from .kernel_cache import KernelCache
from .linker import link
from .macho_linker import link_for_macos
from .targets import Target

_CPU = 1  # DLPack's device type
# x86's machine combiner adds integers in trees. If 16 registers do not hold a tree's sums, they are moved to memory and
# back, which took up to a fifth of a kernel's time.
_IN_ORDER = ["-x86-machine-combiner=0"]
_COMPILING = threading.Lock()  # LLVM's options hold for the whole process
_SYMBOL = "global_symbol"
_DISABLED_PASSES = [
    # It narrows buffers to their accesses, which kernels do themselves. It took 11 of the 12 s that attention compiles.
    "s_tir.CompactBufferAllocation",
    # LLVM finds common subexpressions, too. Compiling takes 10 % less time; models compute the same bits as fast.
    "tirx.CommonSubexprElim",
    # They change nothing in these kernels, most being for GPUs. The libraries are the same bytes, 20 % sooner.
    "s_tir.HoistIfThenElse",
    "s_tir.InferFragment",
    "s_tir.InjectDoubleBuffer",
    "s_tir.InjectPermutedLayout",
    "s_tir.InjectSoftwarePipeline",
    "s_tir.InjectVirtualThread",
    "s_tir.LoopPartition",
    "s_tir.LowerThreadAllreduce",
    "s_tir.PlanAndUpdateBufferAllocationLocation",
    "s_tir.ThreadSync",
    "s_tir.TransformMmaBufferLayout",
    "tirx.BF16ComputeLegalize",
    "tirx.FP8ComputeLegalize",
    "tirx.RemoveNoOp",
    "tirx.SplitHostDevice",
]
_structural_hash = tvm.get_global_func("ffi.StructuralHash")  # arguments: function, map_free_vars, skip_tensor_content
_load_ir = tvm.get_global_func("ffi.Module.load_from_file.ll")
_structural_map = tvm.get_global_func("ffi.StructuralMap")  # arguments: root, [(type, callback)], [], order
_PRODUCT, _CHILDREN_FIRST = tvm.tirx.Mul.__tvm_ffi_type_info__.type_index, 1
_THREAD_POOL = Path(__file__).with_name("thread_pool.ll")
_THREAD_POOL_ON_MACOS = Path(__file__).with_name("thread_pool_macos.ll")
# the first number is raised when this module changes
_MAKER = [2, version("apache-tvm"), version("apache-tvm-ffi"), _DISABLED_PASSES]


@dataclass(frozen=True)
class Library:
    """The objects that link into one shared library, as bytes of ELF files, each with one function.

    Objects for macOS are ELF files, too, with its calling conventions; their library is Mach-O.
    """

    objects: tuple[bytes, ...]
    is_for_macos: bool = False

    def export(self, path: Path) -> None:
        """Link into `path`, replacing an existing library.

        Raises:
            CompileError: an object cannot be linked, or `path` cannot be written.
        """
        library = (link_for_macos if self.is_for_macos else link)(self.objects)
        try:
            path.unlink(missing_ok=True)  # another process may have the old file open
            path.write_bytes(library)
        except OSError as error:
            raise CompileError(
                f"{path.parent} cannot be written ({error.strerror or error}); make room there"
            ) from None


def kernel_symbol(kernel: Any, target: Target) -> str:
    """Return the symbol by which entry points call a kernel. Equal kernels have equal symbols in every process."""
    return f"kernel_{_key(kernel, target)}"


def build_library(
    functions: Iterable[Any], target: Target, cache: KernelCache, report: Callable[[int, int], None] = lambda *_: None
) -> Library:
    """Compile kernels and entry points to a library; those that `cache` lacks are compiled on all cores and stored.

    Args:
        functions: PrimFuncs; equal ones are compiled once. Those with `SUMS_IN_ORDER` are compiled one by one, after
            the others, because LLVM's options hold for the whole process; another call waits meanwhile.
        report: called with the number of compiled functions, and the number that `cache` lacked.
    """
    system = (_THREAD_POOL_ON_MACOS.read_text(),) if target.is_for_macos else ()
    by_key = {_key(function, target): function for function in (_thread_pool(target), *system, *functions)}
    objects = {key: cache.get(key) for key in by_key}
    missing = sorted((key for key, found in objects.items() if found is None), key=lambda key: _in_order(by_key[key]))
    num_together = sum(not _in_order(by_key[key]) for key in missing)
    report(0, len(missing))

    def compile_missing(key: str) -> bytes:
        return _compile(key, by_key[key], target)

    with _COMPILING if missing else nullcontext():
        pool = ThreadPoolExecutor(default_num_threads())
        try:
            compiled = chain(
                pool.map(compile_missing, missing[:num_together]), map(compile_missing, missing[num_together:])
            )
            for num_compiled, (key, content) in enumerate(zip(missing, compiled, strict=True), 1):
                cache.put(key, content)
                objects[key] = content
                report(num_compiled, len(missing))
        finally:  # an interrupt does not wait for compiles that have not begun
            pool.shutdown(cancel_futures=True)
    if missing:
        cache.prune_hourly()
    return Library(tuple(content for content in objects.values() if content is not None), target.is_for_macos)


def _thread_pool(target: Target) -> str:
    """Return the LLVM IR of the thread pool, preceded by the definitions that depend on the CPU."""
    processor = Path(__file__).with_name(f"thread_pool_{architecture_of(target.triple)}.ll")
    text = processor.read_text() + _THREAD_POOL.read_text()
    return re.sub("^target triple = .*", f'target triple = "{target.triple}"', text, flags=re.MULTILINE)


def _key(function: Any, target: Target) -> str:
    """Hash everything that decides the object: the TIR or LLVM IR, the target, and the versions of TVM and radixlm.

    The names of an entry point's arguments are hashed separately: its errors have them, the structural hash does not.
    """
    if isinstance(function, str):
        return hashlib.sha256(json.dumps([function, _MAKER]).encode()).hexdigest()[:32]
    names = [parameter.name for parameter in function.params] if _SYMBOL in function.attrs else []
    decides = [_structural_hash(function, False, False), names, target.llvm_options, _MAKER]
    decides += [_IN_ORDER] if _in_order(function) else []
    return hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:32]


def _compile(key: str, function: Any, target: Target) -> bytes:
    """Compile one function, or LLVM IR, to an object file. A function without a symbol is called `kernel_{key}`."""
    if isinstance(function, str):
        return _object_file(_loaded_ir(function))
    tvm_target = target.tvm_target(_IN_ORDER if _in_order(function) else [])
    is_entry = _SYMBOL in function.attrs
    name = function.attrs[_SYMBOL] if is_entry else f"kernel_{key}"
    module = tvm.IRModule({name: function})
    module = tvm.tirx.transform.BindTarget(tvm_target.with_host(tvm_target))(module)
    pipeline, finalize_host, _ = tvm.tirx.get_default_tir_pipeline(tvm_target)
    with tvm.transform.PassContext(disabled_pass=_DISABLED_PASSES):
        module = Sequential([_name_the_device()])(pipeline(module))
    module = finalize_host()(module)
    if not is_entry:  # only now: a function with a symbol from the start would take TVM's packed arguments
        [lowered] = module.functions.values()
        module = tvm.IRModule({name: lowered.with_attr(_SYMBOL, name)})
    if target.has_fma:
        module = _round_products()(module)
    return _object_file(tir_to_runtime(module, {}, tvm_target))


def _in_order(function: Any) -> bool:
    """Return whether LLVM must add a function's integers in order."""
    return not isinstance(function, str) and SUMS_IN_ORDER in function.attrs


def _loaded_ir(text: str) -> Any:
    """Return the LLVM module of a text in LLVM's IR."""
    with tempfile.TemporaryDirectory(prefix="radixlm-ir-") as folder:
        path = Path(folder) / "text.ll"
        path.write_text(text)
        return _load_ir(str(path), "ll")


def _object_file(library: Any) -> bytes:
    """Return the object file that LLVM makes of a module."""
    with tempfile.TemporaryDirectory(prefix="radixlm-object-") as folder:
        path = Path(folder) / "function.o"
        library.write_to_file(str(path), "o")
        return path.read_bytes()


def _name_the_device() -> Any:
    """Return a pass that declares, in each private function, that scratch memory is the CPU's.

    Exported functions learn it from their arguments. A kernel cannot declare it when it is written, because storage
    planning comes later and moves allocations out of such a scope.
    """

    def name_the_device(function: Any, module: Any, context: Any) -> Any:
        if _SYMBOL in function.attrs:
            return function
        body = function.body
        for key, value in (("device_type", _CPU), ("device_id", 0)):
            body = tvm.tirx.AttrStmt(tvm.tirx.IntImm("int32", 0), key, tvm.tirx.IntImm("int32", value), body)
        return function.with_body(body)

    return tvm.tirx.transform.prim_func_pass(name_the_device, opt_level=0)


def _round_products() -> Any:
    """Return a pass that rounds every float product before it is added: only `fma` in a kernel fuses the two.

    TVM allows LLVM to fuse any product and sum. LLVM does so in one copy of an expression and not in another. A token's
    bits would then depend on how many tokens are in its batch.
    """

    def fenced(product: Any) -> Any:
        dtype = str(product.ty)
        if not dtype.startswith("float"):
            return product
        bits, _, lanes = dtype.removeprefix("float").partition("x")
        name = f"llvm.arithmetic.fence.{f'v{lanes}' if lanes else ''}f{bits}"
        return T.call_llvm_pure_intrin(product.ty, name, product)

    def round_products(function: Any, module: Any, context: Any) -> Any:
        return function.with_body(_structural_map(function.body, [(_PRODUCT, fenced)], [], _CHILDREN_FIRST))

    return tvm.tirx.transform.prim_func_pass(round_products, opt_level=0)
