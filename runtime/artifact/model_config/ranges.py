"""The types of a model's numbers, each with its range, and the base struct that refuses unknown fields.

Knows types and ranges, not what the numbers are for.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

Dimension = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
VocabSize = Annotated[int, msgspec.Meta(ge=1, le=1 << 22)]
ContextLength = Annotated[int, msgspec.Meta(ge=16, le=1 << 22)]
Positive = Annotated[float, msgspec.Meta(gt=0.0, le=1e30)]
NotNegative = Annotated[float, msgspec.Meta(ge=0.0, le=1e30)]
Heads = Annotated[int, msgspec.Meta(ge=1, le=1024)]
HeadDim = Annotated[int, msgspec.Meta(ge=2, le=1024)]
Index = Annotated[int, msgspec.Meta(ge=0, le=1023)]
Count = Annotated[int, msgspec.Meta(ge=1, le=4096)]
Window = Annotated[int, msgspec.Meta(ge=1, le=1 << 22)]
Factors = Annotated[tuple[Positive, ...], msgspec.Meta(min_length=1, max_length=512)]
Architecture = Annotated[str, msgspec.Meta(pattern="^[a-z0-9_]{1,32}$")]


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A struct that refuses unknown fields."""
