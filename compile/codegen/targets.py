"""The CPUs that an artifact can be compiled for.

A target says what LLVM may use and how a kernel multiplies 8-bit integers. Knows no kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import tvm
from radixlm.runtime.artifact.cpu import cpu_architecture, cpu_features, is_of_this_machine, system_of
from radixlm.runtime.errors import InvalidParameter, UnsupportedCPU
from radixlm.runtime.system import system_name

# vnni512, vnni256: one instruction multiplies and adds groups of four. madd512, madd256: pmaddubsw where products fit
# 16 bits; otherwise pmaddwd, of widened weights. portable: 32-bit multiplies, on any CPU. Arm: usdot and sdot work as
# vnni does, but sdot only with signed weights; smull makes 16-bit products.
IntegerDot = Literal["vnni512", "vnni256", "madd512", "madd256", "portable", "usdot", "sdot", "smull"]


@dataclass(frozen=True)
class Target:
    """A row of the table of targets: `mcpu` and `mattr` are LLVM's, `features` those that `cpu.py` must find."""

    name: str
    mcpu: str
    mattr: tuple[str, ...]
    features: tuple[str, ...]
    integer_dot: IntegerDot
    triple: str = "x86_64-linux-gnu"

    @property
    def runs_here(self) -> bool:
        """Return whether this machine has the features that the target needs."""
        return is_of_this_machine(self.triple) and cpu_features().issuperset(self.features)

    @property
    def is_for_macos(self) -> bool:
        """True if its libraries are Mach-O files."""
        return system_of(self.triple) == "macos"

    @property
    def has_fma(self) -> bool:
        """True if fused multiply-add is an instruction, not a library call."""
        return self._has("fma", "neon")

    @property
    def has_f16c(self) -> bool:
        """True if one instruction converts float16 to float32."""
        return self._has("f16c", "neon")

    @property
    def num_registers(self) -> int:
        """Number of vectors of 16 float32 lanes that fit into the registers."""
        return 32 if self._has("avx512f") else 8 if self._has("avx2", "neon") else 4

    @property
    def byte_lookups(self) -> Mapping[int, str]:
        """LLVM's names of instructions that look up bytes in a table of 16, by number of bytes; {} if there is none."""
        if self._has("neon"):
            return {16: "llvm.aarch64.neon.tbl1.v16i8", 8: "llvm.aarch64.neon.tbl1.v8i8"}
        lookups = (
            ("avx512bw", 64, "llvm.x86.avx512.pshuf.b.512"),
            ("avx2", 32, "llvm.x86.avx2.pshuf.b"),
            ("ssse3", 16, "llvm.x86.ssse3.pshuf.b.128"),
        )
        return {size: name for feature, size, name in lookups if self._has(feature)}

    def _has(self, *features: str) -> bool:
        """Return whether the target has any of these features."""
        return not set(features).isdisjoint(self.features)

    @property
    def llvm_options(self) -> dict[str, Any]:
        """Options that decide LLVM's code, as TVM names them."""
        options: dict[str, Any] = {"kind": "llvm", "mtriple": self.triple, "mcpu": self.mcpu}
        return options | ({"mattr": list(self.mattr)} if self.mattr else {})

    def tvm_target(self, arguments: Sequence[str] = ()) -> Any:
        """Return the same options as a TVM target, with arguments of LLVM's command line."""
        return tvm.target.Target(self.llvm_options | ({"cl-opt": list(arguments)} if arguments else {}))


_V2 = ("sse3", "ssse3", "sse4_1", "sse4_2", "popcnt")
_V3 = (*_V2, "avx", "avx2", "fma", "f16c", "bmi1", "bmi2", "lzcnt", "movbe")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_ARM, _APPLE = "aarch64-linux-gnu", "arm64-apple-macos14.4-elf"  # objects of both are ELF files

# Best first: `native` is the first target that this machine can run.
TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target("x86-64-v4-vnni", "x86-64-v4", ("+avx512vnni",), (*_V4, "avx512vnni"), "vnni512"),
        Target("x86-64-v4", "x86-64-v4", (), _V4, "madd512"),
        Target("x86-64-v3-vnni", "x86-64-v3", ("+avxvnni",), (*_V3, "avx_vnni"), "vnni256"),
        Target("x86-64-v3", "x86-64-v3", (), _V3, "madd256"),
        Target("x86-64-v2", "x86-64-v2", (), _V2, "portable"),
        Target("x86-64", "x86-64", (), (), "portable"),
        Target("armv8.2-i8mm", "generic", ("+dotprod", "+i8mm"), ("neon", "dotprod", "i8mm"), "usdot", _ARM),
        Target("armv8.2-dotprod", "generic", ("+dotprod",), ("neon", "dotprod"), "sdot", _ARM),
        Target("armv8", "generic", (), ("neon",), "smull", _ARM),
        Target("apple-m2", "apple-m2", (), ("neon", "dotprod", "i8mm"), "usdot", _APPLE),
        Target("apple-m1", "apple-m1", (), ("neon", "dotprod"), "sdot", _APPLE),
    )
}


def find_target(name: str) -> Target:
    """Return the target with this name; `native` is the best one that this machine runs.

    >>> find_target("x86-64-v3").integer_dot
    'madd256'

    Raises:
        InvalidParameter: no target has this name.
        UnsupportedCPU: there is no target for this machine.
    """
    if name == "native":
        found = next((target for target in TARGETS.values() if target.runs_here), None)
        if found is None:
            raise UnsupportedCPU(
                f"there is no target for {cpu_architecture()} with {system_name()}; radixlm runs on Linux on x86-64 "
                "and 64-bit Arm, and on macOS on Apple silicon"
            )
        return found
    if name not in TARGETS:
        raise InvalidParameter(f"unknown target {name!r}; use native or one of {', '.join(TARGETS)}")
    return TARGETS[name]
