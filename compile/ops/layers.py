"""The parts of a decoder, by the checkpoint's names. Knows sizes, not numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Linear:
    """`y = W x (+ b)`; `name` is the checkpoint's, such as `model.layers.0.mlp.up_proj.weight`.

    Rounding the inputs of a `sensitive` one shows in the text. Where its weights are integers, its activations get 16
    bits instead of 8.
    """

    name: str
    num_outputs: int
    num_inputs: int
    has_bias: bool = False
    sensitive: bool = False

    @property
    def bias_name(self) -> str:
        """The checkpoint's name of the bias."""
        return self.name.removesuffix(".weight") + ".bias"


@dataclass(frozen=True)
class RMSNorm:
    """Root-mean-square normalization with a gain of `size`."""

    name: str
    size: int


@dataclass(frozen=True)
class Embedding:
    """A row of `size` for each of `num_rows` tokens."""

    name: str
    num_rows: int
    size: int
