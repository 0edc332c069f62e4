"""The features of this machine's processor, and how many threads this process may compute with.

Asks the processor itself (CPUID), because an emulator or a container may show another machine's /proc/cpuinfo.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import platform
import struct
from collections.abc import Iterable
from pathlib import Path

from .cpu_quota import cpu_quota

# feature: (CPUID leaf, subleaf, register 0..3 = eax, ebx, ecx, edx, bit); Intel's SDM, volume 2A, CPUID
_FEATURE_BITS = {
    "sse3": (1, 0, 2, 0),
    "ssse3": (1, 0, 2, 9),
    "fma": (1, 0, 2, 12),
    "sse4_1": (1, 0, 2, 19),
    "sse4_2": (1, 0, 2, 20),
    "movbe": (1, 0, 2, 22),
    "popcnt": (1, 0, 2, 23),
    "avx": (1, 0, 2, 28),
    "f16c": (1, 0, 2, 29),
    "bmi1": (7, 0, 1, 3),
    "avx2": (7, 0, 1, 5),
    "bmi2": (7, 0, 1, 8),
    "avx512f": (7, 0, 1, 16),
    "avx512dq": (7, 0, 1, 17),
    "avx512cd": (7, 0, 1, 28),
    "avx512bw": (7, 0, 1, 30),
    "avx512vl": (7, 0, 1, 31),
    "avx512vnni": (7, 0, 2, 11),
    "avx_vnni": (7, 1, 0, 4),
    "lzcnt": (0x80000001, 0, 2, 5),
}
_NEEDS_YMM = {"avx", "avx2", "fma", "f16c", "avx_vnni"}
_OSXSAVE = (1, 0, 2, 27)
_XCR0_YMM, _XCR0_ZMM = 0x06, 0xE6  # the register files that the operating system saves

# void f(uint32_t leaf, uint32_t subleaf, uint32_t out[4])
_CPUID = bytes.fromhex("53 89f8 89f1 4989d0 0fa2 418900 41895804 41894808 4189500c 5b c3".replace(" ", ""))
# uint64_t f(void): xgetbv 0
_XGETBV = bytes.fromhex("31c9 0f01d0 48c1e220 4809d0 c3".replace(" ", ""))


@functools.cache
def cpu_features() -> frozenset[str]:
    """The features of `_FEATURE_BITS` that the processor has and the operating system keeps; empty if not x86-64."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    try:
        code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError:  # a hardened kernel refuses executable memory
        return _features_of_proc_cpuinfo()
    code.write(_CPUID.ljust(64, b"\x90") + _XGETBV)
    address = ctypes.addressof(ctypes.c_char.from_buffer(code))
    cpuid = ctypes.CFUNCTYPE(None, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p)(address)
    xgetbv = ctypes.CFUNCTYPE(ctypes.c_uint64)(address + 64)

    def registers(leaf: int, subleaf: int) -> tuple[int, ...]:
        buffer = ctypes.create_string_buffer(16)
        cpuid(leaf, subleaf, buffer)
        return struct.unpack("<4I", buffer.raw)

    leaves: dict[tuple[int, int], tuple[int, ...]] = {}
    for leaf, subleaf in {where[:2] for where in _FEATURE_BITS.values()}:
        highest = registers(leaf & 0x80000000, 0)[0] if subleaf == 0 else registers(leaf, 0)[0]
        wanted = leaf if subleaf == 0 else subleaf
        leaves[leaf, subleaf] = registers(leaf, subleaf) if wanted <= highest else (0, 0, 0, 0)

    def has(leaf: int, subleaf: int, register: int, bit: int) -> bool:
        return bool(leaves[leaf, subleaf][register] >> bit & 1)

    saved = xgetbv() if has(*_OSXSAVE) else 0
    return frozenset(name for name, where in _FEATURE_BITS.items() if has(*where) and is_saved(name, saved))


def is_saved(feature: str, xcr0: int) -> bool:
    """Whether the operating system saves the registers that a feature needs, as the register XCR0 says."""
    if feature.startswith("avx512"):
        return xcr0 & _XCR0_ZMM == _XCR0_ZMM
    return feature not in _NEEDS_YMM or xcr0 & _XCR0_YMM == _XCR0_YMM


def _features_of_proc_cpuinfo() -> frozenset[str]:
    kernel_names = {"pni": "sse3", "abm": "lzcnt", "avx512_vnni": "avx512vnni"}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            flags = {kernel_names.get(flag, flag) for flag in line.split(":", 1)[1].split()}
            return frozenset(flags & _FEATURE_BITS.keys())
    return frozenset()


def cpu_name() -> str:
    """What the processor calls itself; empty if the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def missing_features(required: Iterable[str]) -> list[str]:
    """Those of `required` that this machine lacks, sorted."""
    return sorted(set(required) - cpu_features())


def default_num_threads() -> int:
    """Processors that this process may use: its affinity mask, cut by the quota of its control groups; at least 1."""
    return max(1, int(min(len(os.sched_getaffinity(0)), cpu_quota())))
