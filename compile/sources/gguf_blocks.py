"""Convert GGUF's block types to weights: codes are unchanged, and nested scales and minima stay nested.

Knows ggml's block layouts (ggml-common.h), not files. A block of 32, 64 or 256 values of one row becomes codes in the
order of the values, one a byte. Types with a grid are in `gguf_grids.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import fields as fields_of
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ..weights.kinds import (
    BF16,
    F16,
    F32,
    Q4,
    Q4_MINIMUM,
    Q5,
    Q5_MINIMUM,
    Q8,
    Scales,
    WeightKind,
)
from ..weights.quantization import Weight, WeightPlanes
from .gguf_grids import (
    BlockScales,
    Bytes,
    DecodedBlocks,
    Words,
    bit_words,
    bit_words_of_32,
    byte_words,
    fields,
    half,
    iq1_m,
    iq1_s,
    iq2_s,
    iq2_xs,
    iq2_xxs,
    iq3_s,
    iq3_xxs,
    nibble_words,
    pair_words,
    signed_codes,
    single_bits,
    words,
)

Planes = tuple[Words, ...]
ToPlanes = Callable[[Bytes], Planes]


def weight_from_blocks(type_name: str, data: Bytes) -> Weight:
    """Return the weight stored in `data`, uint8 `[N, bytes of a row]` (or `[bytes]` for a vector of plain values).

    Exact, except for scales that neither float16 nor an exponent byte can hold: one below 2**-126 (MXFP4), and an
    eighth of a subnormal float16 (IQ1, IQ2 and IQ3). Raises KeyError for a type that is not in `BLOCK_TYPES`.
    """
    if type_name in _PLAIN:
        kind, dtype = _PLAIN[type_name]
        return Weight(kind, data.view(dtype), is_exact=True)
    block_type = _BLOCKS[type_name]
    blocks = data.reshape(-1, block_type.num_bytes)
    with np.errstate(over="ignore", invalid="ignore"):  # the caller refuses infinite scales, naming the tensor
        parts = block_type.parts(blocks)
        codes = parts.codes.reshape(len(data), -1)
        return Weight(block_type.kind, codes, **_arrays(parts.scaling, len(data)), is_exact=block_type.is_exact(blocks))


def planes_from_blocks(type_name: str, data: Bytes) -> WeightPlanes | None:
    """Return the weight stored in `data`, codes in the planes of their kind.

    None if the type has no planes, or the weight needs rounding.
    """
    block_type = _BLOCKS.get(type_name)
    if block_type is None or block_type.planes is None:
        return None
    blocks = data.reshape(-1, block_type.num_bytes)
    if not block_type.is_exact(blocks):
        return None
    planes = tuple(plane.reshape(len(data), -1, *plane.shape[1:]) for plane in block_type.planes(blocks))
    return WeightPlanes(block_type.kind, planes, **_arrays(block_type.scaling(blocks), len(data)))


def _arrays(scaling: BlockScales, num_rows: int) -> dict[str, Any]:
    """Return the arrays by name, `[N, ...]`."""
    arrays = {field.name: getattr(scaling, field.name) for field in fields_of(scaling)}
    return {name: _rows(array, num_rows) for name, array in arrays.items() if array is not None}


def _rows(array: NDArray[Any], num_rows: int) -> NDArray[Any]:
    """Return an array with one row for each row of the tensor; float32 becomes float16."""
    return (array.astype(np.float16) if array.dtype == np.float32 else array).reshape(num_rows, -1)


def _always(blocks: Bytes) -> bool:
    """Return True: nothing is rounded."""
    return True


class _BlockType(Protocol):
    """The reader of blocks of one type."""

    @property
    def kind(self) -> WeightKind: ...
    @property
    def num_bytes(self) -> int:
        """Number of bytes of a block."""
        ...

    @property
    def planes(self) -> ToPlanes | None:
        """Conversion of blocks to codes in the planes of `kind`; None if there is no fast one."""
        ...

    def parts(self, blocks: Bytes) -> DecodedBlocks: ...
    def scaling(self, blocks: Bytes) -> BlockScales: ...
    def is_exact(self, blocks: Bytes) -> bool:
        """Return whether `parts` are the numbers of the blocks, with nothing rounded."""
        ...


@dataclass(frozen=True)
class _Integers:
    """A block type with integer codes, which are read separately from scales."""

    kind: WeightKind
    num_bytes: int
    codes: Callable[[Bytes], Bytes]
    scales: Callable[[Bytes], BlockScales]
    planes: ToPlanes | None = None
    is_exact: Callable[[Bytes], bool] = _always

    def parts(self, blocks: Bytes) -> DecodedBlocks:
        return DecodedBlocks(self.codes(blocks), self.scales(blocks))

    def scaling(self, blocks: Bytes) -> BlockScales:
        return self.scales(blocks)


@dataclass(frozen=True)
class _Grid:
    """A block type with points of a grid, whose scales may be rounded."""

    kind: WeightKind
    num_bytes: int
    parts: Callable[[Bytes], DecodedBlocks]
    planes: None = None

    def scaling(self, blocks: Bytes) -> BlockScales:
        return self.parts(blocks).scaling

    def is_exact(self, blocks: Bytes) -> bool:
        return False


# Readers of codes. Codes of blocks `[B, bytes]` are one a byte: `[B, values]`. In planes, they are words of 4 codes'
# bits for each plane, `[B, ...]`, in the order of `weights/quantization.py`, whatever the axes are.


def _nibbles(start: int, span: int) -> Callable[[Bytes], Bytes]:
    """Return a reader of 4-bit codes from byte `start` on."""
    return lambda blocks: fields(blocks[:, start:], 4, span)


def _nibble_planes(start: int) -> ToPlanes:
    """Return a reader of planes: the low halves of 16 bytes are the first 16 codes."""
    return lambda blocks: (_split(nibble_words(blocks[:, start:]), 2),)


def _codes_q5(bits: int) -> Callable[[Bytes], Bytes]:
    """Return a reader of Q5_0 or Q5_1; the fifth bits begin at byte `bits`."""
    return lambda blocks: fields(blocks[:, bits + 4 :], 4, 16) | single_bits(blocks[:, bits : bits + 4]) << np.uint8(4)


def _planes_q5(bits: int) -> ToPlanes:
    """Return a reader of planes of Q5_0 or Q5_1; the fifth bits begin at byte `bits`."""
    return lambda blocks: (*_nibble_planes(bits + 4)(blocks), bit_words_of_32(blocks[:, bits : bits + 4]))


def _codes_q8_0(blocks: Bytes) -> Bytes:
    """Return the codes of Q8_0."""
    return signed_codes(blocks[:, 2:].view(np.int8))


def _planes_q8_0(blocks: Bytes) -> Planes:
    """Return the plane of Q8_0."""
    found = byte_words(blocks[:, 2:])
    found ^= np.uint32(0x80808080)  # the same as `signed_codes`
    return (found,)


def _pairs(start: int) -> Callable[[Bytes], Bytes]:
    """Return a reader of 2-bit codes from byte `start` on."""
    return lambda blocks: fields(blocks[:, start : start + 64], 2, 32)


def _pair_planes(start: int) -> ToPlanes:
    """Return a reader of a plane of 2-bit codes from byte `start` on."""
    return lambda blocks: (_split(pair_words(blocks[:, start : start + 64]), 2),)


def _codes_q3_k(blocks: Bytes) -> Bytes:
    """Return the codes of Q3_K."""
    return fields(blocks[:, 32:96], 2, 32) | fields(blocks[:, :32], 1, 32) << np.uint8(2)


def _planes_q3_k(blocks: Bytes) -> Planes:
    """Return the planes of Q3_K."""
    return (*_pair_planes(32)(blocks), bit_words(blocks[:, :32]))


def _planes_q4_k(blocks: Bytes) -> Planes:
    """Return the plane of Q4_K."""
    return (_split(nibble_words(blocks[:, 16:]), 4),)


def _codes_q5_k(blocks: Bytes) -> Bytes:
    """Return the codes of Q5_K."""
    return fields(blocks[:, 48:], 4, 32) | fields(blocks[:, 16:48], 1, 32) << np.uint8(4)


def _planes_q5_k(blocks: Bytes) -> Planes:
    """Return the planes of Q5_K."""
    return _split(nibble_words(blocks[:, 48:]), 4), bit_words(blocks[:, 16:48])


def _codes_q6_k(blocks: Bytes) -> Bytes:
    """Return the codes of Q6_K."""
    return fields(blocks[:, :128], 4, 64) | fields(blocks[:, 128:192], 2, 32) << np.uint8(4)


def _planes_q6_k(blocks: Bytes) -> Planes:
    """Return planes: the low halves of 64 bytes are two groups, the high halves two more."""
    nibbles = nibble_words(blocks[:, :128]).reshape(len(blocks), 2, 2, 4, 2)
    return np.moveaxis(nibbles, -1, 2), *_pair_planes(128)(blocks)


def _codes_tq1_0(blocks: Bytes) -> Bytes:
    """Return codes: a byte has five digits of base 3, read from the highest by multiplying the remainder."""
    parts = ((blocks[:, :32], 5), (blocks[:, 32:48], 5), (blocks[:, 48:52], 4))
    return np.hstack([_ternary_digits(packed, count) for packed, count in parts])


def _ternary_digits(packed: Bytes, count: int) -> Bytes:
    """Return the first digits of all bytes, then the second ones, up to `count`."""
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:count, None]
    rest = packed[:, None, :] * powers  # modulo 256, which removes the digits before
    return (rest.astype(np.uint16) * np.uint16(3) >> np.uint16(8)).astype(np.uint8).reshape(len(packed), -1)


def _split(words: Words, num_words: int) -> Words:
    """Divide words `[B, n, fields]` into runs of `num_words` of one field."""
    return words.reshape(len(words), -1, num_words, words.shape[-1]).swapaxes(-1, -2)


# Readers of scales.


def _one_scale(at: int, groups: int = 1) -> Callable[[Bytes], BlockScales]:
    """Return a reader of one scale at byte `at`, repeated for `groups` groups."""
    return lambda blocks: BlockScales(half(blocks, at) if groups == 1 else half(blocks, at).repeat(groups, axis=1))


def _scale_and_minimum(blocks: Bytes) -> BlockScales:
    """Return the scale and the minimum at the beginning of a block."""
    return BlockScales(half(blocks, 0), half(blocks, 2))


def _scales_q2_k(blocks: Bytes) -> BlockScales:
    """Return the nested scales and minima of Q2_K."""
    sub_scales, sub_minima = _signed(blocks[:, :16] & np.uint8(15)), _signed(blocks[:, :16] >> np.uint8(4))
    return BlockScales(half(blocks, 80), -half(blocks, 82), sub_scales, sub_minima)


def _scales_q3_k(blocks: Bytes) -> BlockScales:
    """Return the nested scales of Q3_K."""
    six_bits = fields(blocks[:, 96:104], 4, 8) | fields(blocks[:, 104:108], 2, 4) << np.uint8(4)
    return BlockScales(half(blocks, 108), sub_scales=_signed(six_bits) - np.int8(32))


def _scales_and_minima(blocks: Bytes) -> BlockScales:
    """Return eight 6-bit scales and minima from 12 bytes, and the block's two float16 (get_scale_min_k4)."""
    first, second, third = (words(blocks, at, at + 4, "<u4") for at in (4, 8, 12))
    six, four, two = np.uint32(0x3F3F3F3F), np.uint32(0x0F0F0F0F), np.uint32(0x30303030)
    scales = np.hstack([first & six, third & four | first >> np.uint32(2) & two])
    minima = np.hstack([second & six, third >> np.uint32(4) & four | second >> np.uint32(2) & two])
    return BlockScales(half(blocks, 0), -half(blocks, 2), scales.view(np.int8), minima.view(np.int8))


