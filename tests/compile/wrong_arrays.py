"""Arrays as no checkpoint should have them: other shapes, other types, numbers that cannot be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from radixlm.compile.sources import open_source
from radixlm.compile.sources.tensor_files import SafetensorsFile
from radixlm.runtime.errors import RadixLMError

from .conftest import write_safetensors

HUGE = 10**12
_TYPES = (np.int8, np.uint8, np.int32, np.int64, np.float16, np.float32)


def shapes(array: np.ndarray) -> Iterator[np.ndarray]:
    """An axis empty, longer by one, shorter by one, gone, in front, and none at all."""
    for axis in range(array.ndim):
        for size in (0, array.shape[axis] - 1, array.shape[axis] + 1):
            yield array.take(np.arange(size), axis, mode="wrap")
    yield array[None]
    yield array.reshape(-1)
    if array.ndim:
        yield array[0]
        yield array.reshape(-1)[0].reshape(())
    yield array.reshape(-1)[:0]


def values(array: np.ndarray) -> Iterator[np.ndarray]:
    """Other types; all zeros, all ones, all bits set; and for whole numbers one that is huge, or negative."""
    yield from (np.ones(array.shape, dtype) for dtype in _TYPES if dtype != array.dtype)
    for byte in (0, 0xFF):
        yield np.full(array.nbytes, byte, np.uint8).view(array.dtype).reshape(array.shape)
    yield np.ones_like(array)
    if array.dtype.kind in "iu" and array.ndim:
        for number in (HUGE, -1):
            changed = array.astype(np.int64)
            changed.reshape(-1)[0] = number
            yield changed


def arrays_of(path: Path) -> dict[str, np.ndarray]:
    """Copies of all arrays of a checkpoint: its file may be written anew."""
    file = SafetensorsFile(path / "model.safetensors")
    arrays = {name: file.values(name) for name in file.tensors}
    file.close()
    return arrays


def read_or_refused(
    path: Path, arrays: Mapping[str, np.ndarray], name: str, wrong: np.ndarray | None, tensors: tuple[str, ...] = ()
) -> None:
    """Read `tensors` of a checkpoint of `arrays` where `name` is `wrong`, or None for missing: done, or one line.

    The file stays as it is written here.
    """
    others = {other: array for other, array in arrays.items() if other != name}
    write_safetensors(path / "model.safetensors", others if wrong is None else others | {name: wrong})
    try:
        with open_source(path) as source:
            for tensor in tensors:
                source.read(tensor)
                source.read_float32(tensor)
    except RadixLMError as refused:
        assert "\n" not in str(refused)
    except Exception as error:
        what = "missing" if wrong is None else f"{wrong.dtype} of shape {wrong.shape}, {wrong.reshape(-1)[:2]}"
        raise AssertionError(f"{path.name}: with {name} {what}: {type(error).__name__} {error}") from error
