"""Matrices of GPTQ and AWQ: integer codes, groups along the inputs, with zeros.

GPTQ's (Frantar et al., 2022) have the layout of GPTQModel and AutoGPTQ, with and without sorted inputs. `qweight` int32
`[K * bits / 32, N]`: values of an output are packed down a column. `qzeros` int32 `[K / group, N * bits / 32]` is
packed along rows. `scales` `[K / group, N]`; `g_idx` int32 `[K]`, the group of each input. A weight is `scales[g_idx] *
(q - zeros[g_idx])` (`dequantize_weight` in GPTQModel's nn_modules/qlinear). Version 1 stores zeros minus one. A borrow
affects the next zero of its word (`convert_gptq_v1_to_v2_format_module` there), except with 3 bits. GPTQModel's
`dynamic` gives modules bits and groups of their own, by patterns (`dynamic_get` in its quantization/config.py).

AWQ's (Lin et al., 2023) have AutoAWQ's layout `gemm`. `qweight` int32 `[K, N / 8]`: a word holds eight outputs of one
input, in the order 0, 2, 4, 6, 1, 3, 5, 7. `qzeros` int32 `[K / group, N / 8]` has the same order. `scales` `[K /
group, N]`. A weight is `(q - zero) * scale` (`dequantize_gemm` in awq/utils/packing_utils.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from radixlm.runtime.errors import UnsupportedTensor

from ..source import TensorInfo
from .grouped import GroupedRows, num_words, order_of_groups, unpacked, whole_spans
from .tensors import FLOATS, WORDS, Array, GroupedTensor, group_of, number, part

_AWQ_BITS, _OUTPUTS = 4, 8  # bits of a code, outputs in a word
_PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # position of each output in its word


@dataclass(frozen=True)
class AWQ:
    """The AWQ format as a configuration describes it; a `group_size` of -1 is a whole row."""

    group_size: int
    marker: str = ".qweight"
    endings: tuple[str, ...] = (".qweight", ".qzeros", ".scales")
    unused: tuple[str, ...] = ()

    @classmethod
    def of(cls, label: str, config: Mapping[str, Any]) -> AWQ:
        """Return the format of a `quantization_config`. Raises UnsupportedTensor for a layout other than `gemm`."""
        layout = str(config.get("version", "gemm")).lower()
        if layout != "gemm":
            raise UnsupportedTensor(
                f"{label}: AWQ's layout {layout} is not read, only gemm; "
                "take a checkpoint whose quantization_config has version gemm, or a GGUF file of the same model"
            )
        number(label, config, "bits", (_AWQ_BITS,))
        return cls(number(label, config, "group_size"))

    def matrix(self, name: str, parts: Mapping[str, Array]) -> GroupedTensor:
        """Return the matrix of AWQ's words."""
        words, scales = part(name, parts, ".qweight", dtypes=WORDS), part(name, parts, ".scales", dtypes=FLOATS)
        num_inputs, num_outputs = words.shape[0], words.shape[1] * _OUTPUTS
        groups = scales.shape[0]
        part(name, parts, ".scales", (groups, num_outputs))
        part(name, parts, ".qzeros", (groups, words.shape[1]), dtypes=WORDS)
        group_of(name, num_inputs, groups, self.group_size)

        def decode(rows: slice) -> GroupedRows:
            zeros = _outputs(parts[".qzeros"], rows)
            codes = _outputs(parts[".qweight"], rows)
            return GroupedRows(15, codes, np.ascontiguousarray(parts[".scales"][:, rows].T), zeros)

        return GroupedTensor(name, TensorInfo((num_outputs, num_inputs), "AWQ_4"), decode)


def _outputs(array: Array, rows: slice) -> NDArray[np.uint8]:
    """Return outputs `rows` of an array with eight outputs in a word, `[rows, K]`."""
    first, stop = rows.start // _OUTPUTS, -(-rows.stop // _OUTPUTS)
    words = array[:, slice(first, stop)]
    values = unpacked(words[..., None], _AWQ_BITS, _OUTPUTS)[..., _PLACES].reshape(len(words), -1)
    start = rows.start - first * _OUTPUTS
    return np.ascontiguousarray(values[:, start : start + rows.stop - rows.start].T)


_FORMATS = ("gptq", "gptq_v2")
_BITS = (2, 3, 4, 8)
# settings that a module cannot override
_LAYOUT = ("format", "checkpoint_format", "method", "quant_method", "pack_dtype")


