"""Memory that a model works in: zeros that cost nothing before they are used, and weights mapped from their file.

Knows sizes and files, not what lies where.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

import numpy as np
import numpy.typing as npt

from ..artifact import Artifact

_ALIGNMENT = 64
_MADV_POPULATE_READ = 22  # Linux 5.14; older ones refuse it
_MAPPED_AT_A_TIME = 16 << 20  # bytes; other threads wait to map memory meanwhile


def zeros(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Page-aligned zeros that take memory only once they are touched."""
    size = int(np.prod([np.dtype(dtype).itemsize, *shape], dtype=object))
    memory = mmap.mmap(-1, max(size, 1))
    return np.frombuffer(memory, np.uint8, size).view(dtype).reshape(shape)


def map_weights(artifact: Artifact) -> npt.NDArray[np.uint8]:
    """The data section of the weights, mapped and never copied (MAP_PRIVATE, because DLPack wants writable memory)."""
    offset = artifact.data_offset()
    with artifact.weights_path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    weights = np.frombuffer(memory, np.uint8, artifact.manifest.module.weights_bytes, offset)
    assert weights.ctypes.data % _ALIGNMENT == 0
    return weights


def map_in(memory: npt.NDArray[np.uint8]) -> None:
    """Have the system read and map the pages of `memory` before they are used, unless they are more than it has.

    The first forward would do that page by page, in the middle of its work.
    """
    if memory.nbytes > os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE:
        return
    madvise = ctypes.CDLL(None).madvise  # the one of `mmap` keeps the interpreter's lock
    start, stop = memory.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE, memory.ctypes.data + memory.nbytes
    for address in range(start, stop, _MAPPED_AT_A_TIME):
        size = min(_MAPPED_AT_A_TIME, stop - address)
        if madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _MADV_POPULATE_READ):
            return
