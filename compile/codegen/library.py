"""From PrimFuncs to a shared library: TVM's own passes, with one of ours between them. Knows no model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tvm
from radixlm.runtime.errors import CompileError
from tvm.ir.transform import Sequential
from tvm.tirx.build import tir_to_runtime

from .targets import Target

_CPU = 1  # DLPack's device type
_DISABLED_PASSES = [
    # It narrows buffers to what is accessed, which kernels do themselves; it took eleven of attention's twelve seconds.
    "s_tir.CompactBufferAllocation",
    # They find nothing to change in these kernels, most being for GPUs: libraries are the same bytes, a tenth sooner.
    "s_tir.InjectPermutedLayout",
    "s_tir.InjectSoftwarePipeline",
    "s_tir.InjectVirtualThread",
    "s_tir.InsertHoistIfThenElse",
    "s_tir.ThreadSync",
    "tirx.RemoveNoOp",
]


def build_library(functions: dict[Any, Any], target: Target) -> Any:
    """Compile PrimFuncs (keyed by GlobalVar, or by name if exported) into a runtime module."""
    tvm_target = target.tvm_target()
    module = tvm.IRModule(functions)
    module = tvm.tirx.transform.BindTarget(tvm_target.with_host(tvm_target))(module)
    pipeline, finalize_host, _ = tvm.tirx.get_default_tir_pipeline(tvm_target)
    with tvm.transform.PassContext(disabled_pass=_DISABLED_PASSES):
        module = Sequential([_name_the_device()])(pipeline(module))
    return tir_to_runtime(finalize_host()(module), {}, tvm_target)


def check_linker() -> None:
    """Raise CompileError where the C compiler that links the module is missing."""
    if tvm.support.cc.get_cc() is None:
        raise CompileError("no C compiler is on the PATH, and the module is linked by one; install gcc")


def export_library(library: Any, path: Path) -> None:
    """Link the module into `path` with the system's C compiler; raise CompileError where that fails."""
    try:
        library.export_library(str(path))
    except (RuntimeError, OSError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
        raise CompileError(f"the module cannot be linked ({reason}); is gcc installed?") from None


def _name_the_device() -> Any:
    """Declare in each private function that scratch memory is the CPU's.

    Exported functions learn it from their arguments. A kernel cannot declare it while it is written: storage is
    planned later, and moves allocations out of such a scope.
    """

    def name_the_device(function: Any, module: Any, context: Any) -> Any:
        if "global_symbol" in function.attrs:
            return function
        body = function.body
        for key, value in (("device_type", _CPU), ("device_id", 0)):
            body = tvm.tirx.AttrStmt(tvm.tirx.IntImm("int32", 0), key, tvm.tirx.IntImm("int32", value), body)
        return function.with_body(body)

    return tvm.tirx.transform.prim_func_pass(name_the_device, opt_level=0)
