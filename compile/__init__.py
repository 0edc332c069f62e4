"""Compile a model source into an artifact.

from radixlm.compile import compile_model
compile_model("smollm2", "smollm2.radixlm")
"""

from __future__ import annotations

from .compiler import CompileReport, Progress, compile_model

__all__ = ["CompileReport", "Progress", "compile_model"]
