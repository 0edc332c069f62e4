"""MLX's matrices, as mlx-lm writes them.

`weight` is uint32 `[N, K * bits / 32]`, with value `i` of a row at bit `i * bits`; `scales` and `biases` are `[N, K /
group]`. Experts have an axis before these. A weight is `scale * q + bias` (`mx.dequantize`). Some modules may have
groups and bits of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from radixlm.runtime.errors import CorruptSource, UnsupportedTensor

from ..source import TensorInfo
from .floats import fp4_tensor
from .grouped import GroupedRows, unpacked
from .tensors import FLOATS, WORDS, Array, GroupedTensor, as_matrices, group_of, number, part

_BITS = (2, 3, 4, 5, 6, 8)
_MODES = ("affine", "mxfp4", "nvfp4")


@dataclass(frozen=True)
class MLX:
    """The MLX format; `config` is `quantization` of config.json, with modules' own settings under their names."""

    label: str
    config: Mapping[str, Any]
    marker: str = ".scales"
    endings: tuple[str, ...] = (".weight", ".scales", ".biases")
    unused: tuple[str, ...] = ()

    def matrix(self, name: str, parts: Mapping[str, Array]) -> GroupedTensor:
        """Return the matrix by its module's own settings."""
        own = self.config.get(name.removeprefix(f"{self.label}: "))
        config = own if isinstance(own, Mapping) else self.config
        mode = config.get("mode", self.config.get("mode", "affine"))
        if mode not in _MODES:
            raise UnsupportedTensor(
                f"{name}: MLX's mode {mode!r} is not read, only {', '.join(_MODES)}; take a checkpoint of 4 or 8 bits, "
                "or a GGUF file of the same model"
            )
        bits, group = number(name, config, "bits", _BITS), number(name, config, "group_size")
        parts = as_matrices(parts)
        words = part(name, parts, ".weight", dtypes=WORDS)
        scales = part(name, parts, ".scales", dtypes=FLOATS if mode == "affine" else ("U8", "F8_E8M0", "F8_E4M3"))
        shape = (words.shape[0], words.shape[1] * 32 // bits)
        group_of(name, shape[1], scales.shape[-1], group)
        part(name, parts, ".scales", (shape[0], shape[1] // group))
        if mode != "affine":
            if bits != 4:
                raise CorruptSource(f"{name}: mode {mode} has 4 bits, the configuration says {bits}")
            return fp4_tensor(name, words, scales)
        part(name, parts, ".biases", scales.shape, dtypes=FLOATS)

        def decode(rows: slice) -> GroupedRows:
            codes = unpacked(words[rows], bits, shape[1])
            return GroupedRows((1 << bits) - 1, codes, scales[rows], minima=parts[".biases"][rows])

        return GroupedTensor(name, TensorInfo(shape, f"MLX_{bits}"), decode)
