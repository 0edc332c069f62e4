"""Kinds of stored weights: the format of a value's code, and the scales of a group of codes.

Knows the value of a code, not its position in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np

CodesName = Literal["q2", "q3", "q4", "q5", "q6", "q8", "fp4", "iq4", "f16", "bf16", "f32"]
Zero = Literal["constant", "integers", "minimum"]
ScaleDType = Literal["f16", "e8m0", "e4m3"]

SUPER_GROUP = 256  # values of a row that share a float16 if scales are nested
HALF_E4M3 = 128.0  # a byte of e4m3, shifted left by 7 bits, is a float16 whose exponent is too small by 8


@dataclass(frozen=True)
class Scales:
    """Scale format of `group` neighbouring codes of a row.

    A value is `scale * (code - zero)`, or `scale * code + minimum`. `zero` is a constant of the codes or an integer of
    the group.

    Attributes:
        nested: true if a scale (and a minimum) is an int8 times a float16 that 256 values share.
        dtype: format of scales that are not nested. e8m0 is a power of two in a byte. e4m3 is half of such a float8,
            because levels of FP4 are twice their values.
    """

    group: int
    zero: Zero = "constant"
    nested: bool = False
    dtype: ScaleDType = "f16"


@dataclass(frozen=True)
class WeightKind:
    """Storage format of a weight: codes with scales, or plain values without scales.

    Raises:
        ValueError: the kernels do not support the combination.
    """

    codes: CodesName
    scales: Scales | None = None

    def __post_init__(self) -> None:
        scales, fault = self.scales, None
        if (scales is None) != (self.codes in DTYPES):
            fault = "integer codes have scales, plain values have none"
        elif scales is None:
            return
        elif scales.group not in (16, 32, 64, 128):
            fault = "a group is 16, 32, 64 or 128 values"
        elif scales.nested and (scales.group > 32 or scales.zero == "integers" or scales.dtype != "f16"):
            fault = "nested scales are of groups of 16 or 32, in float16, and without integer zeros"
        elif scales.zero != "constant" and (scales.dtype != "f16" or self.codes in TABLES):
            fault = "only integers with scales in float16 have zeros or minima of their own"
        if fault is not None:
            raise ValueError(f"{self.codes} with {scales} is no kind of weight: {fault}")

    @property
    def is_quantized(self) -> bool:
        """True if values are codes with scales."""
        return self.scales is not None

    @property
    def group(self) -> int:
        """Number of values that share a scale; 0 for plain values."""
        return 0 if self.scales is None else self.scales.group

    @property
    def has_minimum(self) -> bool:
        """True if each group has a minimum."""
        return self.scales is not None and self.scales.zero == "minimum"

    @property
    def has_zeros(self) -> bool:
        """True if each group has an integer that represents 0.0."""
        return self.scales is not None and self.scales.zero == "integers"

    @property
    def is_nested(self) -> bool:
        """True if scales are nested."""
        return self.scales is not None and self.scales.nested

    @property
    def zero(self) -> int:
        """The level that represents 0.0 in every group; 0 if there is no such constant."""
        return _ZEROS[self.codes] if self.scales is not None and self.scales.zero == "constant" else 0

    @property
    def label(self) -> str:
        """A short name for tables, such as "q4_g32_min" or "bf16"."""
        if self.scales is None:
            return self.codes
        parts = [self.codes, f"g{self.group}"]
        parts += [word for word, applies in (("min", self.has_minimum), ("zeros", self.has_zeros)) if applies]
        parts += ["nested"] if self.is_nested else []
        parts += [self.scales.dtype] if self.scales.dtype != "f16" else []
        return "_".join(parts)


DTYPES: dict[CodesName, np.dtype[Any]] = {
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f32": np.dtype(np.float32),
}
# Levels of 4-bit codes, from 0: twice the values of FP4 (e2m1) plus 12, and ggml's uneven steps.
TABLES: dict[CodesName, tuple[int, ...]] = {
    "fp4": (12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0),
    "iq4": (1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241),
}
# q2: ternary weights, -1 to 1, plus 1
_ZEROS: dict[CodesName, int] = {"q2": 1, "q3": 4, "q4": 8, "q5": 16, "q6": 32, "q8": 128, "fp4": 12, "iq4": 128}

Q4 = WeightKind("q4", Scales(32))
Q4_MINIMUM = WeightKind("q4", Scales(32, "minimum"))
Q4_GROUP16 = WeightKind("q4", Scales(16))
Q4_GROUP16_MINIMUM = WeightKind("q4", Scales(16, "minimum"))
Q5 = WeightKind("q5", Scales(32))
Q5_MINIMUM = WeightKind("q5", Scales(32, "minimum"))
Q8 = WeightKind("q8", Scales(32))
Q8_MINIMUM = WeightKind("q8", Scales(32, "minimum"))
Q8_GROUP16 = WeightKind("q8", Scales(16))
F16 = WeightKind("f16")
BF16 = WeightKind("bf16")
F32 = WeightKind("f32")


def max_level(codes: CodesName) -> int:
    """Return the largest level of a code."""
    return max(TABLES[codes]) if codes in TABLES else (1 << int(codes[1:])) - 1
