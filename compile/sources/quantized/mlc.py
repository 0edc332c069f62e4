"""MLC-LLM's matrices: groups of 32 with 4-bit codes, along the inputs (layout 0) or along the outputs (layout 1).

Layout 1: `q_weight` uint32 `[N, K / 8]`, `q_scale` `[N, K / 32]`; experts have an axis before these. Layout 0 has both
transposed for linear layers, and embeddings as layout 1. A weight is `(q - 7) * scale`, with `q` from 0 to 14
(`_dequantize` in mlc_llm's quantization/group_quantization.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from radixlm.runtime.errors import CorruptSource, UnsupportedTensor

from ..source import TensorInfo
from .grouped import GroupedRows, unpacked
from .tensors import FLOATS, WORDS, Array, GroupedTensor, as_matrices, part

_BITS, _GROUP, _ZERO, _MAX_CODE = 4, 32, 7, 14
_PER_WORD = 32 // _BITS
_EMBEDDINGS = ("embed_tokens", "transformer.embd")
_TRANSPOSED = {
    "q4f16_0": True,
    "q4bf16_0": True,
    "q4f16_1": False,
    "q4bf16_1": False,
    "q4f32_1": False,
    "q4f16_2": False,
}
_PLAIN = ("q0f16", "q0bf16", "q0f32")


@dataclass(frozen=True)
class MLC:
    """The MLC format by its name in `mlc-chat-config.json`, such as q4f16_1."""

    quantization: str
    marker: str = ".q_weight"
    endings: tuple[str, ...] = (".q_weight", ".q_scale")
    unused: tuple[str, ...] = ()

    @classmethod
    def of(cls, label: str, quantization: str) -> MLC:
        """Return the format of this name. Raises UnsupportedTensor for an unsupported one."""
        if quantization not in (*_TRANSPOSED, *_PLAIN):
            why = "its groups of 40 fit no kernel" if quantization.startswith("q3") else "it is not known here"
            raise UnsupportedTensor(
                f"{label}: MLC's quantization {quantization} is not read ({why}); take the same model as q4f16_1, "
                f"one of {', '.join(sorted({*_TRANSPOSED, *_PLAIN} - {'q4f16_1'}))}, or as a GGUF file"
            )
        return cls(quantization)

    def matrix(self, name: str, parts: Mapping[str, Array]) -> GroupedTensor:
        """Return the matrix in either layout."""
        parts = as_matrices(parts)
        words, scales = part(name, parts, ".q_weight", dtypes=WORDS), part(name, parts, ".q_scale", dtypes=FLOATS)
        turned = _TRANSPOSED.get(self.quantization, False) and not name.endswith(_EMBEDDINGS)
        num_outputs, num_words = words.shape[::-1] if turned else words.shape
        num_inputs = num_words * _PER_WORD
        groups = num_inputs // _GROUP
        part(name, parts, ".q_scale", (groups, num_outputs) if turned else (num_outputs, groups))
        info = TensorInfo((num_outputs, num_inputs), f"MLC_{self.quantization}")

        def decode(rows: slice) -> GroupedRows:
            data, factors = (array[:, rows].T if turned else array[rows] for array in (words, scales))
            codes = unpacked(data, _BITS, num_inputs)
            if codes.max(initial=0) > _MAX_CODE:
                raise CorruptSource(
                    f"{name}.q_weight holds codes above {_MAX_CODE}, which MLC never writes; fetch it again"
                )
            return GroupedRows(_MAX_CODE, codes, np.ascontiguousarray(factors), _ZERO)

        return GroupedTensor(name, info, decode)
