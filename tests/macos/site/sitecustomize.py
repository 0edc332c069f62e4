"""Make Python on Linux as it is on macOS: a process that has this folder in PYTHONPATH loads this module first.

What macOS lacks is removed from `os`, `mmap`, `fcntl` and the C library. `/proc` and `/sys` are not found. What macOS
has instead is imitated: F_FULLFSYNC and F_RDADVISE, `sysctlbyname`, `proc_pid_rusage`. `sys.platform` stays Linux's,
because libraries with code for Linux are loaded.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import mmap
import os
import resource
import stat
import struct
import sys
import threading
from collections.abc import Callable
from typing import Any

_OF_LINUX = {
    os: (
        *("posix_fadvise", "posix_fallocate", "sched_getaffinity", "sched_setaffinity"),
        *("sched_setscheduler", "sched_param"),
        *("preadv", "pwritev", "fdatasync", "memfd_create", "copy_file_range", "splice", "eventfd", "pidfd_open"),
        *("getrandom", "O_DIRECT", "O_TMPFILE", "O_PATH", "O_NOATIME", "SCHED_IDLE", "SCHED_BATCH"),
        *(name for name in dir(os) if name.startswith(("POSIX_FADV_", "MFD_", "RWF_"))),
    ),
    mmap: (
        *(name for name in dir(mmap) if name.startswith("MADV_")),
        *("MAP_POPULATE", "MAP_STACK"),
    ),
    fcntl: tuple(name for name in dir(fcntl) if name.startswith(("F_OFD_", "F_ADD_SEALS", "F_SETPIPE", "F_GETPIPE"))),
}
_ADVICE = {"NORMAL": 0, "RANDOM": 1, "SEQUENTIAL": 2, "WILLNEED": 3, "DONTNEED": 4, "FREE": 5}  # those of both systems
_NOT_IN_LIBC = {"malloc_trim", "mallopt", "sched_getaffinity", "sched_setaffinity", "sched_getcpu", "gettid"}
_F_RDADVISE, _F_RDAHEAD, _F_NOCACHE, _F_FULLFSYNC = 44, 45, 48, 51
_PRIO_DARWIN_PROCESS, _PRIO_DARWIN_BG = 4, 0x1000
_PAGE_FIELDS = {"vm.page_free_count": "MemAvailable", "hw.memsize": "MemTotal"}

_fcntl, _fsync, _setpriority, _setrlimit, _sendfile = (
    fcntl.fcntl,
    os.fsync,
    os.setpriority,
    resource.setrlimit,
    os.sendfile,
)
_find = ctypes.CDLL.__getattr__
_is_imitating = threading.local()


def imitate() -> None:
    """Make this process's Python like macOS's."""
    for module, names in _OF_LINUX.items():
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    for name, number in _ADVICE.items():
        setattr(mmap, f"MADV_{name}", number)
    for name in ("stat", "lstat", "readlink", "listdir", "scandir"):
        setattr(os, name, _without_proc(getattr(os, name)))
    sys.addaudithook(_refuse_proc)
    fcntl.F_FULLFSYNC, fcntl.F_NOCACHE, fcntl.fcntl = _F_FULLFSYNC, _F_NOCACHE, _controlled  # type: ignore[attr-defined]
    os.setpriority, os.sendfile, resource.setrlimit = _prioritized, _sent, _limited  # type: ignore[assignment]
    ctypes.CDLL.__getattr__ = _found  # type: ignore[method-assign]


def _is_hidden(path: object) -> bool:
    text = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else ""
    return text.startswith(("/proc/", "/sys/")) or text in ("/proc", "/sys")


def _without_proc(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def wrapped(path: Any = ".", *arguments: Any, **named: Any) -> Any:
        if _is_hidden(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return call(path, *arguments, **named)

    return wrapped


def _refuse_proc(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _is_hidden(arguments[0]) and not getattr(_is_imitating, "now", False):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), arguments[0])


def _read(path: str) -> str:
    """A file of Linux's, from which what macOS says is made."""
    _is_imitating.now = True
    try:
        with open(path) as file:
            return file.read()
    finally:
        _is_imitating.now = False


