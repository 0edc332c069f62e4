"""Weights as numbers, before any kernel layout: codes, scales, minima, and their requantization to fewer bits.

Knows the value of a stored weight and the error of rounding it; knows no file format and no kernel.
`sources/gguf_blocks.py` makes such weights from GGUF's block types.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from radixlm.runtime.errors import CompileError

from .kinds import DTYPES, HALF_E4M3, Q4, Q8, SUPER_GROUP, TABLES, WeightKind

Float32 = NDArray[np.float32]
Mode = Literal["q4", "q8", "f16", "f32"]

GROUP = 32  # values that share a scale if radixlm chooses it
_STRIP_VALUES = 1 << 20  # values processed at once: bounds the temporaries to a few times 4 MiB


@dataclass(frozen=True)
class Weight:
    """A matrix `[N, K]` (or a vector `[K]`, never quantized) as its source stores it.

    `codes`: for quantized kinds uint8 `[N, K]`, one code a byte; otherwise the values as float16, bfloat16
    (`ml_dtypes`) or float32.
    `scales`, `minima`, `zeros`: one per group, `[N, K / group]`, in float16 and uint8. Scales of other dtypes are their
    bits, uint8.
    `sub_scales`, `sub_minima`: for nested scales, int8 `[N, K / group]`, which multiply `scales` and `minima`, then
    `[N, K / 256]`.
    `input_order`: int32 `[K]`, the model's input that each column multiplies; None if column `k` is input `k`.
    `is_exact`: true if these are known to be the source's numbers, with nothing rounded.
    """

    kind: WeightKind
    codes: NDArray[Any]
    scales: NDArray[Any] | None = None
    minima: NDArray[np.float16] | None = None
    zeros: NDArray[np.uint8] | None = None
    sub_scales: NDArray[np.int8] | None = None
    sub_minima: NDArray[np.int8] | None = None
    input_order: NDArray[np.int32] | None = None
    is_exact: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        return self.codes.shape

    def dequantize(self) -> Float32:
        """Return the values as float32 of the same shape, inputs in the model's order; a copy unless it is float32."""
        kind = self.kind
        if not kind.is_quantized:
            return self.codes.astype(np.float32, copy=False)
        values = levels(kind, self.codes).astype(np.float32)
        groups = values.reshape(*self.shape[:-1], -1, kind.group)
        if self.zeros is not None:
            groups -= self.zeros.astype(np.float32)[..., None]
        elif kind.zero:
            groups -= np.float32(kind.zero)
        if self.sub_scales is not None:
            groups *= self.sub_scales.astype(np.float32)[..., None]
        groups *= self._of_groups(scale_values(kind, self.scales))
        if self.minima is not None:
            minima = self._of_groups(self.minima.astype(np.float32))
            groups += minima if self.sub_minima is None else minima * self.sub_minima.astype(np.float32)[..., None]
        return values if self.input_order is None else values[:, np.argsort(self.input_order)]

    def rows(self, rows: slice | NDArray[np.integer[Any]]) -> Weight:
        """Return some rows; a vector is returned whole."""
        if self.codes.ndim == 1:
            return self
        return replace(self, **{name: array[rows] for name, array in self._arrays().items()})

    def _arrays(self) -> dict[str, Any]:
        """Return the arrays that have a row for each output."""
        arrays = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _OF_ALL_ROWS}
        return {name: array for name, array in arrays.items() if array is not None}

    def _of_groups(self, numbers: Float32) -> Float32:
        """Return the factor of each group's values, `[..., K / group, 1]`."""
        return (numbers.repeat(SUPER_GROUP // self.kind.group, axis=-1) if self.kind.is_nested else numbers)[..., None]


_OF_ALL_ROWS = ("kind", "input_order", "is_exact")


@dataclass(frozen=True)
class WeightPlanes:
    """Rows of a quantized matrix as `Weight` has them, codes in the bit planes of their kind, and nothing rounded.

    A plane holds 1, 2, 4 or 8 bits of each code. A group of 32 codes is 8 chunks of 4 neighbours. A word of a plane has
    a byte for each code of a chunk. That byte holds the bits of as many chunks as fit, the first lowest.
    `planes`: one array per plane, lowest bits first, uint32 `[N, ...]`; the other axes together are `[K / 32, words]`.
    """

    kind: WeightKind
    planes: tuple[NDArray[np.uint32], ...]
    scales: NDArray[Any]
    minima: NDArray[np.float16] | None = None
    sub_scales: NDArray[np.int8] | None = None
    sub_minima: NDArray[np.int8] | None = None

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.scales)


def joined(parts: Sequence[Weight]) -> Weight:
    """Concatenate weights of one kind and width by rows."""
    arrays = [part._arrays() for part in parts]
    together: dict[str, Any] = {name: np.concatenate([each[name] for each in arrays]) for name in arrays[0]}
    return replace(parts[0], **together, is_exact=all(part.is_exact for part in parts))


def levels(kind: WeightKind, codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the levels that the codes represent, before zero and scale."""
    return np.array(TABLES[kind.codes], np.uint8)[codes] if kind.codes in TABLES else codes


def scale_values(kind: WeightKind, scales: NDArray[Any] | None) -> Float32:
    """Return stored scales as float32, exactly; a power of two whose byte is 0 is 0."""
    assert scales is not None and kind.scales is not None
    if kind.scales.dtype == "e8m0":
        return (scales.astype(np.uint32) << np.uint32(23)).view(np.float32)
    if kind.scales.dtype == "e4m3":
        return (scales.astype(np.uint16) << np.uint16(7)).view(np.float16).astype(np.float32) * np.float32(HALF_E4M3)
    return scales.astype(np.float32)


def requantize(weight: Weight | NDArray[Any], mode: Mode) -> Weight:
    """Store `weight` as `mode`; returned unchanged if it is stored so already, with any groups and minima.

    q4 and q8 have groups of 32 values in a row, with one scale each. q8 is llama.cpp's Q8_0. In no group does q4 have a
    larger squared error than llama.cpp's Q4_0. Codes of at most 4 bits stay unchanged as q4, and integer codes become
    q8 without rounding. Raises CompileError if a row is not a multiple of 32, or if values exceed float16.
    """
    if isinstance(weight, np.ndarray):
        weight = Weight(_KIND_OF_DTYPE[weight.dtype], weight)
    if keeps(weight.kind, mode):
        return weight
    if mode in DTYPES:
        return Weight(WeightKind(mode), _narrow(weight.dequantize(), DTYPES[mode]))
    if mode == "q8" and weight.kind.is_quantized:
        return _widen(weight)
    return _quantize(weight, mode)


def keeps(kind: WeightKind, mode: Mode) -> bool:
    """Return whether `requantize` leaves weights of a kind unchanged."""
    return kind.codes == mode or (mode == "q4" and kind.codes in _AT_MOST_4_BITS)


def rounding_error(source: Float32, weight: Weight) -> tuple[float, float]:
    """Return the error of storing `source` as `weight`: the sums of the squared error and of the squared source.

    Both are float64 sums, to be added over tensors. The root of their ratio is the relative error.
    """
    error = total = 0.0
    values = source.reshape(-1, source.shape[-1])
    for rows in _strips(values.shape):
        exact = values[rows].astype(np.float64)
        stored = weight.rows(rows).dequantize().reshape(exact.shape)
        error += float(np.square(exact - stored).sum())
        total += float(np.square(exact).sum())
    return error, total


_KIND_OF_DTYPE = {dtype: WeightKind(name) for name, dtype in DTYPES.items()}
_AT_MOST_4_BITS = frozenset({"q2", "q3", "q4", *TABLES})


def _widen(weight: Weight) -> Weight:
    """Return 8-bit codes of the same values: a constant zero moves to 128; scales, zeros and minima stay."""
    kind = WeightKind("q8", weight.kind.scales)
    return replace(weight, kind=kind, codes=levels(weight.kind, weight.codes) + np.uint8(kind.zero - weight.kind.zero))


def _narrow(values: Float32, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return values as a narrower type. Raises CompileError if some become infinite."""
    with np.errstate(over="ignore"):
        narrow = values.astype(dtype)
    if not np.isfinite(narrow).all():
        raise CompileError(
            f"the weight holds values up to {np.abs(values).max():g}, float16 ends at 65504; use --quantize keep or f32"
        )
    return narrow


def _quantize(weight: Weight, mode: Mode) -> Weight:
    """Quantize a weight to q4 or q8."""
    num_rows, num_columns = weight.shape
    if num_columns % GROUP:
        raise CompileError(
            f"a row of {num_columns} values cannot be cut into groups of {GROUP}; use --quantize keep or f16"
        )
    codes = np.empty(weight.shape, np.uint8)
    scales = np.empty((num_rows, num_columns // GROUP), np.float16)
    choose = _choose_q4 if mode == "q4" else _choose_q8
    for rows in _strips(weight.shape):
        groups = weight.rows(rows).dequantize().reshape(-1, GROUP)
        strip_codes, strip_scales = choose(groups)
        codes[rows] = strip_codes.reshape(-1, num_columns)
        scales[rows] = strip_scales.reshape(-1, num_columns // GROUP)
    return Weight(Q4 if mode == "q4" else Q8, codes, scales)


def _choose_q8(groups: Float32) -> tuple[NDArray[np.uint8], NDArray[np.float16]]:
    """Quantize as llama.cpp's Q8_0: the largest magnitude becomes 127. Codes are chosen before the scale is rounded."""
    scales = np.abs(groups).max(axis=1, keepdims=True) / np.float32(127)
    codes = np.rint(groups * _reciprocal(scales)) + np.float32(Q8.zero)
    return codes.astype(np.uint8), _narrow(scales, DTYPES["f16"])


def _choose_q4(groups: Float32) -> tuple[NDArray[np.uint8], NDArray[np.float16]]:
    """Return codes and scales of groups of 32 with a small weighted error, and no larger squared error than Q4_0.

    A few scales per group are tried. llama.cpp's Q4_0 maps the value of largest magnitude to -8, so that it is exact.
    The candidates map it a little higher or lower, then refit the scale to their codes by least squares. An error's
    weight is the root mean square of the group plus the value's own magnitude. Plain least squares would spend the
    large values, which the model needs most, on the small ones.
    """
    magnitudes = np.abs(groups)
    extreme = np.take_along_axis(groups, magnitudes.argmax(axis=1, keepdims=True), axis=1)
    importance = magnitudes + np.sqrt(_dot(groups, groups) / np.float32(GROUP))[:, None]
    scales = extreme / np.float32(_Q4_DIVISORS[0])
    levels, stored = _q4_levels(groups, scales), _narrow(scales, DTYPES["f16"])
    limit, best = _q4_errors(groups, levels, stored, importance)
    limit *= np.float32(1 - _ROUNDING)
    for divisor in _Q4_DIVISORS[1:]:
        candidate = _q4_levels(groups, extreme / np.float32(divisor))
        refitted = _fit(groups, candidate, importance)
        squared, weighted = _q4_errors(groups, candidate, refitted, importance)
        better = (weighted < best) & (squared <= limit)
        levels = np.where(better, candidate, levels)
        stored = np.where(better, refitted, stored)
        best = np.where(better, weighted, best)
    return (levels + np.float32(Q4.zero)).astype(np.uint8), stored


# Divisors of the value of largest magnitude: Q4_0's, then refitted ones, the most helpful first. Ten more gain 0.1 %.
# The squared error of a matrix's outputs on SmolLM2's weights is 0.938 of Q4_0's in the geometric mean and 1.09 at
# worst. With plain least squares it was 0.976, and 1.98 at worst (bench/LOG.md).
_Q4_DIVISORS = (-8.0, -8.25, -7.25, -7.75, -8.5, -7.0, -8.0)


_ROUNDING = 1e-5  # more than the rounding of a sum of 32 float32; a smaller gain may be a loss


def _q4_levels(groups: Float32, scales: Float32) -> Float32:
    """Return codes minus their zero, `[G, 32]`, rounded as llama.cpp does: half a code up, after the zero is added."""
    codes: Float32 = np.trunc(groups * _reciprocal(scales) + np.float32(8.5)).clip(0, 15)
    return codes - np.float32(Q4.zero)


def _fit(groups: Float32, levels: Float32, importance: Float32) -> NDArray[np.float16]:
    """Return the scale of least weighted squared error, `[G, 1]`; infinite, so rejected, beyond float16."""
    weighted = importance * levels
    squares = _dot(weighted, levels)[:, None]
    with np.errstate(over="ignore"):
        scales = _dot(weighted, groups)[:, None] * _reciprocal(squares)
        return np.asarray(scales.astype(np.float16))


def _q4_errors(
    groups: Float32, levels: Float32, stored: NDArray[np.float16], importance: Float32
) -> tuple[Float32, Float32]:
    """Return the squared error and the weighted one, each `[G, 1]`; NaN or infinite if the scale is infinite."""
    with np.errstate(invalid="ignore"):
        residual = groups - levels * stored.astype(np.float32)
        squared = np.square(residual)
        return squared.sum(axis=1, keepdims=True), _dot(squared, importance)[:, None]


def _dot(left: Float32, right: Float32) -> Float32:
    """Return the sum of products of each group, `[G]`, with the same bits on every CPU.

    `np.einsum` would fuse multiplications and additions where the CPU can.
    """
    sums: Float32 = (left * right).sum(axis=1)
    return sums


def _reciprocal(values: Float32) -> Float32:
    """Return 1 / values; 0 for zeros and for numbers whose reciprocal is not finite."""
    usable = np.abs(values) >= np.finfo(np.float32).tiny
    return np.divide(np.float32(1), values, out=np.zeros_like(values), where=usable)


def _strips(shape: tuple[int, ...]) -> Iterator[slice]:
    """Yield strips of rows with a bounded number of values."""
    step = max(1, _STRIP_VALUES // shape[-1])
    for start in range(0, shape[0], step):
        yield slice(start, start + step)
