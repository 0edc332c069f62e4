"""AWQ's matrices (Lin et al., 2023) as AutoAWQ writes them in its layout `gemm`.

`qweight` int32 `[K, N / 8]`: a word holds eight outputs of one input, in the order 0, 2, 4, 6, 1, 3, 5, 7. `qzeros`
int32 `[K / group, N / 8]` does the same. `scales` `[K / group, N]`. A weight is `(q - zero) * scale` (`dequantize_gemm`
in awq/utils/packing_utils.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from radixlm.runtime.errors import UnsupportedTensor

from ..source import TensorInfo
from .grouped import Grouped, unpacked
from .tensors import FLOATS, WORDS, Array, GroupedTensor, group_of, number, part

_BITS, _OUTPUTS = 4, 8  # of a code, in a word
_PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # of each output in its word


@dataclass(frozen=True)
class AWQ:
    """The format as a configuration describes it; a `group_size` of -1 is a whole row."""

    group_size: int
    marker: str = ".qweight"
    endings: tuple[str, ...] = (".qweight", ".qzeros", ".scales")
    unused: tuple[str, ...] = ()

    @classmethod
    def of(cls, label: str, config: Mapping[str, Any]) -> AWQ:
        """What `quantization_config` says; raises UnsupportedTensor for another layout than `gemm`."""
        layout = str(config.get("version", "gemm")).lower()
        if layout != "gemm":
            raise UnsupportedTensor(
                f"{label}: AWQ's layout {layout} is not read, only gemm; "
                "take a checkpoint whose quantization_config has version gemm, or a GGUF file of the same model"
            )
        number(label, config, "bits", (_BITS,))
        return cls(number(label, config, "group_size"))

    def matrix(self, name: str, parts: Mapping[str, Array]) -> GroupedTensor:
        words, scales = part(name, parts, ".qweight", dtypes=WORDS), part(name, parts, ".scales", dtypes=FLOATS)
        num_inputs, num_outputs = words.shape[0], words.shape[1] * _OUTPUTS
        groups = scales.shape[0]
        part(name, parts, ".scales", (groups, num_outputs))
        part(name, parts, ".qzeros", (groups, words.shape[1]), dtypes=WORDS)
        group_of(name, num_inputs, groups, self.group_size)

        def decode(rows: slice) -> Grouped:
            zeros = _outputs(parts[".qzeros"], rows)
            codes = _outputs(parts[".qweight"], rows)
            return Grouped(15, codes, np.ascontiguousarray(parts[".scales"][:, rows].T), zeros)

        return GroupedTensor(name, TensorInfo((num_outputs, num_inputs), "AWQ_4"), decode)


def _outputs(array: Array, rows: slice) -> NDArray[np.uint8]:
    """Outputs `rows` of an array that has eight in a word, `[rows, K]`."""
    first, stop = rows.start // _OUTPUTS, -(-rows.stop // _OUTPUTS)
    words = array[:, slice(first, stop)]
    values = unpacked(words[..., None], _BITS, _OUTPUTS)[..., _PLACES].reshape(len(words), -1)
    start = rows.start - first * _OUTPUTS
    return np.ascontiguousarray(values[:, start : start + rows.stop - rows.start].T)
