"""The CPUs that an artifact can be compiled for.

A target names what LLVM may use and how a kernel multiplies 8-bit integers. Knows no kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import tvm
from radixlm.runtime.artifact.cpu import cpu_features
from radixlm.runtime.errors import InvalidParameter

# vnni512, vnni256: one instruction multiplies and adds groups of four; madd512, madd256: widen to 16 bits, then pmaddwd
# (pmaddubsw would saturate); portable: 32-bit multiplies that any CPU has.
IntegerDot = Literal["vnni512", "vnni256", "madd512", "madd256", "portable"]

TRIPLE = "x86_64-linux-gnu"


@dataclass(frozen=True)
class Target:
    """One row of the table: `mcpu` and `mattr` are LLVM's, `features` are what `runtime/artifact/cpu.py` must find."""

    name: str
    mcpu: str
    mattr: tuple[str, ...]
    features: tuple[str, ...]
    integer_dot: IntegerDot

    @property
    def has_fma(self) -> bool:
        """Whether a fused multiply-add is an instruction; without one it would be a library call."""
        return "fma" in self.features

    @property
    def has_f16c(self) -> bool:
        """Whether float16 becomes float32 in one instruction."""
        return "f16c" in self.features

    @property
    def shuffled_bytes(self) -> int:
        """How many bytes one instruction looks up in a table of 16; 0 where there is none."""
        widths = (("avx512bw", 64), ("avx2", 32), ("ssse3", 16))
        return next((width for feature, width in widths if feature in self.features), 0)

    @property
    def llvm_options(self) -> dict[str, Any]:
        """What decides LLVM's code, as TVM names it."""
        options: dict[str, Any] = {"kind": "llvm", "mtriple": TRIPLE, "mcpu": self.mcpu}
        return options | ({"mattr": list(self.mattr)} if self.mattr else {})

    def tvm_target(self) -> Any:
        """The same for TVM."""
        return tvm.target.Target(self.llvm_options)


_V2 = ("sse3", "ssse3", "sse4_1", "sse4_2", "popcnt")
_V3 = (*_V2, "avx", "avx2", "fma", "f16c", "bmi1", "bmi2", "lzcnt", "movbe")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")

# Best first: `native` is the first that this machine can run.
TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target("x86-64-v4-vnni", "x86-64-v4", ("+avx512vnni",), (*_V4, "avx512vnni"), "vnni512"),
        Target("x86-64-v4", "x86-64-v4", (), _V4, "madd512"),
        Target("x86-64-v3-vnni", "x86-64-v3", ("+avxvnni",), (*_V3, "avx_vnni"), "vnni256"),
        Target("x86-64-v3", "x86-64-v3", (), _V3, "madd256"),
        Target("x86-64-v2", "x86-64-v2", (), _V2, "portable"),
        Target("x86-64", "x86-64", (), (), "portable"),
    )
}


def find_target(name: str) -> Target:
    """The target of this name; `native` is the best one that this machine runs.

    >>> find_target("x86-64-v3").integer_dot
    'madd256'

    Raises:
        InvalidParameter: no target has this name.
    """
    if name == "native":
        here = cpu_features()
        return next(target for target in TARGETS.values() if here.issuperset(target.features))
    if name not in TARGETS:
        raise InvalidParameter(f"unknown target {name!r}; use native or one of {', '.join(TARGETS)}")
    return TARGETS[name]
