"""Layers with a recurrent state instead of, or in addition to, attention, with the checkpoint's names of tensors.

Mamba-2, gated short convolutions and the gated delta rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from radixlm.runtime.artifact.model_config import GatedDelta, Mamba2, ModelConfig, ShortConvolution

from ..ops.layers import Linear, Norm, Part, Vector, bias_of
from ..ops.operations import ConvolutionSpec, DeltaSpec, MambaSpec, Operations
from ..weights.view import RotaryPairs
from .part_names import PartNames

R = TypeVar("R")
A = TypeVar("A")


class Mamba2Mixer:
    """Mamba-2 of layer `index`; `add` or `finish` applies `out_proj` to its output."""

    def __init__(self, config: ModelConfig, mamba: Mamba2, index: int, names: PartNames) -> None:
        hidden, width = config.hidden_size, mamba.values_width

        def linear(role: str, num_outputs: int, factor: float, *, exact: bool = False) -> Linear:
            name = names.layer(index, role)
            return Linear(name, num_outputs, hidden, mamba.bias, sensitive=exact, exact=exact, factor=factor)

        self.mamba = mamba
        self.gate_proj = linear("mamba_gate", width, mamba.gate_factor)
        self.dt_proj = linear("mamba_dt", mamba.num_heads, mamba.step_factor, exact=True)
        if mamba.is_convolved_alike:
            self.convolved = [linear("mamba_in", mamba.convolved_width, mamba.value_factor)]
        else:
            self.convolved = [
                linear("mamba_values", width, mamba.value_factor),
                linear("mamba_keys", mamba.keys_width, mamba.key_factor),
                linear("mamba_queries", mamba.keys_width, mamba.query_factor),
            ]
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
            Norm(names.layer(index, "mamba_norm"), width, config.norm_eps, group=width // mamba.num_groups)
            if mamba.norm
            else None,
        )

    def parts(self) -> Iterator[Part]:
        """Yield everything that has tensors."""
        spec = self.spec
        yield from (*self.stored, self.out_proj)
        vectors = (spec.taps, spec.bias, spec.rate, spec.dt_bias, spec.skip, spec.norm)
        yield from (part for part in vectors if part is not None)

    @property
    def stored(self) -> list[Linear]:
        """The matrices that take the layer's input, joined in the order of files."""
        return [self.gate_proj, *self.convolved, self.dt_proj]

    def pairs(self) -> Iterator[tuple[str, RotaryPairs]]:
        """Yield nothing, because nothing rotates."""
        yield from ()

    def forward(self, op: Operations[R, A], x: A) -> A:
        """Return the output of heads, before `out_proj`."""
        return op.mamba2(op.linear(x, *self.convolved, self.gate_proj, self.dt_proj), self.spec)

    def add(self, op: Operations[R, A], x: R, given: A, factor: float) -> R:
        """Return `x` plus `factor` times the branch's output."""
        return op.add_linear(x, given, self.out_proj, factor=factor)

    def finish(self, op: Operations[R, A], given: A) -> R:
        """Return the branch's output."""
        return op.linear(given, self.out_proj)


class ShortConvolutionMixer:
    """The convolution of layer `index`; `add` or `finish` applies `out_proj` to its output."""

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
        """Yield everything that has tensors."""
        yield from (part for part in (self.in_proj, self.spec.taps, self.spec.bias, self.out_proj) if part is not None)

    def pairs(self) -> Iterator[tuple[str, RotaryPairs]]:
        """Yield nothing, because nothing rotates."""
        yield from ()

    def forward(self, op: Operations[R, A], x: A) -> A:
        """Return the output of the convolution, before `out_proj`."""
        return op.short_convolution(op.linear(x, self.in_proj), self.spec)

    def add(self, op: Operations[R, A], x: R, mixed: A, factor: float) -> R:
        """Return `x` plus `factor` times the branch's output."""
        return op.add_linear(x, mixed, self.out_proj, factor=factor)

    def finish(self, op: Operations[R, A], mixed: A) -> R:
        """Return the branch's output."""
        return op.linear(mixed, self.out_proj)


class GatedDeltaMixer:
    """The delta rule of layer `index`; `add` or `finish` applies `out_proj` to its output."""

    def __init__(self, config: ModelConfig, delta: GatedDelta, index: int, names: PartNames) -> None:
        hidden, heads = config.hidden_size, delta.num_value_heads

        def linear(role: str, num_outputs: int, *, exact: bool = False) -> Linear:
            # there are only two numbers per head, and their effect persists for all later tokens
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
        """Yield everything that has tensors."""
        spec = self.spec
        yield from self.inputs
        yield from (spec.taps, spec.rate, spec.dt_bias, spec.norm)
        yield self.out_proj

    def pairs(self) -> Iterator[tuple[str, RotaryPairs]]:
        """Yield nothing, because nothing rotates."""
        yield from ()

    @property
    def inputs(self) -> list[Linear]:
        """The matrices that take the layer's input, side by side."""
        return [self.qkv_proj, self.gate_proj, self.b_proj, self.a_proj]

    def forward(self, op: Operations[R, A], x: A) -> A:
        """Return the output of heads, before `out_proj`."""
        return op.gated_delta(op.linear(x, *self.inputs), self.spec)

    def add(self, op: Operations[R, A], x: R, given: A, factor: float) -> R:
        """Return `x` plus `factor` times the branch's output."""
        return op.add_linear(x, given, self.out_proj, factor=factor)

    def finish(self, op: Operations[R, A], given: A) -> R:
        """Return the branch's output."""
        return op.linear(given, self.out_proj)
