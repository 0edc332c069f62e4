"""Multi-head latent attention, by the checkpoint's names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from radixlm.runtime.artifact.model_config import LatentAttention, ModelConfig

from ..ops.layers import HeadLinear, Linear, Norm, Part
from ..ops.operations import LatentSpec, Operations
from ..weights.view import Pairs
from .part_names import PartNames

R = TypeVar("R")
A = TypeVar("A")

_LATENT_EPS = 1e-6  # of the norms of latent vectors in all classes of transformers, whatever their `rms_norm_eps`


class LatentSelfAttention:
    """Latent attention of layer `index`; its output still has to pass `o_proj`."""

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
        """Everything that has tensors."""
        narrow = (part for part in (self.q_a_proj, self.q_a_norm) if part is not None)
        yield from narrow
        yield from (self.q_proj, self.kv_a_proj, self.spec.latent_norm, self.spec.keys, self.spec.values, self.o_proj)

    def pairs(self) -> Iterator[tuple[str, Pairs]]:
        """What makes queries and keys, with the order of the rows that rotate, which are the last."""
        attention, turning = self.attention, self.attention.rope.rotary_dim
        if attention.neighbours:
            for linear, size in ((self.q_proj, attention.query_size), (self.kv_a_proj, attention.head_dim)):
                pairs = Pairs(size, turning, size - turning)
                yield from ((name, pairs) for name in (linear.name, linear.bias_name))

    def forward(self, op: Operations[R, A], x: A) -> A:
        """What heads make of what they gather, before `o_proj`."""
        if self.q_a_proj is None or self.q_a_norm is None:
            return op.latent_attention(op.linear(x, self.q_proj), op.linear(x, self.kv_a_proj), self.spec)
        joined = op.linear(x, self.q_a_proj, self.kv_a_proj)
        return op.latent_attention(op.linear(op.norm(joined, self.q_a_norm), self.q_proj), joined, self.spec)

    def add(self, op: Operations[R, A], x: R, gathered: A, factor: float) -> R:
        """`x` and the branch's output."""
        return op.add_linear(x, gathered, self.o_proj, factor=factor)

    def finish(self, op: Operations[R, A], gathered: A) -> R:
        """The branch's output."""
        return op.linear(gathered, self.o_proj)