def _scales_q6_k(blocks: Bytes) -> BlockScales:
    """Return the nested scales of Q6_K."""
    return BlockScales(half(blocks, 208), sub_scales=_signed(blocks[:, 192:208]))


def _scales_iq4_xs(blocks: Bytes) -> BlockScales:
    """Return the nested scales of IQ4_XS."""
    six_bits = fields(blocks[:, 4:8], 4, 1) | fields(blocks[:, 2:4], 2, 1) << np.uint8(4)
    return BlockScales(half(blocks, 0), sub_scales=_signed(six_bits) - np.int8(32))


def _scales_mxfp4(blocks: Bytes) -> BlockScales:
    """Return half the format's powers of two, because levels are twice its values."""
    exponents = blocks[:, :1]
    return BlockScales(exponents - np.minimum(exponents, np.uint8(1)))


def _is_exact_mxfp4(blocks: Bytes) -> bool:
    """Return whether no scale is 2**-126 or less, whose half would be stored as 0."""
    return len(blocks) == 0 or int(blocks[:, 0].min()) > 1


def _scales_nvfp4(blocks: Bytes) -> BlockScales:
    """Return scales as for MXFP4, but with E4M3 scales for 16 values.

    127 is not a number, and read as 0.
    """
    return BlockScales(np.where(blocks[:, :4] == 127, np.uint8(0), blocks[:, :4] & np.uint8(127)))


