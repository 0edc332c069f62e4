"""A gated short convolution in place of attention, by the checkpoint's names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from radixlm.runtime.artifact.model_config import ModelConfig, ShortConvolution

from ..ops.layers import Linear, Part, Vector, bias_of
from ..ops.operations import ConvolutionSpec, Operations
from ..weights.view import Pairs
from .part_names import PartNames

R = TypeVar("R")
A = TypeVar("A")


class ShortConvolutionMixer:
    """The convolution of layer `index`; its output still has to pass `out_proj`."""

    def __init__(self, config: ModelConfig, convolution: ShortConvolution, index: int, names: PartNames) -> None:
        width, bias = config.hidden_size, convolution.bias
        taps = names.layer(index, "conv")
        self.in_proj = Linear(names.layer(index, "conv_in"), 3 * width, width, bias)
        self.out_proj = Linear(names.layer(index, "conv_out"), width, width, bias)
        self.spec = ConvolutionSpec(
            convolution,
            width,
            config.state_layer(index),
            Vector(taps, width * convolution.kernel_size),
            Vector(bias_of(taps), width) if bias else None,
        )

    def parts(self) -> Iterator[Part]:
        """Everything that has tensors."""
        yield from (part for part in (self.in_proj, self.spec.taps, self.spec.bias, self.out_proj) if part is not None)

    def pairs(self) -> Iterator[tuple[str, Pairs]]:
        """Nothing rotates."""
        yield from ()

    def forward(self, op: Operations[R, A], x: A) -> A:
        """What the convolution gives, before `out_proj`."""
        return op.short_convolution(op.linear(x, self.in_proj), self.spec)

    def add(self, op: Operations[R, A], x: R, mixed: A, factor: float) -> R:
        """`x` and the branch's output."""
        return op.add_linear(x, mixed, self.out_proj, factor=factor)

    def finish(self, op: Operations[R, A], mixed: A) -> R:
        """The branch's output."""
        return op.linear(mixed, self.out_proj)
