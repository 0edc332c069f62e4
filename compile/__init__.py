"""Compile a model source into an artifact.

from radixlm.compile import compile_model
compile_model("smollm2", "smollm2.radixlm")

The compiler is loaded on the first access to one of these names: lists of families and formats need no TVM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixlm.runtime.progress import Progress

if TYPE_CHECKING:
    from .compiler import CompileReport, compile_model

__all__ = ["CompileReport", "Progress", "compile_model"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import compiler

    return getattr(compiler, name)
