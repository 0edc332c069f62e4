"""The parts of a decoder, by the checkpoint's names. Knows sizes, not numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Linear:
    """A linear layer, `y = factor * (W x (+ b))`.

    `name` is the checkpoint's, such as `model.layers.0.mlp.up_proj.weight`. Rounding the inputs of a `sensitive` one
    visibly changes the text, so with integer weights its activations get 16 bits instead of 8. The weights of an
    `exact` one are not rounded to integers.
    """

    name: str
    num_outputs: int
    num_inputs: int
    has_bias: bool = False
    sensitive: bool = False
    exact: bool = False
    factor: float = 1.0

    @property
    def bias_name(self) -> str:
        """The checkpoint's name of the bias."""
        return bias_of(self.name)

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The checkpoint's names, with shapes."""
        weight: dict[str, tuple[int, ...]] = {self.name: (self.num_outputs, self.num_inputs)}
        return weight | ({self.bias_name: (self.num_outputs,)} if self.has_bias else {})


@dataclass(frozen=True)
class ExpertLinear:
    """A `Linear` for each of `num_experts`, stacked: `[experts, outputs, inputs]`, biases `[experts, outputs]`."""

    name: str
    num_experts: int
    num_outputs: int
    num_inputs: int
    has_bias: bool = False

    @property
    def bias_name(self) -> str:
        """The checkpoint's name of the biases."""
        return bias_of(self.name)

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The checkpoint's names, with shapes."""
        weight: dict[str, tuple[int, ...]] = {self.name: (self.num_experts, self.num_outputs, self.num_inputs)}
        return weight | ({self.bias_name: (self.num_experts, self.num_outputs)} if self.has_bias else {})


@dataclass(frozen=True)
class HeadLinear:
    """A `Linear` without bias for each of `num_heads`, stacked: `[heads, outputs, inputs]`. All are sensitive."""

    name: str
    num_heads: int
    num_outputs: int
    num_inputs: int

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The checkpoint's name, with its shape."""
        return {self.name: (self.num_heads, self.num_outputs, self.num_inputs)}


@dataclass(frozen=True)
class Norm:
    """A norm of rows of `size` numbers: `x / root mean square * gain (+ bias)`.

    With `kind` "layer", the mean is subtracted first. Mean and root mean square are of the whole row, or of each
    `group` of its numbers.
    """

    name: str
    size: int
    eps: float
    kind: Literal["rms", "layer"] = "rms"
    has_gain: bool = True
    has_bias: bool = False
    group: int | None = None

    @property
    def bias_name(self) -> str:
        """The checkpoint's name of the bias."""
        return bias_of(self.name)

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The checkpoint's names, with shapes."""
        gain: dict[str, tuple[int, ...]] = {self.name: (self.size,)} if self.has_gain else {}
        return gain | ({self.bias_name: (self.size,)} if self.has_bias else {})


@dataclass(frozen=True)
class Vector:
    """A vector of `size` float32 numbers."""

    name: str
    size: int

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The checkpoint's name, with its shape."""
        return {self.name: (self.size,)}


@dataclass(frozen=True)
class Embedding:
    """An embedding: a row of `size` numbers for each of `num_rows` tokens."""

    name: str
    num_rows: int
    size: int

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The checkpoint's name, with its shape."""
        return {self.name: (self.num_rows, self.size)}


Part = Linear | ExpertLinear | HeadLinear | Norm | Vector | Embedding


def bias_of(name: str) -> str:
    """Return the checkpoint's name of the bias of a weight."""
    return name.removesuffix("weight") + "bias" if name.endswith(".weight") else name + "_bias"
