"""Operating system functions beyond POSIX: the only module that distinguishes Linux from macOS.

Each function checks for the calls that it needs, and works without them if a system lacks them. No other module uses
calls of only one system. Imports no other module of radixlm.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import platform
import resource
import struct
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

Buffer: TypeAlias = "bytes | bytearray | memoryview"

# Flags of shared memory that can exceed the machine's memory.
SPARSE_FLAGS = (
    mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | {"linux": 0x4000, "darwin": 0x40}.get(sys.platform, 0)
)  # MAP_NORESERVE
DESCRIPTORS = "/proc/self/fd/"  # folder with the open files of this process
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_UNKNOWN_MEMORY_BYTES = 1 << 30  # if the system does not report it
# Linux
_MADV_POPULATE_READ = 22  # since 5.14; older ones refuse it
_SYS_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IOPRIO_IDLE = 3 << 13  # the class of processes that use the disk only while no other process does
# macOS: <sys/fcntl.h>, <sys/mman.h>, <sys/resource.h>; Python names some of them in some versions
_F_RDADVISE, _F_RDAHEAD = 44, 45
_RDADVISE_BYTES = (1 << 31) - 1  # the most in one call
_PRIO_DARWIN_PROCESS, _PRIO_DARWIN_BG = 4, 0x1000
_RUSAGE_INFO_V0, _PHYS_FOOTPRINT, _RUSAGE_INFO_BYTES = 0, 72, 96  # <libproc.h>: a kind, where its field is, its size


def read_at(fd: int, buffers: Sequence[Buffer], offset: int) -> int:
    """Fill writable `buffers` in order from `offset` on; return the number of bytes read."""
    if hasattr(os, "preadv"):
        return os.preadv(fd, buffers, offset)
    done = 0
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        data = os.pread(fd, len(view), offset + done)
        view[: len(data)] = data
        done += len(data)
        if len(data) < len(view):
            break
    return done


def write_at(fd: int, buffers: Sequence[Buffer], offset: int) -> int:
    """Write `buffers` in order from `offset` on; return the number of bytes written, perhaps not all."""
    if hasattr(os, "pwritev"):
        return os.pwritev(fd, buffers, offset)
    done = 0
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        try:
            count = os.pwrite(fd, view, offset + done)
        except OSError:
            if done:  # the next call raises the same error
                break
            raise
        done += count
        if count < len(view):
            break
    return done


def sync_file(fd: int) -> None:
    """Wait until the file survives a power loss. On macOS, `fsync` alone leaves it in the disk's own cache."""
    if hasattr(fcntl, "F_FULLFSYNC"):
        with contextlib.suppress(OSError):  # a file system without this call
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
            return
    os.fsync(fd)


def sync_data(fd: int) -> None:
    """Wait until the data written to the file survives a power loss, not necessarily its times."""
    if hasattr(os, "fdatasync"):
        os.fdatasync(fd)
    else:
        sync_file(fd)


def write_back(fd: int) -> None:
    """Wait until the disk has the data written to the file; on macOS it can remain in the disk's own cache."""
    if hasattr(os, "fdatasync"):
        os.fdatasync(fd)
    else:
        os.fsync(fd)


def expect_reads(fd: int, offset: int, num_bytes: int) -> None:
    """Start reading at least one byte in the background, because these bytes will be read soon."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, offset, num_bytes, os.POSIX_FADV_WILLNEED)
    elif hasattr(fcntl, "F_FULLFSYNC"):
        advice = struct.pack("@qi4x", offset, min(num_bytes, _RDADVISE_BYTES))  # struct radvisory
        with contextlib.suppress(OSError):  # the file is shorter
            fcntl.fcntl(fd, _F_RDADVISE, advice)


def expect_scattered_reads(fd: int) -> None:
    """Turn off read-ahead, because reads will be scattered."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    elif hasattr(fcntl, "F_FULLFSYNC"):
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, _F_RDAHEAD, 0)


def drop_cached(fd: int, offset: int, num_bytes: int) -> None:
    """Let the system reuse the cache memory of these bytes. No effect on macOS, which cannot drop a part of a file."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, offset, num_bytes, os.POSIX_FADV_DONTNEED)


def memory_file(name: str) -> int | None:
    """Create a file in memory, named in `DESCRIPTORS`; return its descriptor, None if the system has none."""
    return os.memfd_create(name) if hasattr(os, "memfd_create") else None


def available_memory_bytes() -> int:
    """Return the memory available without swapping: the kernel's estimate, within the limit of the control group."""
    available = _of_meminfo() or _of_page_counts() or _UNKNOWN_MEMORY_BYTES
    limit, used = _read_number(_CGROUP / "memory.max"), _read_number(_CGROUP / "memory.current")
    if limit is not None and used is not None:
        available = min(available, max(0, limit - used + _cached_file_bytes()))
    return available


def total_memory_bytes() -> int:
    """Return the size of the machine's memory."""
    return _sysctl_number("hw.memsize") or os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE


def num_numa_nodes(root: Path = Path("/")) -> int:
    """Return the number of NUMA nodes; 1 if the system names none. `root` is the directory that contains `/sys`."""
    return max(1, len([*root.glob("sys/devices/system/node/node[0-9]*")]))


