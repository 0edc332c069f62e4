"""The operations that a model file is written in: each appends kernel calls to a program.

A model file knows nothing of how weights are stored, nor of the kernels that want activations in one form or another.
"""

from __future__ import annotations

from radixlm.runtime.artifact.manifest import KVLayout, ModelConfig

from ..codegen.targets import Target
from ..kernels.activation import gather_rows
from ..kernels.embedding import embedding
from ..weights.layout import ROW_BLOCK, round_up
from ..weights.plan import WeightPlan
from .attention import AttentionOps
from .layers import Embedding, Linear, RMSNorm
from .linear import LinearOps, arrays
from .program import Input, Program, Size, Stored
from .rope_frequencies import ROPE_FREQUENCIES
from .rows import Activation, Limits, Rows


class Ops:
    """Appends the kernels of one model to `program`, and its weights to `plan`."""

    def __init__(self, config: ModelConfig, layout: KVLayout, limits: Limits, target: Target, plan: WeightPlan) -> None:
        self.config, self.limits, self.plan = config, limits, plan
        self.program = Program()
        self._linear = LinearOps(self.program, plan, target)
        self._attention = AttentionOps(self.program, config, layout, limits, target)

    @property
    def rounded_inputs(self) -> set[str]:
        """Matrices whose inputs are rounded to 8 bits."""
        return self._linear.rounded_inputs

    def embed(self, layer: Embedding) -> Rows:
        """Rows of the embedding for the step's tokens; also what is the same in each layer's attention."""
        config = self.config
        frequencies = self.plan.vector(((ROPE_FREQUENCIES, config.head_dim // 2),))
        self._attention.begin(Stored(frequencies.name))
        matrix = self.plan.matrix(((layer.name, layer.num_rows),), config.hidden_size)
        rows = Rows.of_tokens(self.program, self.limits, "hidden", config.hidden_size)
        self.program.call(
            ("embedding", matrix.kind, config.hidden_size),
            lambda: embedding(matrix.kind, config.hidden_size, rows.stride),
            Input("token_ids"),
            *arrays(matrix.name, matrix.kind),
            rows.memory,
            rows.num_rows,
        )
        return rows

    def rms_norm(self, x: Rows, norm: RMSNorm) -> Activation:
        """`x / rms(x) * gain`."""
        gain = self.plan.vector(((norm.name, norm.size),))
        return Activation("rms_norm", x, norm.size, Stored(gain.name), self.config.rms_norm_eps)

    def linear(self, x: Activation, *layers: Linear) -> Rows:
        """The outputs of all layers, side by side."""
        columns, width = [], 0
        for layer in layers:
            columns.append(width)
            width += round_up(layer.num_outputs, ROW_BLOCK)
        role = layers[0].name.rsplit(".", 2)[-2]  # such as "q_proj": the same in each layer
        rows = Rows.of_tokens(self.program, self.limits, ("linear", role), width, tuple(columns))
        self._linear.multiply(x, layers, rows)
        return rows

    def add_linear(self, x: Rows, y: Activation, layer: Linear) -> Rows:
        """`x + W y`, in place of x."""
        self._linear.multiply(y, (layer,), x, add=True)
        return x

    def attention(self, qkv: Rows) -> Activation:
        """Attention of the step's tokens over the pool, which gets their keys and values; one call for each decoder
        layer.
        """
        width = self.config.num_attention_heads * self.config.head_dim
        return Activation("identity", self._attention.attend(qkv), width, 0, 0.0)

    def silu_mul(self, gate_up: Rows) -> Activation:
        """`silu(gate) * up` (SwiGLU, Shazeer, 2020)."""
        return Activation("silu_mul", gate_up, self.config.intermediate_size, 0, 0.0)

    def logits(self, x: Rows, norm: RMSNorm, head: Linear) -> None:
        """Normalize the rows whose logits are wanted, and multiply them with the output matrix."""
        num_rows, most = Size("num_logits"), self.limits.num_logits
        picked = Rows(self.program.place("picked", most * x.stride * 4), x.stride, (0,), num_rows, most)
        self.program.call(
            ("gather_rows", x.stride),
            lambda: gather_rows(x.stride),
            x.memory,
            Input("logit_rows"),
            picked.memory,
            num_rows,
        )
        out = Rows(Input("logits"), round_up(head.num_outputs, ROW_BLOCK), (0,), num_rows, most)
        self._linear.multiply(self.rms_norm(picked, norm), (head,), out)
