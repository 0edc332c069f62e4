"""The room that an artifact has for LoRA adapters: the matrices that they may change, and their layout in memory.

The compiler writes it into the manifest, and its kernels use these offsets; the runtime puts adapters there. Knows
shapes and names, not numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Final, Literal

import msgspec

from .model_config.ranges import Dimension, Strict

LORA_BLOCK: Final = 16  # numbers of a vector; ranks and outputs are padded to whole blocks
MAX_LORAS: Final = 256
MAX_LORA_RANK: Final = 512
LoraDType = Literal["f32", "f16", "bf16"]
AdapterFormat = Literal["huggingface", "gguf"]


class LoraSource(Strict, frozen=True, kw_only=True):
    """The part of an adapter's matrix B for one of the model's matrices, in one format of adapters.

    Its rows begin at `first_row` of those that the adapter has for `name`. With a `head_dim`, the first `rotary_dim`
    rows of each head are stored so that neighbours rotate; the kernels rotate the first half against the second.
    """

    name: str
    first_row: Annotated[int, msgspec.Meta(ge=0)] = 0
    head_dim: Annotated[int, msgspec.Meta(ge=0)] = 0
    rotary_dim: Annotated[int, msgspec.Meta(ge=0)] = 0


class LoraMatrix(Strict, frozen=True, kw_only=True):
    """A matrix of the model that adapters may change, and where they have its part of B."""

    name: str
    num_outputs: Dimension
    huggingface: LoraSource
    gguf: LoraSource | None = None

    def source(self, format_: AdapterFormat) -> LoraSource | None:
        """Return the matrix as adapters of a format have it; None if the format has no name for it."""
        return self.huggingface if format_ == "huggingface" else self.gguf


class LoraGroup(Strict, frozen=True, kw_only=True):
    """Matrices that are multiplied with the same input, so that one kernel runs them."""

    num_inputs: Dimension
    matrices: Annotated[tuple[LoraMatrix, ...], msgspec.Meta(min_length=1)]


class LoraInfo(Strict, frozen=True, kw_only=True):
    """The number of adapters that an artifact has room for, their largest rank, and the matrices that they change.

    Numbers are stored as `dtype`.
    """

    max_loras: Annotated[int, msgspec.Meta(ge=1, le=MAX_LORAS)]
    max_rank: Annotated[int, msgspec.Meta(ge=LORA_BLOCK, le=MAX_LORA_RANK, multiple_of=LORA_BLOCK)]
    dtype: LoraDType
    groups: Annotated[tuple[LoraGroup, ...], msgspec.Meta(min_length=1)]

    @property
    def num_matrices(self) -> int:
        """Number of matrices that an adapter may change."""
        return sum(len(group.matrices) for group in self.groups)

    @property
    def stride(self) -> int:
        """Numbers of an adapter."""
        last = list(self.places())[-1][-1]
        return last.b_at + last.b_items

    @property
    def adapter_bytes(self) -> int:
        """Bytes of an adapter in memory."""
        return self.stride * (4 if self.dtype == "f32" else 2)

    def places(self) -> Iterator[tuple[LoraPlace, ...]]:
        """Yield, for each group, the places of its matrices in the memory of one adapter."""
        number, first = 0, 0
        for group in self.groups:
            places = []
            for matrix in group.matrices:
                places.append(LoraPlace(matrix, group.num_inputs, self.max_rank, number, first))
                number, first = number + 1, places[-1].b_at + places[-1].b_items
            yield tuple(places)


@dataclass(frozen=True)
class LoraPlace:
    """The place of one matrix's change in an adapter, counted in numbers from the adapter's first.

    A and B have the layout of float weights: A `[max_rank / 16, num_inputs, 16]`, then B `[num_outputs / 16, max_rank,
    16]`.
    """

    matrix: LoraMatrix
    num_inputs: int
    max_rank: int
    number: int
    a_at: int

    @property
    def b_at(self) -> int:
        """The first number of B."""
        return self.a_at + self.max_rank * self.num_inputs

    @property
    def b_items(self) -> int:
        """Numbers of B."""
        return -(-self.matrix.num_outputs // LORA_BLOCK) * LORA_BLOCK * self.max_rank