def process_memory_bytes(pid: int) -> int | None:
    """Return the memory of a process of this user, resident on Linux, the footprint on macOS; None if unknown."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * mmap.PAGESIZE
    except (OSError, IndexError):  # it has ended, or there is no /proc
        pass
    usage = ctypes.create_string_buffer(_RUSAGE_INFO_BYTES)
    call = _libc_function("proc_pid_rusage")
    if call is None or call(pid, _RUSAGE_INFO_V0, usage):
        return None
    return int(struct.unpack_from("@Q", usage, _PHYS_FOOTPRINT)[0])


def limit_address_space(more_bytes: int) -> None:
    """Limit this process to `more_bytes` beyond the memory that it has mapped. macOS has no such limit."""
    try:
        num_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE + more_bytes
    except OSError:
        return
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes if hard < 0 else min(num_bytes, hard), hard))


def trim_heap() -> None:
    """Return free memory to the system, which glibc would keep; other libraries have no such function."""
    call = _libc_function("malloc_trim")
    if call is not None:
        call(0)


def use_huge_pages(address: int, num_bytes: int) -> None:
    """Request huge pages for this memory; ignored by systems without them."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        _advise(address, num_bytes, mmap.MADV_HUGEPAGE)


def map_pages(address: int, num_bytes: int) -> bool:
    """Read and map a file's pages; on macOS only read them ahead. Return whether the system does."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        return _advise(address, num_bytes, _MADV_POPULATE_READ)
    return _advise(address, num_bytes, mmap.MADV_WILLNEED)


def remove_pages(address: int, num_bytes: int) -> bool:
    """Release pages of shared memory, which become zeros again; return whether the system does, as Linux does."""
    return hasattr(mmap, "MADV_REMOVE") and _advise(address, num_bytes, mmap.MADV_REMOVE)


def num_processors() -> int:
    """Return the number of CPUs that this process can run on, by its affinity mask if the system has one."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor_name() -> str:
    """Return the name of the CPU on a system without `/proc/cpuinfo`; empty if the system does not report it."""
    name = sysctl("machdep.cpu.brand_string")
    return platform.processor() if name is None else name.rstrip(b"\0").decode("utf-8", "replace")


def give_way(niceness: int) -> None:
    """Lower the priority of this thread. Only Linux has numbers of threads for `setpriority`."""
    if niceness and hasattr(os, "sched_setscheduler"):
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, max(niceness, os.getpriority(os.PRIO_PROCESS, thread)))


def be_idle() -> None:
    """Limit this process to CPUs and disks that no other process is using; best effort."""
    with contextlib.suppress(OSError):
        os.nice(19)
    if not hasattr(os, "sched_setscheduler"):
        with contextlib.suppress(OSError):  # neither Linux nor macOS
            os.setpriority(_PRIO_DARWIN_PROCESS, 0, _PRIO_DARWIN_BG)
        return
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    number, syscall = _SYS_IOPRIO_SET.get(os.uname().machine), _libc_function("syscall")
    if number is not None and syscall is not None:
        syscall(number, 1, 0, _IOPRIO_IDLE)  # 1: a process, 0: this one


def system_name() -> str:
    """Return the system that artifacts are compiled for here: "linux" or "macos"."""
    return "macos" if sys.platform == "darwin" else "linux"


def sysctl(name: str) -> bytes | None:
    """Return a value of macOS's kernel, such as `hw.memsize`; None if there is none."""
    call = _libc_function("sysctlbyname")
    if call is None:
        return None
    value = ctypes.create_string_buffer(256)
    size = ctypes.c_size_t(len(value))
    if call(name.encode(), value, ctypes.byref(size), None, ctypes.c_size_t(0)):
        return None
    return value.raw[: size.value]


def _sysctl_number(name: str) -> int | None:
    value = sysctl(name)
    return None if value is None else int.from_bytes(value, sys.byteorder)


def _libc_function(name: str) -> Any:
    """Return a function of the C library; None if it has none of this name."""
    return getattr(ctypes.CDLL(None), name, None)


def _advise(address: int, num_bytes: int, advice: int) -> bool:
    """Call `madvise` for all pages of this memory, without holding the interpreter's lock, as `mmap.madvise` would."""
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    size = ctypes.c_size_t(address + num_bytes - start)
    return bool(ctypes.CDLL(None).madvise(ctypes.c_void_p(start), size, advice) == 0)


def _of_meminfo() -> int | None:
    """Return the bytes of MemAvailable in /proc/meminfo; None if there is no such file or line."""
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _of_page_counts() -> int | None:
    """Return the size of macOS's pages that are free, hold files, or can be discarded."""
    names = ("vm.page_free_count", "vm.page_pageable_external_count", "vm.page_purgeable_count")
    counts = [_sysctl_number(name) for name in names]
    return sum(count for count in counts if count is not None) * mmap.PAGESIZE


def _cached_file_bytes() -> int:
    """Return the file cache within the control group's memory, including files just written, which can be reclaimed."""
    try:
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    counts = dict(line.split() for line in lines)
    return int(counts.get("active_file", 0)) + int(counts.get("inactive_file", 0))


def _read_number(path: Path) -> int | None:
    """Return the number in a file; None if there is no file or it contains `max`."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
