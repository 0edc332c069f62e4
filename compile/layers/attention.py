"""Grouped-query attention and multi-head latent attention, with the checkpoint's names of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from radixlm.runtime.artifact.model_config import Attention, LatentAttention, ModelConfig

from ..ops.layers import HeadLinear, Linear, Norm, Part, Vector
from ..ops.operations import AttentionSpec, LatentSpec, Operations
from ..weights.view import RotaryPairs
from .part_names import PartNames

R = TypeVar("R")
A = TypeVar("A")


class SelfAttention:
    """Attention of layer `index`; `add` or `finish` applies `o_proj` to its output."""

    def __init__(self, config: ModelConfig, attention: Attention, index: int, names: PartNames) -> None:
        self.attention = attention
        hidden, queries = config.hidden_size, attention.num_heads * attention.head_dim
        keys = attention.num_kv_heads * attention.head_dim

        def linear(role: str, num_outputs: int, *, bias: bool) -> Linear:
            # A quarter of the error of 8 bits is due to inputs of values, for 1/30 of the work (bench/LOG.md).
            gives_values = role == "v" or (role == "k" and attention.keys_are_values)
            return Linear(names.layer(index, role), num_outputs, hidden, bias, sensitive=gives_values)

        def norm(role: str, num_heads: int) -> Norm | None:
            kind = attention.qk_norm
            if kind is None:
                return None
            size = attention.head_dim * (1 if kind.over == "head" else num_heads)
            group = attention.head_dim if kind.over == "each_head" else None
            return Norm(names.layer(index, role), size, config.norm_eps, kind.kind, kind.has_gain, group=group)

        has_own = attention.shared_kv is None
        self.q_proj = linear("q", queries, bias=attention.bias)
        self.k_proj = linear("k", keys, bias=attention.bias) if has_own else None
        self.v_proj = linear("v", keys, bias=attention.bias) if has_own and not attention.keys_are_values else None
        gate, self.gate_proj = attention.gate, None
        if gate is not None:
            num_gates = attention.num_heads if gate.over == "head" else queries
            self.gate_proj = linear("attention_gate", num_gates, bias=gate.bias)
        self.o_proj = Linear(names.layer(index, "o"), hidden, queries, attention.output_bias)
        self.spec = AttentionSpec(
            attention,
            config.kv_layer(index),
            norm("q_norm", attention.num_heads),
            norm("k_norm", attention.num_kv_heads) if has_own else None,
            Norm(names.layer(index, "v_norm"), attention.head_dim, config.norm_eps, has_gain=False)
            if attention.value_norm
            else None,
            Vector(names.layer(index, "sinks"), attention.num_heads) if attention.sinks else None,
        )

    def parts(self) -> Iterator[Part]:
        """Yield everything that has tensors."""
        yield from self.inputs
        yield self.o_proj
        yield from (part for part in (self.spec.q_norm, self.spec.k_norm, self.spec.sinks) if part is not None)

    def pairs(self) -> Iterator[tuple[str, RotaryPairs]]:
        """Yield the tensors of queries and keys (matrices, biases, gains), with the order of a head's rows."""
        attention = self.attention
        pairs = RotaryPairs(
            attention.head_dim, attention.head_dim if attention.rope is None else attention.rope.rotary_dim
        )
        for linear in (self.q_proj, self.k_proj):
            if linear is not None:
                yield from ((name, pairs) for name in (linear.name, linear.bias_name))
        for norm in (self.spec.q_norm, self.spec.k_norm):
            if norm is not None:
                yield norm.name, pairs

    @property
    def inputs(self) -> list[Linear]:
        """The matrices that take the layer's input, side by side."""
        joined = (self.q_proj, self.k_proj, self.v_proj, self.gate_proj)
        return [linear for linear in joined if linear is not None]

    def forward(self, op: Operations[R, A], x: A) -> A:
        """Return the output of attention, before `o_proj`."""
        return op.attention(op.linear(x, *self.inputs), self.spec)

    def keep(self, op: Operations[R, A], x: A) -> None:
        """Append the KV of the step's tokens to the pool, and compute nothing else."""
        op.keep(op.linear(x, *self.inputs), self.spec)

    def add(self, op: Operations[R, A], x: R, gathered: A, factor: float) -> R:
        """Return `x` plus `factor` times the branch's output."""
        return op.add_linear(x, gathered, self.o_proj, factor=factor)

    def finish(self, op: Operations[R, A], gathered: A) -> R:
        """Return the branch's output."""
        return op.linear(gathered, self.o_proj)