@dataclass(frozen=True)
class GPTQ:
    """The GPTQ format as a configuration describes it; a `group_size` of -1 is a whole row.

    `dynamic` are patterns of modules' names with their own settings; the first match applies. None means that the
    module is not quantized.
    """

    bits: int
    group_size: int
    is_first_version: bool
    marker: str = ".qweight"
    endings: tuple[str, ...] = (".qweight", ".qzeros", ".scales", ".g_idx")
    unused: tuple[str, ...] = ()
    label: str = ""
    dynamic: tuple[tuple[re.Pattern[str], GPTQ | None], ...] = ()

    @classmethod
    def of(cls, label: str, config: Mapping[str, Any]) -> GPTQ:
        """Return the format that `quantize_config.json` or `quantization_config` describes.

        Raises UnsupportedTensor for unsupported settings.
        """
        layout = config.get("checkpoint_format") or config.get("format") or "gptq"
        if layout not in _FORMATS or config.get("is_marlin_format"):
            raise UnsupportedTensor(
                f"{label}: GPTQ's checkpoint_format {layout!r} is not read, only {' and '.join(_FORMATS)}; "
                "take such a checkpoint, or a GGUF file of the same model"
            )
        bits = number(label, config, "bits", _BITS)
        group_size = number(label, config, "group_size")
        common = cls(bits, group_size, is_first_version=layout == "gptq", label=label)
        return replace(common, dynamic=tuple(_dynamic(common, config)))

    def matrix(self, name: str, parts: Mapping[str, Array]) -> GroupedTensor:
        """Return the matrix by its module's own settings."""
        module = name.removeprefix(f"{self.label}: ")
        own = next((own for pattern, own in self.dynamic if pattern.match(module)), None)
        if own is not None:
            return own.matrix(name, parts)
        bits = self.bits
        words, scales = part(name, parts, ".qweight", dtypes=WORDS), part(name, parts, ".scales", dtypes=FLOATS)
        num_inputs, num_outputs = words.shape[0] * 32 // bits, words.shape[1]
        groups = scales.shape[0]
        part(name, parts, ".scales", (groups, num_outputs))
        part(name, parts, ".qzeros", (groups, num_words(num_outputs, bits)), dtypes=WORDS)
        if ".g_idx" in parts:
            part(name, parts, ".g_idx", (num_inputs,), dtypes=("I32", "I64"))
        group = group_of(name, num_inputs, groups, self.group_size)
        info = TensorInfo((num_outputs, num_inputs), f"GPTQ_{bits}")
        matrix = _Matrix(name, parts, bits, group, info.shape, is_first_version=self.is_first_version)
        return GroupedTensor(name, info, matrix.decode)


def _dynamic(common: GPTQ, config: Mapping[str, Any]) -> Iterator[tuple[re.Pattern[str], GPTQ | None]]:
    """Yield patterns and settings: from `+:PATTERN` or `PATTERN`; None from `-:PATTERN`, for modules not quantized."""
    label, dynamic = common.label, config.get("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        raise UnsupportedTensor(f"{label}: GPTQ's dynamic is {dynamic!r}, only settings by patterns are read")
    for key, settings in dynamic.items():
        is_left = key.startswith("-:")
        try:
            pattern = re.compile(key.removeprefix("-:" if is_left else "+:"))
        except re.error as error:
            raise UnsupportedTensor(f"{label}: GPTQ's dynamic has {key!r}, which is no pattern ({error})") from None
        if is_left:
            yield pattern, None
            continue
        layout = next((name for name in _LAYOUT if name in settings), None) if isinstance(settings, Mapping) else ""
        if layout is not None:
            wrong = f"a {layout} of its own" if layout else f"no settings but {settings!r}"
            raise UnsupportedTensor(
                f"{label}: GPTQ's dynamic has {wrong} for {key!r}, only bits and group_size are read; "
                "take a GGUF file of the same model"
            )
        both = {"bits": common.bits, "group_size": common.group_size, **settings}
        own = replace(common, bits=number(label, both, "bits", _BITS), group_size=number(label, both, "group_size"))
        yield pattern, own


@dataclass(frozen=True)
class _Matrix:
    """The arrays and settings of one GPTQ matrix."""

    name: str
    parts: Mapping[str, Array]
    bits: int
    group: int
    shape: tuple[int, ...]
    is_first_version: bool

    def decode(self, rows: slice) -> GroupedRows:
        """Return codes, scales and zeros of some rows."""
        codes = unpacked(self.parts[".qweight"][:, rows].T, self.bits, self.shape[1])
        order = self.input_order
        return GroupedRows(
            (1 << self.bits) - 1,
            codes if order is None else codes[:, order],
            np.ascontiguousarray(self.parts[".scales"][:, rows].T),
            self._zeros_of(rows) if self.only_zero is None else self.only_zero,
            input_order=order,
        )

    @cached_property
    def only_zero(self) -> int | None:
        """The zero of all groups, as in symmetric checkpoints; None if they differ."""
        zeros = self._zeros_of(slice(0, self.shape[0]))
        return int(zeros[0, 0]) if (zeros == zeros[0, 0]).all() else None

    def _zeros_of(self, rows: slice) -> NDArray[np.uint8]:
        """Return the zeros of some rows, `[rows, groups]`."""
        span = whole_spans(rows, self.shape[0])
        words = self.parts[".qzeros"][:, slice(span.start * self.bits // 32, num_words(span.stop, self.bits))]
        if self.is_first_version and 32 % self.bits == 0:
            words = words.view(np.uint32) + np.uint32(sum(1 << at for at in range(0, 32, self.bits)))
        zeros = unpacked(words, self.bits, span.stop - span.start)
        if self.is_first_version and 32 % self.bits:
            zeros = zeros + np.uint8(1) & np.uint8((1 << self.bits) - 1)
        return zeros[:, rows.start - span.start : rows.stop - span.start].T

    @cached_property
    def input_order(self) -> NDArray[np.int32] | None:
        """The inputs sorted by group; None if they are in that order already."""
        if ".g_idx" not in self.parts:
            return None
        return order_of_groups(f"{self.name}.g_idx", self.parts[".g_idx"][:], self.group)
