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
    """Matrices that are multiplied with the same input. Their matrices A are stacked, so that one kernel runs them."""

    num_inputs: Dimension
    matrices: Annotated[tuple[LoraMatrix, ...], msgspec.Meta(min_length=1)]


class LoraInfo(Strict, frozen=True, kw_only=True):
    """The number of adapters that an artifact has room for, their largest rank, and the matrices that they change."""

    max_loras: Annotated[int, msgspec.Meta(ge=1, le=MAX_LORAS)]
    max_rank: Annotated[int, msgspec.Meta(ge=LORA_BLOCK, le=MAX_LORA_RANK, multiple_of=LORA_BLOCK)]
    groups: Annotated[tuple[LoraGroup, ...], msgspec.Meta(min_length=1)]

    @property
    def num_items(self) -> int:
        """Number of float32 of all adapters together."""
        return sum(group.num_items * self.max_loras for group in self.places())

    def places(self) -> Iterator[LoraPlace]:
        """Yield where the matrices of each group are."""
        first = 0
        for group in self.groups:
            place = LoraPlace(group, self.max_loras, self.max_rank, first)
            yield place
            first += place.num_items * self.max_loras


@dataclass(frozen=True)
class LoraPlace:
    """The matrices of a group, in float32, from item `first` of the memory of all adapters on.

    First come the matrices A of all adapters, `[max_loras, parts * max_rank / 16, num_inputs, 16]`. Then come the
    matrices B of each part, `[max_loras, num_outputs / 16, max_rank, 16]`. So each is a stack in the layout of float
    weights.
    """

    group: LoraGroup
    max_loras: int
    max_rank: int
    first: int

    @property
    def num_items(self) -> int:
        """Items of one adapter."""
        return self.a_items + sum(map(self.b_items, self.group.matrices))

    @property
    def a_items(self) -> int:
        """Items of one adapter's matrices A."""
        return len(self.group.matrices) * self.max_rank * self.group.num_inputs

    def b_items(self, matrix: LoraMatrix) -> int:
        """Items of one adapter's matrix B."""
        return -(-matrix.num_outputs // LORA_BLOCK) * LORA_BLOCK * self.max_rank

    def first_of_b(self, part: int) -> int:
        """Return the first item of the matrices B of a part."""
        before = self.a_items + sum(map(self.b_items, self.group.matrices[:part]))
        return self.first + self.max_loras * before