_LATENT_EPS = 1e-6  # eps of the latent norms in all classes of transformers, whatever their `rms_norm_eps`


class LatentSelfAttention:
    """Latent attention of layer `index`; `add` or `finish` applies `o_proj` to its output."""

    def __init__(self, config: ModelConfig, attention: LatentAttention, index: int, names: PartNames) -> None:
        self.attention, hidden, narrow = attention, config.hidden_size, attention.query_dim
        heads, latent, bias = attention.num_heads, attention.latent_dim, attention.bias

        def linear(role: str, num_outputs: int, num_inputs: int, *, bias: bool = False) -> Linear:
            return Linear(names.layer(index, role), num_outputs, num_inputs, bias, sensitive=True)

        def norm(role: str, size: int) -> Norm:
            return Norm(names.layer(index, role), size, _LATENT_EPS)

        self.q_a_proj = None if narrow is None else linear("q_a", narrow, hidden, bias=bias)
        self.q_a_norm = None if narrow is None else norm("q_a_norm", narrow)
        queries = heads * attention.query_size
        self.q_proj = linear("q", queries, hidden) if narrow is None else linear("q_b", queries, narrow)
        self.kv_a_proj = linear("kv_a", attention.head_dim, hidden, bias=bias)
        self.o_proj = linear("o", hidden, heads * attention.value_dim, bias=attention.output_bias)
        self.spec = LatentSpec(
            attention,
            config.kv_layer(index),
            norm("kv_a_norm", latent),
            HeadLinear(names.layer(index, "k_b"), heads, latent, attention.plain_dim),
            HeadLinear(names.layer(index, "v_b"), heads, attention.value_dim, latent),
        )

    def parts(self) -> Iterator[Part]:
        """Yield everything that has tensors."""
        narrow = (part for part in (self.q_a_proj, self.q_a_norm) if part is not None)
        yield from narrow
        yield from (self.q_proj, self.kv_a_proj, self.spec.latent_norm, self.spec.keys, self.spec.values, self.o_proj)

    def pairs(self) -> Iterator[tuple[str, RotaryPairs]]:
        """Yield the tensors of queries and keys, with the order of the rotated rows, which are the last."""
        attention, turning = self.attention, self.attention.rope.rotary_dim
        if attention.neighbours:
            for linear, size in ((self.q_proj, attention.query_size), (self.kv_a_proj, attention.head_dim)):
                pairs = RotaryPairs(size, turning, size - turning)
                yield from ((name, pairs) for name in (linear.name, linear.bias_name))

    def forward(self, op: Operations[R, A], x: A) -> A:
        """Return the output of all heads, before `o_proj`."""
        return op.latent_attention(*self._entering(op, x), self.spec)

    def keep(self, op: Operations[R, A], x: A) -> None:
        """Append the latent KV of the step's tokens to the pool, and compute nothing else."""
        op.keep_latent(*self._entering(op, x), self.spec)

    def add(self, op: Operations[R, A], x: R, gathered: A, factor: float) -> R:
        """Return `x` plus `factor` times the branch's output."""
        return op.add_linear(x, gathered, self.o_proj, factor=factor)

    def finish(self, op: Operations[R, A], gathered: A) -> R:
        """Return the branch's output."""
        return op.linear(gathered, self.o_proj)

    def _entering(self, op: Operations[R, A], x: A) -> tuple[R, R]:
        """Return queries, and the latent vectors with the keys that rotate."""
        if self.q_a_proj is None or self.q_a_norm is None:
            return op.linear(x, self.q_proj), op.linear(x, self.kv_a_proj)
        joined = op.linear(x, self.q_a_proj, self.kv_a_proj)
        return op.linear(op.norm(joined, self.q_a_norm), self.q_proj), joined
