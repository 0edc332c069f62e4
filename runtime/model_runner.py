"""Runs an artifact's compiled module: weights mapped, KV pool allocated, each forward checked before it is called.

The only file that imports `tvm_ffi`. Knows arrays; pages belong to `page_pool.py`, tokens to `sequence.py`. One thread
owns a runner: TVM's thread pool belongs to the thread that calls.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import mmap
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .artifact import Artifact
from .batch import Batch, Float32Array, Int32Array, PageCopy
from .cpu import default_num_threads
from .errors import CorruptArtifact, EngineError, InvalidParameter
from .manifest import PAGE_SIZE

_ALIGNMENT = 64
_KV_DTYPES = {"f16": np.float16, "f32": np.float32}
_PADDED_VOCABULARY = 16
_NO_ROWS: Int32Array = np.zeros(1, np.int32)[:0]  # an array made empty has strides that TVM refuses


class ModelRunner:
    """An artifact ready to run, with a KV pool of `num_pages` pages.

    Args:
        num_threads: of TVM's pool, by default every processor that this process may use. The first runner of a
            process decides it for all.

    Raises:
        UnsupportedCPU: the module needs features that this machine lacks.
        CorruptArtifact: the module cannot be loaded, or is not the one that the manifest describes.
        EngineError: the memory for the KV pool cannot be had.
    """

    def __init__(self, artifact: Artifact, *, num_pages: int, num_threads: int | None = None) -> None:
        if num_pages < 1:
            raise InvalidParameter(f"num_pages is {num_pages}, must be at least 1")
        artifact.check_cpu()
        manifest = artifact.manifest
        layout, module, vocab_size = manifest.kv, manifest.module, manifest.model.vocab_size
        self._module, self._vocab_size, self._num_pages = module, vocab_size, num_pages
        self._max_pages = -(-manifest.context_length // PAGE_SIZE)
        self._functions = _load_functions(artifact, num_threads or default_num_threads())
        weights = _map_weights(artifact)
        pool_shape = (layout.num_layers, num_pages, 2, layout.num_kv_heads, PAGE_SIZE * layout.head_dim)
        try:
            pool = _zeros(pool_shape, _KV_DTYPES[layout.dtype])
            workspace = _zeros((module.workspace_bytes,), np.uint8)
            padded = -(-vocab_size // _PADDED_VOCABULARY) * _PADDED_VOCABULARY
            self._logits: Float32Array = _zeros((module.max_num_logits, padded), np.float32)
        except (OSError, ValueError, OverflowError) as error:
            raise EngineError(
                f"{num_pages} pages of {layout.page_bytes} bytes cannot be allocated ({error}); lower --kv-cache-gb"
            ) from None
        self._pool, self._weights, self._workspace = (_tensor(array) for array in (pool, weights, workspace))

    def forward(self, batch: Batch) -> Float32Array:
        """Write the KV of `batch` to the pool; return logits `[R, vocab_size]`, valid until the next call.

        Raises:
            EngineError: the batch does not fit the module or the pool; nothing was written.
        """
        self._check(batch)
        logits = self._logits[: len(batch.logit_rows)]
        arguments = (
            batch.token_ids,
            batch.positions,
            batch.slots,
            batch.row_of_token,
            batch.page_table,
            batch.kv_lengths,
            batch.logit_rows if len(batch.logit_rows) else _NO_ROWS,
        )
        tensors = [_tensor(array) for array in arguments]
        self._functions["forward"](*tensors, self._pool, self._weights, self._workspace, _tensor(logits))
        return logits[:, : self._vocab_size]

    def copy_rows(self, copies: Sequence[PageCopy]) -> None:
        """Do the copies, in order."""
        for copy in copies:  # one at a time: a page may be the target of one and the source of the next
            pages = (copy.src_page, copy.dst_page)
            if not all(0 <= page < self._num_pages for page in pages) or not 0 <= copy.num_rows <= PAGE_SIZE:
                raise EngineError(f"{copy} is outside the pool of {self._num_pages} pages of {PAGE_SIZE} rows")
            arrays = (np.array([value], np.int32) for value in (*pages, copy.num_rows))
            self._functions["copy_pages"](self._pool, *(_tensor(array) for array in arrays))

    def close(self) -> None:
        """Let go of pool, weights and workspace."""
        self._pool = self._weights = self._workspace = None
        self._functions = {}

    def _check(self, batch: Batch) -> None:
        module, num_tokens, num_logits = self._module, batch.token_ids.size, batch.logit_rows.size
        if not 1 <= num_tokens <= module.max_num_tokens or num_logits > module.max_num_logits:
            raise EngineError(
                f"a step of {num_tokens} tokens and {num_logits} logits; the module takes 1 to {module.max_num_tokens} "
                f"and up to {module.max_num_logits}"
            )
        num_sequences, width = batch.page_table.shape if batch.page_table.ndim == 2 else (0, 0)
        if num_sequences < 1 or not 1 <= width <= self._max_pages:
            raise EngineError(
                f"the page_table has shape {batch.page_table.shape}; the module takes a row for each sequence and "
                f"1 to {self._max_pages} columns"
            )
        _check_range("token_ids", batch.token_ids, 0, self._vocab_size, (num_tokens,))
        _check_range("positions", batch.positions, 0, 1 << 30, (num_tokens,))
        _check_range("slots", batch.slots, 0, self._num_pages * PAGE_SIZE, (num_tokens,))
        _check_range("row_of_token", batch.row_of_token, 0, num_sequences, (num_tokens,))
        _check_range("page_table", batch.page_table, 0, self._num_pages, (num_sequences, width))
        _check_range("kv_lengths", batch.kv_lengths, 1, width * PAGE_SIZE + 1, (num_tokens,))
        _check_range("logit_rows", batch.logit_rows, 0, num_tokens, (num_logits,))


def _check_range(name: str, array: Int32Array, low: int, high: int, shape: tuple[int, ...]) -> None:
    """All of `array`, int32 and C-contiguous of this shape, in `[low, high)`."""
    if array.dtype != np.int32 or not array.flags.c_contiguous or array.shape != shape:
        raise EngineError(f"{name} is {array.dtype} {array.shape}; C-contiguous int32 {shape} is needed")
    if array.size and (array.min() < low or array.max() >= high):
        raise EngineError(f"{name} holds {array.min()}..{array.max()}, must be in {low}..{high - 1}")


def _zeros(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Page-aligned zeros that take memory only once they are touched."""
    size = int(np.prod([np.dtype(dtype).itemsize, *shape], dtype=object))
    memory = mmap.mmap(-1, max(size, 1))
    return np.frombuffer(memory, np.uint8, size).view(dtype).reshape(shape)


