"""Memory of a model: zeros that use memory only once touched and can be released, mapped weights, and states.

Knows sizes, files and arrays, not their contents: the caller knows which sequence has which slot of the pool of states.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ..artifact import Artifact
from ..artifact.lora import LoraInfo
from ..artifact.model_config import STATE_ITEM_BYTES, ModelConfig
from ..artifact.window_layers import WindowLayers
from ..errors import EngineError
from ..system import SPARSE_FLAGS, map_pages, remove_pages, total_memory_bytes, use_huge_pages
from .batch import NO_ADAPTER, Batch, Float32Array, Int32Array, UInt8Array

_ALIGNMENT = 64
_LORA_DTYPES = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}
_MAPPED_AT_A_TIME = 16 << 20  # bytes; other threads cannot map memory during this time


def zeros(shape: tuple[int, ...], dtype: npt.DTypeLike, *, is_sparse: bool = False) -> npt.NDArray[Any]:
    """Return page-aligned zeros that use memory only once they are touched.

    With `is_sparse` they can be larger than the machine's memory.
    """
    size = int(np.prod([np.dtype(dtype).itemsize, *shape], dtype=object))
    memory = mmap.mmap(-1, max(size, 1), flags=SPARSE_FLAGS if is_sparse else mmap.MAP_SHARED)
    return np.frombuffer(memory, np.uint8, size).view(dtype).reshape(shape)


def release_memory(array: npt.NDArray[Any], start: int, stop: int) -> bool:
    """Release the whole pages within bytes `[start, stop)` of `zeros`, which become zeros again.

    Return whether the system can do that.
    """
    first = array.ctypes.data
    start, stop = -(-(first + start) // mmap.PAGESIZE) * mmap.PAGESIZE, (first + stop) // mmap.PAGESIZE * mmap.PAGESIZE
    return stop <= start or remove_pages(start, stop - start)


def can_release_memory() -> bool:
    """Return whether the system can release memory of `zeros`."""
    return release_memory(zeros((mmap.PAGESIZE,), np.uint8), 0, mmap.PAGESIZE)


class WindowPool:
    """The part of a KV pool of `num_pages` pages for layers with a sliding window, whose rows can be dropped."""

    def __init__(self, pool: npt.NDArray[Any], num_pages: int, layers: WindowLayers) -> None:
        self._pool, self._num_pages, self._layers = pool, num_pages, layers

    def drop(self, runs: Iterable[range]) -> None:
        """Release the memory of runs of pages, as far as they fill pages of the system."""
        for run in runs:
            stop = min(run.stop, self._num_pages)
            for before, size in self._layers.parts:
                first = before * self._num_pages
                release_memory(self._pool, first + run.start * size, first + stop * size)


def map_weights(artifact: Artifact) -> npt.NDArray[np.uint8]:
    """Map the data section of the weights, without copying it (MAP_PRIVATE, because DLPack requires writable memory).

    Uses huge pages if the file system and the page cache have them.
    """
    offset = artifact.data_offset()
    with artifact.weights_path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    mapped = np.frombuffer(memory, np.uint8)
    use_huge_pages(mapped.ctypes.data, mapped.nbytes)
    weights = mapped[offset : offset + artifact.manifest.module.weights_bytes]
    assert weights.ctypes.data % _ALIGNMENT == 0
    return weights


def map_in(memory: npt.NDArray[np.uint8]) -> None:
    """Make the system read and map the pages of `memory` before they are used, unless they exceed the machine's memory.

    Otherwise the first forward would do that page by page.
    """
    if memory.nbytes > total_memory_bytes():
        return
    start, stop = memory.ctypes.data, memory.ctypes.data + memory.nbytes
    for address in range(start, stop, _MAPPED_AT_A_TIME):
        if not map_pages(address, min(_MAPPED_AT_A_TIME, stop - address)):
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
        """Return the states of a model; None if it keeps none."""
        return cls(num_slots, model.state_bytes // STATE_ITEM_BYTES, max_rows) if model.state_bytes else None

    @property
    def state_bytes(self) -> int:
        """Bytes of a state."""
        return int(self.pool.itemsize * self.pool.shape[1])

    def read_state(self, slot: int) -> UInt8Array:
        """Return a copy of a slot's state, uint8 `[state_bytes]`."""
        state: UInt8Array = self.pool[slot].view(np.uint8).copy()
        return state

    def write_state(self, slot: int, state: UInt8Array) -> None:
        """Write `state`, uint8 `[state_bytes]`, to a slot other than the first.

        Raises:
            EngineError: there is no such slot, or the state has another size.
        """
        if not 0 < slot < len(self.pool) or state.nbytes != self.state_bytes:
            raise EngineError(f"a state of {state.nbytes} bytes for slot {slot}; {self.state_bytes} are one")
        self.pool[slot].view(np.uint8)[:] = state

    def rows(self, num_rows: int) -> tuple[Int32Array, Int32Array]:
        """Return the slots that each sequence of a step reads and writes, as views that `set_rows` fills."""
        return self._in[:num_rows], self._out[:num_rows]

    def set_rows(self, batch: Batch) -> None:
        """Set the slots of the next step.

        Raises:
            EngineError: there is not one of each for each sequence, one is outside the pool, or the first is to be
                written. Or two sequences with tokens use a slot that either of them writes.
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
        """Set slots for a step that neither reads nor writes any."""
        self._in[:num_rows], self._out[:num_rows] = 0, 1


class AdapterRows:
    """LoRA adapters, all zeros until the caller puts some there, and those of the tokens of a step.

    Attributes:
        memory: `[max_loras, info.stride]` of the artifact's type, bf16 as uint16: the matrices of adapters.
        ranks: int32 `[max_loras, info.num_matrices]`, blocks of 16; 0 for a matrix that an adapter does not change.
    """

    def __init__(self, info: LoraInfo, max_tokens: int) -> None:
        self.info = info
        self.memory: npt.NDArray[Any] = zeros((info.max_loras, info.stride), _LORA_DTYPES[info.dtype])
        self.ranks: Int32Array = zeros((info.max_loras, info.num_matrices), np.int32)
        self._of_token: Int32Array = zeros((max_tokens,), np.int32)

    def rows(self, num_tokens: int) -> Int32Array:
        """Return the adapter of each token of a step, as a view that `set_rows` fills."""
        return self._of_token[:num_tokens]

    def set_rows(self, batch: Batch) -> None:
        """Set the adapters of the next step.

        Raises:
            EngineError: there is not one for each token, or one is outside the memory.
        """
        num_tokens, adapters = batch.shape[0], batch.adapters
        if adapters is None:
            self._of_token[:num_tokens] = NO_ADAPTER
            return
        if adapters.dtype != np.int32 or adapters.shape != (num_tokens,):
            raise EngineError(f"adapters are {adapters.dtype} {adapters.shape}; int32 {(num_tokens,)} is needed")
        if adapters.min() < NO_ADAPTER or adapters.max() >= self.info.max_loras:
            raise EngineError(
                f"adapters hold {adapters.min()}..{adapters.max()}, must be in {NO_ADAPTER}..{self.info.max_loras - 1}"
            )
        self._of_token[:num_tokens] = adapters


def _is_shared(read: list[int], written: list[int]) -> bool:
    """Return whether a written slot is also used by another sequence.

    >>> _is_shared([0, 0, 3], [1, 2, 3]), _is_shared([0, 1], [1, 2])
    (False, True)
    """
    taken = set(written)
    return len(taken) < len(written) or any(
        mine in taken and mine != out for mine, out in zip(read, written, strict=True)
    )
