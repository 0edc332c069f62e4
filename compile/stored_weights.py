"""How each tensor of a source is stored in the artifact: kept as it is, or rounded to fewer bits.

Knows numbers and kinds; nothing of kernel layout, plans and files.
"""

from __future__ import annotations

from typing import Literal

from .sources import Source
from .weights.quantization import GROUP, Float32, Mode, Weight, WeightKind, requantize

Quantize = Literal["keep", "q4", "q8", "f16", "f32"]

# One wrong bit in these costs most, and they are read once a token: as q4 they stay in 8 bits, as llama.cpp does.
_KEPT_IN_8_BITS = ("model.embed_tokens.weight", "lm_head.weight")


class StoredWeights:
    """The tensors of `source` as `quantize` stores them. Vectors are float32 in any case.

    Attributes:
        kinds: how each matrix is stored, by its checkpoint name.
    """

    def __init__(self, source: Source, quantize: Quantize) -> None:
        self.source = source
        matrices = {name: tensor for name, tensor in source.tensors().items() if len(tensor.shape) == 2}
        self._modes = {name: _mode(name, tensor.shape[1], quantize) for name, tensor in matrices.items()}
        self.kinds: dict[str, WeightKind] = {name: self.read(name, slice(0, 1)).kind for name in matrices}

    def read(self, name: str, rows: slice | None = None) -> Weight:
        """The numbers that the artifact holds for a tensor, or for the rows `[start, stop)` of a matrix."""
        weight, mode = self.source.read(name, rows), self._modes.get(name)
        return weight if mode is None else requantize(weight, mode)

    def float32(self, name: str) -> Float32:
        """The same as float32."""
        return self.read(name).dequantize()


def _mode(name: str, num_inputs: int, quantize: Quantize) -> Mode | None:
    """What a matrix is rounded to; None keeps it."""
    if quantize == "keep":
        return None
    mode: Mode = "q8" if quantize == "q4" and name in _KEPT_IN_8_BITS else quantize
    return "f16" if mode in ("q4", "q8") and num_inputs % GROUP else mode  # rows that are no multiple of a group
