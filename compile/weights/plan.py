"""Plan the arrays of an artifact's weights and their offsets in the file. Knows sizes, not numbers.

Matrices that are multiplied with the same input are adjacent and form one array, so that one kernel runs them all.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Literal

from .kinds import WeightKind
from .layout import ALIGNMENT, ROW_BLOCK, round_up
from .packing import packed_shape, padded_inputs

Array = Literal["codes", "scales", "offsets", "order"]


@dataclass(frozen=True)
class Matrix:
    """Matrices of one kind and width, stacked. `parts` are the checkpoint's names, with their rows.

    A matrix whose inputs are sorted (`Weight.input_order`) is stored alone, with their order as an int32 array. If its
    only part is a tensor of `num_experts` matrices, rows count those of one expert.
    """

    parts: tuple[tuple[str, int], ...]
    kind: WeightKind
    num_inputs: int
    is_sorted: bool = False
    num_experts: int = 1

    @property
    def name(self) -> str:
        """The names of all parts, joined."""
        return "+".join(name for name, _ in self.parts)

    @property
    def num_outputs(self) -> int:
        """Number of rows of one expert, each part padded to whole blocks."""
        return sum(round_up(rows, ROW_BLOCK) for _, rows in self.parts)

    def array_bytes(self) -> dict[Array, int]:
        """Return the bytes of each array in which it is stored."""
        shape = packed_shape(self.kind, self.num_experts * self.num_outputs, self.num_inputs)
        sizes: dict[Array, int] = {"codes": shape.codes, "scales": shape.scales, "offsets": shape.offsets}
        if self.is_sorted:
            sizes["order"] = self.num_inputs * 4
        return {array: size for array, size in sizes.items() if size}

    @property
    def padded_inputs(self) -> int:
        """Number of columns in kernel layout."""
        return padded_inputs(self.kind, self.num_inputs)


@dataclass(frozen=True)
class Vector:
    """A vector of float32: gains and biases, each part padded to whole blocks, or computed numbers (`part` "").

    If its only part is the biases of `num_experts`, the size is that of one expert, and is padded.
    """

    parts: tuple[tuple[str, int], ...]
    num_experts: int = 1

    @property
    def name(self) -> str:
        """The names of all parts, joined."""
        return "+".join(name for name, _ in self.parts)

    @property
    def size(self) -> int:
        """Number of elements, with padding."""
        return self.num_experts * sum(round_up(size, ROW_BLOCK) for _, size in self.parts)


class WeightPlan:
    """The arrays of weights.safetensors, in the order in which the model asks for them.

    Args:
        kinds: the kind in which each of the checkpoint's matrices will be stored.
        sorted_inputs: names of matrices whose inputs are sorted.
    """

    def __init__(self, kinds: Mapping[str, WeightKind], sorted_inputs: Set[str] = frozenset()) -> None:
        self.kinds, self.sorted_inputs = kinds, sorted_inputs
        self.matrices: dict[str, Matrix] = {}
        self.vectors: dict[str, Vector] = {}
        self._offsets: dict[str, int] = {}
        self._end = 0

    def matrix(self, parts: tuple[tuple[str, int], ...], num_inputs: int, num_experts: int = 1) -> Matrix:
        """Plan a matrix, or return the planned one (a tied output matrix).

        Args:
            parts: names of matrices and their numbers of outputs, concatenated in the matrix.
        """
        is_sorted = parts[0][0] in self.sorted_inputs
        assert num_experts == 1 or not is_sorted
        matrix = Matrix(parts, self.kinds[parts[0][0]], num_inputs, is_sorted, num_experts)
        if matrix.name not in self.matrices:
            self.matrices[matrix.name] = matrix
            for array, size in matrix.array_bytes().items():
                self._place(f"{matrix.name}.{array}", size)
        return matrix

    def vector(self, parts: tuple[tuple[str, int], ...], num_experts: int = 1) -> Vector:
        """Plan a vector of float32, or return the planned one.

        Args:
            parts: names of tensors and their numbers of elements, concatenated in the vector.
        """
        vector = Vector(parts, num_experts)
        if vector.name not in self.vectors:
            self.vectors[vector.name] = vector
            self._place(vector.name, vector.size * 4)
        return vector

    def _place(self, name: str, size: int) -> None:
        """Assign the next offset to a tensor of `size` bytes."""
        self._offsets[name] = self._end
        self._end += round_up(size, ALIGNMENT)

    def offset(self, name: str) -> int:
        """Return the offset of a tensor's data, in bytes from the first tensor's."""
        return self._offsets[name]

    def tensors(self) -> dict[str, tuple[int, int]]:
        """Return [begin, end) in bytes by name; every tensor begins and ends at a multiple of `ALIGNMENT`."""
        begins = list(self._offsets.values())
        return dict(zip(self._offsets, zip(begins, [*begins[1:], self._end], strict=True), strict=True))

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all tensors."""
        return self._end