def _map_weights(artifact: Artifact) -> npt.NDArray[np.uint8]:
    """The data section of the weights, mapped and never copied (MAP_PRIVATE, because DLPack wants writable memory)."""
    offset = artifact.data_offset()
    with artifact.weights_path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    weights = np.frombuffer(memory, np.uint8, artifact.manifest.module.weights_bytes, offset)
    assert weights.ctypes.data % _ALIGNMENT == 0
    return weights


def _tensor(array: npt.NDArray[Any]) -> Any:
    return _tvm_ffi().from_dlpack(array)


@functools.cache
def _tvm_ffi() -> Any:
    """TVM's runtime without its compiler.

    `tvm_ffi` imports torch where it is installed, which would cost over a second: it is hidden meanwhile.
    """
    os.environ.setdefault("TVM_FFI_DISABLE_TORCH_C_DLPACK", "1")
    hide = "torch" not in sys.modules
    if hide:
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        import tvm_ffi
    finally:
        if hide:
            del sys.modules["torch"]
    package = importlib.util.find_spec("tvm")
    if package is None or package.origin is None:
        raise EngineError("apache-tvm is not installed; install radixlm with its dependencies")
    library = Path(package.origin).parent / "lib" / "libtvm_runtime.so"
    try:
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise EngineError(f"TVM's runtime cannot be loaded ({error}); install apache-tvm again") from None
    return tvm_ffi


def _load_functions(artifact: Artifact, num_threads: int) -> dict[str, Any]:
    # TVM reads it once, when the pool starts; its own default is half of the cores
    os.environ.setdefault("TVM_NUM_THREADS", str(num_threads))
    try:
        library = _tvm_ffi().load_module(str(artifact.module_path.resolve()))
        return {name: library[name] for name in artifact.manifest.module.entry_points}
    except (RuntimeError, AttributeError, KeyError, OSError) as error:
        reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        raise CorruptArtifact(f"{artifact.module_path} cannot be loaded ({reason}); compile it again") from None
