"""A GGUF file with its matrices in float16, to round anew; where no such model can be had, one is made of Q4_1.

The values of a Q4_1 group lie on 16 levels, which real weights do not. A draw moves each of them by a random part of
half a step either way, so that it could be a weight that Q4_1 rounded to that level.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from .gguf_files import rewritten, values_of

_GROUP = 32
_BLOCK_BYTES = 20  # float16 scale, float16 minimum, 32 codes of 4 bits


def f16_of(source: Path, cache_dir: Path, draw: int | None = None) -> Path:
    """The file made of `source`, from `cache_dir` if it is there; without a draw, the values as they are.

    A draw needs all matrices, but for the embedding, in Q4_1.
    """
    label = "" if draw is None else f"-draw{draw}"
    rng = None if draw is None else np.random.default_rng(draw)

    def convert(tensor: gguf.ReaderTensor) -> NDArray[Any]:
        values = values_of(tensor)
        if rng is not None:
            values += _steps(tensor) * rng.uniform(-0.5, 0.5, values.shape).astype(np.float32)
        return values.astype(np.float16)

    return rewritten(source, cache_dir / f"{source.stem}{label}.F16.gguf", gguf.LlamaFileType.MOSTLY_F16, convert)


def _steps(tensor: gguf.ReaderTensor) -> NDArray[np.float32]:
    """Between two levels, for each value: float32 `[rows, columns]`."""
    if tensor.tensor_type != gguf.GGMLQuantizationType.Q4_1:
        raise SystemExit(f"{tensor.name} is {tensor.tensor_type.name}; draws are made of Q4_1 files")
    blocks = tensor.data.reshape(-1, _BLOCK_BYTES)
    scales = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
    return np.repeat(scales, _GROUP, axis=1).reshape(tensor.data.shape[0], -1)
