"""Mamba-2 in place of attention, by the checkpoint's names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from radixlm.runtime.artifact.model_config import Mamba2, ModelConfig

from ..ops.layers import Linear, Norm, Part, Vector, bias_of
from ..ops.operations import MambaSpec, Operations
from ..weights.view import Pairs
from .part_names import PartNames

R = TypeVar("R")
A = TypeVar("A")


class Mamba2Mixer:
    """Mamba-2 of layer `index`; its output still has to pass `out_proj`."""

    def __init__(self, config: ModelConfig, mamba: Mamba2, index: int, names: PartNames) -> None:
        hidden, width = config.hidden_size, mamba.values_width

        def linear(role: str, num_outputs: int, *, exact: bool = False) -> Linear:
            name = names.layer(index, role)
            return Linear(name, num_outputs, hidden, mamba.bias, sensitive=exact, exact=exact)

        self.mamba = mamba
        self.gate_proj = linear("mamba_gate", width)
        self.in_proj = linear("mamba_in", mamba.convolved_width)
        self.dt_proj = linear("mamba_dt", mamba.num_heads, exact=True)
        self.out_proj = Linear(names.layer(index, "mamba_out"), hidden, width, mamba.bias)
        taps = names.layer(index, "mamba_taps")
        self.spec = MambaSpec(
            mamba,
            config.state_layer(index),
            Vector(taps, mamba.convolved_width * mamba.kernel_size),
            Vector(bias_of(taps), mamba.convolved_width) if mamba.convolution_bias else None,
            Vector(names.layer(index, "mamba_rate"), mamba.num_heads),
            Vector(names.layer(index, "mamba_dt_bias"), mamba.num_heads),
            Vector(names.layer(index, "mamba_skip"), mamba.num_heads),
            Norm(names.layer(index, "mamba_norm"), width, config.norm_eps, group=width // mamba.num_groups),
        )

    def parts(self) -> Iterator[Part]:
        """Everything that has tensors."""
        spec = self.spec
        yield from (self.gate_proj, self.in_proj, self.dt_proj, spec.norm, self.out_proj)
        yield from (part for part in (spec.taps, spec.bias, spec.rate, spec.dt_bias, spec.skip) if part is not None)

    def pairs(self) -> Iterator[tuple[str, Pairs]]:
        """Nothing rotates."""
        yield from ()

    def forward(self, op: Operations[R, A], x: A) -> A:
        """What heads give, before `out_proj`."""
        return op.mamba2(op.linear(x, self.in_proj, self.gate_proj, self.dt_proj), self.spec)

    def add(self, op: Operations[R, A], x: R, given: A, factor: float) -> R:
        """`x` and the branch's output."""
        return op.add_linear(x, given, self.out_proj, factor=factor)

    def finish(self, op: Operations[R, A], given: A) -> R:
        """The branch's output."""
        return op.linear(given, self.out_proj)
