"""Arrays as files hold them, and values packed into words one by one, for tests of formats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

NAMES = {
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(np.int8): "I8",
    np.dtype(np.uint8): "U8",
    np.dtype(np.int32): "I32",
    np.dtype(np.uint32): "U32",
    np.dtype(np.int64): "I64",
    np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
    np.dtype(ml_dtypes.float8_e8m0fnu): "F8_E8M0",
}


@dataclass(frozen=True)
class Stored:
    """An array in memory that reads as one in a file."""

    values: np.ndarray

    @property
    def dtype(self) -> str:
        return NAMES[self.values.dtype]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def __getitem__(self, index: Any) -> np.ndarray:
        return self.values[index].copy() if self.values.ndim else self.values.copy()


def stored(arrays: dict[str, np.ndarray]) -> dict[str, Stored]:
    return {name: Stored(array) for name, array in arrays.items()}


def packed(values: np.ndarray, bits: int) -> np.ndarray:
    """int32 `[R, W]`: value i of each row of `[R, C]` at bit i * bits, from the lowest of the first word up."""
    words = np.zeros((len(values), -(-values.shape[1] * bits // 32)), np.uint64)
    for i in range(values.shape[1]):
        word, at = divmod(i * bits, 32)
        value = values[:, i].astype(np.uint64) << np.uint64(at)
        words[:, word] |= value & np.uint64(0xFFFFFFFF)
        if at + bits > 32:
            words[:, word + 1] |= value >> np.uint64(32)
    return words.astype(np.uint32).view(np.int32)
