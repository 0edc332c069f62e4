"""The gated delta rule in place of attention, by the checkpoint's names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from radixlm.runtime.artifact.model_config import GatedDelta, ModelConfig

from ..ops.layers import Linear, Norm, Part, Vector
from ..ops.operations import DeltaSpec, Operations
from ..weights.view import Pairs
from .part_names import PartNames

R = TypeVar("R")
A = TypeVar("A")


class GatedDeltaMixer:
    """The delta rule of layer `index`; its output still has to pass `out_proj`."""

    def __init__(self, config: ModelConfig, delta: GatedDelta, index: int, names: PartNames) -> None:
        hidden, heads = config.hidden_size, delta.num_value_heads

        def linear(role: str, num_outputs: int, *, exact: bool = False) -> Linear:
            # two numbers of each head are few, and what they say is kept for all tokens to come
            return Linear(names.layer(index, role), num_outputs, hidden, sensitive=exact, exact=exact)

        self.delta = delta
        self.qkv_proj = linear("delta_qkv", delta.convolved_width)
        self.gate_proj = linear("delta_gate", delta.values_width)
        self.b_proj, self.a_proj = linear("delta_b", heads, exact=True), linear("delta_a", heads, exact=True)
        self.out_proj = Linear(names.layer(index, "delta_out"), hidden, delta.values_width)
        self.spec = DeltaSpec(
            delta,
            config.state_layer(index),
            Vector(names.layer(index, "delta_taps"), delta.convolved_width * delta.kernel_size),
            Vector(names.layer(index, "delta_rate"), heads),
            Vector(names.layer(index, "delta_dt"), heads),
            Norm(names.layer(index, "delta_norm"), delta.value_dim, config.norm_eps),
        )

    def parts(self) -> Iterator[Part]:
        """Everything that has tensors."""
        spec = self.spec
        yield from self.inputs
        yield from (spec.taps, spec.rate, spec.dt_bias, spec.norm)
        yield self.out_proj

    def pairs(self) -> Iterator[tuple[str, Pairs]]:
        """Nothing rotates."""
        yield from ()

    @property
    def inputs(self) -> list[Linear]:
        """The matrices that the layer's input enters, side by side."""
        return [self.qkv_proj, self.gate_proj, self.b_proj, self.a_proj]

    def forward(self, op: Operations[R, A], x: A) -> A:
        """What heads give, before `out_proj`."""
        return op.gated_delta(op.linear(x, *self.inputs), self.spec)

    def add(self, op: Operations[R, A], x: R, given: A, factor: float) -> R:
        """`x` and the branch's output."""
        return op.add_linear(x, given, self.out_proj, factor=factor)

    def finish(self, op: Operations[R, A], given: A) -> R:
        """The branch's output."""
        return op.linear(given, self.out_proj)
