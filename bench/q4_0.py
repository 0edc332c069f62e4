"""A GGUF file's matrices rounded to Q4_0, the format that llama.cpp has its fastest CPU kernels for.

gguf's rounding is llama.cpp's own, byte for byte.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from .gguf_files import rewritten, values_of


def q4_0_of(source: Path, cache_dir: Path) -> Path:
    """The Q4_0 file made of `source`, from `cache_dir` if it is there; it appears there whole or not at all."""
    made = cache_dir / f"{source.stem}.requantized-Q4_0.gguf"
    return rewritten(source, made, gguf.LlamaFileType.MOSTLY_Q4_0, _rounded)


def _rounded(tensor: gguf.ReaderTensor) -> NDArray[np.uint8]:
    return gguf.quantize(values_of(tensor), gguf.GGMLQuantizationType.Q4_0)