def _signed(few_bits: Bytes) -> NDArray[np.int8]:
    """Return small unsigned numbers as int8."""
    return np.ascontiguousarray(few_bits).view(np.int8)


_PLAIN: dict[str, tuple[WeightKind, np.dtype[Any]]] = {
    "F32": (F32, np.dtype("<f4")),
    "F16": (F16, np.dtype("<f2")),
    "BF16": (BF16, np.dtype(ml_dtypes.bfloat16)),
}
_NESTED, _NESTED16 = Scales(32, nested=True), Scales(16, nested=True)
_NESTED_MINIMUM, _NESTED16_MINIMUM = Scales(32, "minimum", nested=True), Scales(16, "minimum", nested=True)
_BLOCKS: dict[str, _BlockType] = {
    "Q4_0": _Integers(Q4, 18, _nibbles(2, 16), _one_scale(0), _nibble_planes(2)),
    "Q4_1": _Integers(Q4_MINIMUM, 20, _nibbles(4, 16), _scale_and_minimum, _nibble_planes(4)),
    "Q5_0": _Integers(Q5, 22, _codes_q5(2), _one_scale(0), _planes_q5(2)),
    "Q5_1": _Integers(Q5_MINIMUM, 24, _codes_q5(4), _scale_and_minimum, _planes_q5(4)),
    "Q8_0": _Integers(Q8, 34, _codes_q8_0, _one_scale(0), _planes_q8_0),
    "Q2_K": _Integers(WeightKind("q2", _NESTED16_MINIMUM), 84, _pairs(16), _scales_q2_k, _pair_planes(16)),
    "Q3_K": _Integers(WeightKind("q3", _NESTED16), 110, _codes_q3_k, _scales_q3_k, _planes_q3_k),
    "Q4_K": _Integers(WeightKind("q4", _NESTED_MINIMUM), 144, _nibbles(16, 32), _scales_and_minima, _planes_q4_k),
    "Q5_K": _Integers(WeightKind("q5", _NESTED_MINIMUM), 176, _codes_q5_k, _scales_and_minima, _planes_q5_k),
    "Q6_K": _Integers(WeightKind("q6", _NESTED16), 210, _codes_q6_k, _scales_q6_k, _planes_q6_k),
    "IQ1_S": _Grid(WeightKind("q8", _NESTED), 50, iq1_s),
    "IQ1_M": _Grid(WeightKind("q8", _NESTED16), 56, iq1_m),
    "IQ2_XXS": _Grid(WeightKind("q8", _NESTED), 66, iq2_xxs),
    "IQ2_XS": _Grid(WeightKind("q8", _NESTED16), 74, iq2_xs),
    "IQ2_S": _Grid(WeightKind("q8", _NESTED16), 82, iq2_s),
    "IQ3_XXS": _Grid(WeightKind("q8", _NESTED), 98, iq3_xxs),
    "IQ3_S": _Grid(WeightKind("q8", _NESTED), 110, iq3_s),
    "IQ4_NL": _Integers(WeightKind("iq4", Scales(32)), 18, _nibbles(2, 16), _one_scale(0), _nibble_planes(2)),
    "IQ4_XS": _Integers(WeightKind("iq4", _NESTED), 136, _nibbles(8, 16), _scales_iq4_xs, _nibble_planes(8)),
    "MXFP4": _Integers(
        WeightKind("fp4", Scales(32, dtype="e8m0")),
        17,
        _nibbles(1, 16),
        _scales_mxfp4,
        _nibble_planes(1),
        _is_exact_mxfp4,
    ),
    "NVFP4": _Integers(
        WeightKind("fp4", Scales(16, dtype="e4m3")),
        36,
        _nibbles(4, 8),
        _scales_nvfp4,
        lambda blocks: (nibble_words(blocks[:, 4:]),),
    ),
    "TQ1_0": _Integers(WeightKind("q2", Scales(128)), 54, _codes_tq1_0, _one_scale(52, groups=2)),
    "TQ2_0": _Integers(WeightKind("q2", Scales(128)), 66, _pairs(0), _one_scale(64, groups=2), _pair_planes(0)),
}
PLAIN_TYPES = frozenset(_PLAIN)
BLOCK_TYPES = PLAIN_TYPES | frozenset(_BLOCKS)
