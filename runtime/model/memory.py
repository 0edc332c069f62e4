"""Memory that a model works in: zeros that cost nothing before they are used, weights mapped from their file, and
states.

Knows sizes, files and arrays, not what lies where: which sequence has which slot of the pool of states is the caller's
to know.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ..artifact import Artifact
from ..artifact.model_config import STATE_ITEM_BYTES, ModelConfig
from ..errors import EngineError
from .batch import Batch, Float32Array, Int32Array, UInt8Array

_ALIGNMENT = 64
_MADV_POPULATE_READ = 22  # Linux 5.14; older ones refuse it
_MAPPED_AT_A_TIME = 16 << 20  # bytes; other threads wait to map memory meanwhile


def zeros(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Page-aligned zeros that take memory only once they are touched."""
    size = int(np.prod([np.dtype(dtype).itemsize, *shape], dtype=object))
    memory = mmap.mmap(-1, max(size, 1))
    return np.frombuffer(memory, np.uint8, size).view(dtype).reshape(shape)


def map_weights(artifact: Artifact) -> npt.NDArray[np.uint8]:
    """The data section of the weights, mapped and never copied (MAP_PRIVATE, because DLPack wants writable memory).

    In huge pages, where the file system and the page cache have them.
    """
    offset = artifact.data_offset()
    with artifact.weights_path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    with contextlib.suppress(AttributeError, OSError):  # the system or its kernel has none
        memory.madvise(mmap.MADV_HUGEPAGE)
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


class StateSlots:
    """`num_slots` states of `num_items` numbers, all zeros at first, for steps of at most `max_rows` sequences.

    Attributes:
        pool: float32 `[num_slots, num_items]`; nothing writes the first slot.
    """

    def __init__(self, num_slots: int, num_items: int, max_rows: int) -> None:
        self.pool: Float32Array = zeros((num_slots, num_items), np.float32)
        self._in: Int32Array = zeros((max_rows,), np.int32)
        self._out: Int32Array = zeros((max_rows,), np.int32)

    @classmethod
    def of(cls, model: ModelConfig, num_slots: int, max_rows: int) -> Self | None:
        """The states of a model; None if it keeps none."""
        return cls(num_slots, model.state_bytes // STATE_ITEM_BYTES, max_rows) if model.state_bytes else None

    @property
    def state_bytes(self) -> int:
        """Bytes of a state."""
        return int(self.pool.itemsize * self.pool.shape[1])

    def read_state(self, slot: int) -> UInt8Array:
        """A copy of a slot's state, uint8 `[state_bytes]`."""
        state: UInt8Array = self.pool[slot].view(np.uint8).copy()
        return state

    def write_state(self, slot: int, state: UInt8Array) -> None:
        """Put `state`, uint8 `[state_bytes]`, into a slot that is not the first.

        Raises:
            EngineError: there is no such slot, or the state is of another size.
        """
        if not 0 < slot < len(self.pool) or state.nbytes != self.state_bytes:
            raise EngineError(f"a state of {state.nbytes} bytes for slot {slot}; {self.state_bytes} are one")
        self.pool[slot].view(np.uint8)[:] = state

    def rows(self, num_rows: int) -> tuple[Int32Array, Int32Array]:
        """The slots that each sequence of a step reads and writes, as views that `set_rows` fills."""
        return self._in[:num_rows], self._out[:num_rows]

    def set_rows(self, batch: Batch) -> None:
        """Take the slots of the next step.

        Raises:
            EngineError: there is not one of each for each sequence, one is outside the pool or the first is to be
                written, or two sequences with tokens use one that either of them writes.
        """
        num_rows = batch.shape[1]
        for name, slots, least in (("state_in", batch.state_in, 0), ("state_out", batch.state_out, 1)):
            if slots is None or slots.dtype != np.int32 or slots.shape != (num_rows,):
                found = "missing" if slots is None else f"{slots.dtype} {slots.shape}"
                raise EngineError(f"{name} is {found}; this model keeps states: int32 {(num_rows,)} is needed")
            if slots.min() < least or slots.max() >= len(self.pool):
                raise EngineError(
                    f"{name} holds {slots.min()}..{slots.max()}, must be in {least}..{len(self.pool) - 1}"
                )
        assert batch.state_in is not None and batch.state_out is not None
        read, written = batch.state_in.tolist(), batch.state_out.tolist()
        if _is_shared(read, written):
            rows = np.unique(batch.arrays.row_of_token).tolist()
            if _is_shared([read[row] for row in rows], [written[row] for row in rows]):
                raise EngineError(
                    f"sequences share slots that one of them writes: state_in {read}, state_out {written}"
                )
        self._in[:num_rows], self._out[:num_rows] = read, written

    def leave_alone(self, num_rows: int) -> None:
        """Name slots for a step that reads and writes none of them."""
        self._in[:num_rows], self._out[:num_rows] = 0, 1


def _is_shared(read: list[int], written: list[int]) -> bool:
    """Whether a slot that is written is another's, too.

    >>> _is_shared([0, 0, 3], [1, 2, 3]), _is_shared([0, 1], [1, 2])
    (False, True)
    """
    taken = set(written)
    return len(taken) < len(written) or any(
        mine in taken and mine != out for mine, out in zip(read, written, strict=True)
    )
