"""The features of this machine's processor, and how many threads this process may compute with.

Asks the processor itself (CPUID), because an emulator or a container may show another machine's /proc/cpuinfo. Knows
the files of cgroup v1 and v2: works in a container that sees its own group as the root, and in a service several groups
below it.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import os
import platform
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

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


def cache_bytes(root: Path = Path("/")) -> int:
    """Bytes of all processors' caches together; 0 if the system does not say. `root` is where `/sys` is looked for."""
    sizes: dict[tuple[str, ...], int] = {}
    for cache in root.glob("sys/devices/system/cpu/cpu[0-9]*/cache/index[0-9]*"):
        try:
            size, *which = ((cache / name).read_text().strip() for name in ("size", "level", "type", "shared_cpu_list"))
            sizes[tuple(which)] = int(size.removesuffix("K")) << 10
        except (OSError, ValueError):
            continue
    return sum(sizes.values())


def missing_features(required: Iterable[str]) -> list[str]:
    """Those of `required` that this machine lacks, sorted."""
    return sorted(set(required) - cpu_features())


def default_num_threads() -> int:
    """Processors that this process may use: its affinity mask, cut by the quota of its control groups; at least 1."""
    return max(1, int(min(len(os.sched_getaffinity(0)), cpu_quota())))


def cpu_quota(root: Path = Path("/")) -> float:
    """The least that a group of this process, or one above it, allows; infinity if none limits it.

    `root` is where `/proc` and the mounted groups are looked for.
    """
    return min((_quota(group) for group in _groups(root)), default=math.inf)


def _groups(root: Path) -> Iterator[Path]:
    """The directories of the groups that may limit processor time, each with those above it."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return
    paths: dict[str, str] = {}  # by controller; "" is the one hierarchy of v2
    for line in groups:
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path))
    for line in mounts:
        left, _, right = line.partition(" - ")
        mounted, mount_point = left.split()[3:5]
        kind, _, options = right.split()[:3]
        if kind == "cgroup2" and "" in paths:
            yield from _from_here_up(root, mount_point, mounted, paths[""])
        elif kind == "cgroup" and "cpu" in options.split(",") and "cpu" in paths:
            yield from _from_here_up(root, mount_point, mounted, paths["cpu"])


def _from_here_up(root: Path, mount_point: str, mounted: str, path: str) -> Iterator[Path]:
    """The group `path` and those above it, as far as the mount of the group `mounted` shows them."""
    top = root / mount_point.lstrip("/")
    try:
        parts = PurePosixPath(path).relative_to(mounted).parts
    except ValueError:  # mounted from outside of a container
        parts = ()
    for length in range(len(parts), -1, -1):
        yield top.joinpath(*parts[:length])


def _quota(group: Path) -> float:
    try:
        quota, period = (group / "cpu.max").read_text().split()  # v2
        return math.inf if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        quota_us = int((group / "cpu.cfs_quota_us").read_text())  # v1
        return quota_us / int((group / "cpu.cfs_period_us").read_text()) if quota_us > 0 else math.inf
    except (OSError, ValueError):
        return math.inf