def _controlled(fd: Any, command: int, argument: Any = 0) -> Any:
    if command == _F_FULLFSYNC:
        return _fsync(fd)
    if command == _F_RDADVISE:
        offset, count, rest = struct.unpack("@qii", argument)
        if rest or count < 0 or offset < 0:
            raise OSError(errno.EINVAL, "not a struct radvisory")
        if offset >= os.fstat(fd if isinstance(fd, int) else fd.fileno()).st_size:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        return 0
    if command in (_F_RDAHEAD, _F_NOCACHE):
        return 0
    return _fcntl(fd, command, argument)


def _prioritized(which: int, who: int, priority: int) -> None:
    if (which, who, priority) == (_PRIO_DARWIN_PROCESS, 0, _PRIO_DARWIN_BG):
        return
    if which == os.PRIO_PROCESS and who == threading.get_native_id() != os.getpid():
        raise ProcessLookupError(errno.ESRCH, "a thread's number is no process's")
    _setpriority(which, who, priority)


def _limited(which: int, limits: tuple[int, int]) -> None:
    if which == resource.RLIMIT_AS:
        raise ValueError("macOS does not limit the address space")
    _setrlimit(which, limits)


def _sent(out_fd: int, in_fd: int, *arguments: Any, **named: Any) -> int:
    if not stat.S_ISSOCK(os.fstat(out_fd).st_mode):
        raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK))
    return _sendfile(out_fd, in_fd, *arguments, **named)


def _found(library: ctypes.CDLL, name: str) -> Any:
    if library._name is None:  # type: ignore[comparison-overlap]
        if name in _NOT_IN_LIBC:
            raise AttributeError(f"macOS's C library has no {name}")
        if name in _IMITATED:
            return _IMITATED[name]
    return _find(library, name)


def _sysctlbyname(name: bytes, value: Any, size: Any, new: None, new_size: Any) -> int:
    numbers = {"vm.page_pageable_external_count": 0, "vm.page_purgeable_count": 0}
    texts = {"machdep.cpu.brand_string": b"Imitated M1\0"}
    key = name.decode()
    if key in texts:
        content = texts[key]
    else:
        if key in _PAGE_FIELDS:
            lines = dict(line.split(":", 1) for line in _read("/proc/meminfo").splitlines())
            num_bytes = int(lines[_PAGE_FIELDS[key]].split()[0]) * 1024
            numbers[key] = num_bytes if key == "hw.memsize" else num_bytes // mmap.PAGESIZE
        if key not in numbers:
            return -1
        content = numbers[key].to_bytes(8 if key == "hw.memsize" else 4, sys.byteorder)
    if len(content) > size._obj.value:
        return -1
    ctypes.memmove(value, content, len(content))
    size._obj.value = len(content)
    return 0


def _proc_pid_rusage(pid: int, flavor: int, usage: Any) -> int:
    try:
        resident = int(_read(f"/proc/{pid}/statm").split()[1]) * mmap.PAGESIZE
    except (OSError, IndexError):
        return -1
    if flavor != 0:
        return -1
    ctypes.memmove(usage, struct.pack("@16s10Q", b"", *[0] * 6, resident, resident, 0, 0), 96)
    return 0


def _madvise(address: Any, num_bytes: Any, advice: int) -> int:
    if advice not in _ADVICE.values():
        raise AssertionError(f"madvise({advice}) is Linux's")
    call: Any = _find(ctypes.CDLL(None), "madvise")
    return int(call(address, num_bytes, advice))


def _syscall(*arguments: Any) -> int:
    raise AssertionError("macOS has other numbers of system calls")


_IMITATED: dict[str, Any] = {
    "sysctlbyname": _sysctlbyname,
    "proc_pid_rusage": _proc_pid_rusage,
    "madvise": _madvise,
    "syscall": _syscall,
}
if sys.platform == "linux":
    imitate()
