"""Read the features of this machine's CPU, and the number of threads that this process can compute with.

Asks the CPU itself (CPUID), or the system (Arm's hwcaps), because an emulator or a container can show another machine's
/proc/cpuinfo. Knows the files of cgroup v1 and v2. Works in a container that sees its own group as the root, and in a
service several groups below it.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import platform
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from ..system import num_processors, processor_name, sysctl, system_name

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
# feature of Arm: (word of the auxiliary vector, bit); 16 is AT_HWCAP, 26 AT_HWCAP2
_HWCAPS = {"neon": (16, 1), "dotprod": (16, 20), "i8mm": (26, 13)}
_OF_APPLE = {"dotprod": "hw.optional.arm.FEAT_DotProd", "i8mm": "hw.optional.arm.FEAT_I8MM"}
_NEEDS_YMM = {"avx", "avx2", "fma", "f16c", "avx_vnni"}
_OSXSAVE = (1, 0, 2, 27)
_XCR0_YMM, _XCR0_ZMM = 0x06, 0xE6  # the register files that the operating system saves

# void f(uint32_t leaf, uint32_t subleaf, uint32_t out[4])
_CPUID = bytes.fromhex("53 89f8 89f1 4989d0 0fa2 418900 41895804 41894808 4189500c 5b c3".replace(" ", ""))
# uint64_t f(void): xgetbv 0
_XGETBV = bytes.fromhex("31c9 0f01d0 48c1e220 4809d0 c3".replace(" ", ""))


def cpu_architecture() -> str:
    """Return the name of this machine's architecture in triples: "x86_64" or "aarch64"."""
    return architecture_of(platform.machine().lower())


def architecture_of(triple: str) -> str:
    """Return the architecture of a triple, under one name for its variants.

    >>> architecture_of("arm64-apple-macos")
    'aarch64'
    """
    name = triple.partition("-")[0]
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


def system_of(triple: str) -> str:
    """Return the operating system of a triple, as `system_name` spells it.

    >>> system_of("arm64-apple-macos14.4-elf"), system_of("aarch64-linux-gnu")
    ('macos', 'linux')
    """
    return "macos" if "-macos" in triple else "linux"


def is_of_this_machine(triple: str) -> bool:
    """Return whether this machine has the architecture and operating system of a triple."""
    return (architecture_of(triple), system_of(triple)) == (cpu_architecture(), system_name())


@functools.cache
def cpu_features() -> frozenset[str]:
    """Return the CPU features that targets can need, if the operating system supports them, too."""
    readers = {"x86_64": _x86_features, "aarch64": _arm_features}
    reader = readers.get(cpu_architecture())
    return frozenset() if reader is None else reader()


def _arm_features() -> frozenset[str]:
    """Read the features from Linux's auxiliary vector, or from macOS by name."""
    if system_name() == "macos":
        return frozenset({"neon"} | {name for name, key in _OF_APPLE.items() if any(sysctl(key) or b"")})
    getauxval = ctypes.CDLL(None).getauxval
    getauxval.argtypes, getauxval.restype = [ctypes.c_ulong], ctypes.c_ulong
    return frozenset(name for name, (word, bit) in _HWCAPS.items() if getauxval(word) >> bit & 1)


def _x86_features() -> frozenset[str]:
    """Read the features from CPUID, without those whose registers the operating system does not save."""
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
    """Return whether the operating system saves the registers of a feature, according to the register XCR0."""
    if feature.startswith("avx512"):
        return xcr0 & _XCR0_ZMM == _XCR0_ZMM
    return feature not in _NEEDS_YMM or xcr0 & _XCR0_YMM == _XCR0_YMM


def _features_of_proc_cpuinfo() -> frozenset[str]:
    kernel_names = {"pni": "sse3", "abm": "lzcnt", "avx512_vnni": "avx512vnni"}
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        if line.startswith("flags"):
            flags = {kernel_names.get(flag, flag) for flag in line.split(":", 1)[1].split()}
            return frozenset(flags & _FEATURE_BITS.keys())
    return frozenset()


def cpu_name() -> str:
    """Return the name of the CPU; empty if the system does not report it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return processor_name()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def cache_bytes(root: Path = Path("/")) -> int:
    """Return the size of all CPU caches together in bytes; 0 if the system does not report it.

    `root` is the directory that contains `/sys`.
    """
    sizes: dict[tuple[str, ...], int] = {}
    for cache in root.glob("sys/devices/system/cpu/cpu[0-9]*/cache/index[0-9]*"):
        try:
            size, *which = ((cache / name).read_text().strip() for name in ("size", "level", "type", "shared_cpu_list"))
            sizes[tuple(which)] = int(size.removesuffix("K")) << 10
        except (OSError, ValueError):
            continue
    return sum(sizes.values())


def missing_features(required: Iterable[str]) -> list[str]:
    """Return those of `required` that this machine lacks, sorted."""
    return sorted(set(required) - cpu_features())


def default_num_threads() -> int:
    """Return the number of CPUs that this process can use, limited by the quota of its control groups; at least 1."""
    return max(1, int(min(num_processors(), cpu_quota())))


def cpu_quota(root: Path = Path("/")) -> float:
    """Return the number of CPUs that control groups allow this process: the smallest quota of its own and those above.

    Returns infinity if none limits it. `root` is the directory that contains `/proc` and the mounted groups.
    """
    return min((_quota(group) for group in _groups(root)), default=math.inf)


def _groups(root: Path) -> Iterator[Path]:
    """Yield the directories of the control groups that can limit CPU time, each with those above it."""
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
    """Yield the group `path` and those above it, as far as the mount of the group `mounted` shows them."""
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
