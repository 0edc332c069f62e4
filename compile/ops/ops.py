"""Implement `Operations` by kernels: each operation appends calls to a program.

A model file knows neither how weights are stored nor the formats of activations that kernels need. `implemented.py`
refuses operations without a kernel before a model file runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from radixlm.runtime.artifact.lora import LoraInfo
from radixlm.runtime.artifact.manifest import KVLayout
from radixlm.runtime.artifact.model_config import Function, ModelConfig

from ..codegen.targets import Target
from ..kernels.embedding import AddRowsSpec, add_rows, mean_rows, token_types
from ..kernels.embedding import embedding as embedding_kernel
from ..kernels.hidden_rows import concat_previous, keep_hidden
from ..kernels.row_norms import AddNormSpec, NormSpec, add_norm, bound_rows, normalize_rows, scale_rows
from ..weights.layout import ROW_BLOCK, round_up
from ..weights.plan import WeightPlan
from .attention import AttentionOps, LatentOps
from .experts import ExpertOps
from .layers import Embedding, Linear, Norm, Vector
from .linear import LinearOps, arrays
from .lora import LoraOps
from .operations import AttentionSpec, ConvolutionSpec, DeltaSpec, ExpertsSpec, LatentSpec, MambaSpec, ScoreSpec
from .program import Activation, Argument, Gates, Input, Limits, Program, RowBuffer, Size, WeightTensor
from .recurrent import RecurrentOps
from .wanted_rows import WantedRows


class Ops:
    """The operations of one model: kernels are appended to `program`, and weights to `plan`.

    With `most_logits`, `logits` computes those of so many first tokens only; it must be a multiple of 16, and fewer
    than the vocabulary has.
    """

    def __init__(
        self,
        config: ModelConfig,
        layout: KVLayout,
        limits: Limits,
        target: Target,
        plan: WeightPlan,
        lora: LoraInfo | None = None,
        most_logits: int | None = None,
    ) -> None:
        self.limits, self.plan, self._target, self._layout = limits, plan, target, layout
        self._most_logits = most_logits
        self.program = Program()
        self._linear = LinearOps(self.program, plan, target)
        self.rounded_inputs = self._linear.rounded_inputs
        self._lora = None if lora is None else LoraOps(self.program, lora, target)
        self._wanted = WantedRows(self.program, limits)
        self._experts = ExpertOps(self.program, plan, limits, target, self._linear)
        is_scoring = config.why_not_partial is None
        self._attention = AttentionOps(self.program, plan, config.ropes, layout, limits, target, is_scoring=is_scoring)
        self._latent = LatentOps(self.program, plan, layout, limits, target, self._linear, self._attention)

        self._recurrent = RecurrentOps(self.program, plan, config.state_bytes, limits, target)

    def embed(self, embedding: Embedding, *, factor: float = 1.0) -> RowBuffer:
        """Return the embedding rows of the step's tokens."""
        matrix = self.plan.matrix(((embedding.name, embedding.num_rows),), embedding.size)
        rows = RowBuffer.of_tokens(self.program, self.limits, ("embedding", embedding.name), embedding.size)
        self.program.call(
            ("embedding", matrix.kind, embedding.size, factor),
            lambda: embedding_kernel(matrix.kind, embedding.size, rows.stride, factor),
            Input("token_ids"),
            *arrays(matrix.name, matrix.kind),
            rows.memory,
            rows.num_rows,
        )
        return rows

    def normalize(self, x: RowBuffer, norm: Norm) -> RowBuffer:
        """Normalize `x` in place, and return it."""
        spec = NormSpec(norm.size, x.stride, norm.eps, norm.kind, norm.has_gain, norm.has_bias)
        self.program.call(spec, lambda: normalize_rows(spec, self._target), x.memory, self._gain(norm), x.num_rows)
        return x

    def norm(self, x: RowBuffer, norm: Norm) -> Activation:
        """Return `x` normalized; the matrix product that takes it computes the norm."""
        function: Literal["rms_norm", "layer_norm"] = "rms_norm" if norm.kind == "rms" else "layer_norm"
        return Activation(function, x, norm.size, self._gain(norm), norm.eps, has_bias=norm.has_bias)

    def plain(self, x: RowBuffer, width: int) -> Activation:
        """Return `x` unchanged, with rows of `width`."""
        return Activation("identity", x, width, 0, 0.0)

    def linear(self, x: Activation, *layers: Linear) -> RowBuffer:
        """Return the outputs of all layers, side by side."""
        columns, width = [], 0
        for layer in layers:
            columns.append(width)
            width += round_up(layer.num_outputs, ROW_BLOCK)
        role = layers[0].name.rsplit(".", 2)[-2]  # such as "q_proj"; the same in each layer
        rows = RowBuffer.of_tokens(self.program, self.limits, ("linear", role), width, tuple(columns))
        self._linear.multiply(x, layers, rows, keeps_floats=self._adapts(layers))
        self._adapt(x, layers, rows)
        return rows

    def attention(self, qkv: RowBuffer, spec: AttentionSpec) -> Activation:
        """Append the step's KV to the pool, and attend to it."""
        mixer = spec.attention
        gathered = self.plain(self._attention.attend(qkv, spec), mixer.num_heads * mixer.head_dim)
        if mixer.gate is not None:
            width = mixer.head_dim if mixer.gate.over == "head" else 1
            gathered.gates = Gates(mixer.gate.function, qkv, qkv.columns[-1], width)
        return gathered

    def latent_attention(self, queries: RowBuffer, latent: RowBuffer, spec: LatentSpec) -> Activation:
        """Append the step's latent KV to the pool, and attend to it with the matrices of heads."""
        mixer = spec.attention
        return self.plain(self._latent.attend(queries, latent, spec), mixer.num_heads * mixer.value_dim)

    def keep(self, qkv: RowBuffer, spec: AttentionSpec) -> None:
        """Append the step's KV to the pool."""
        self._attention.append(qkv, spec)

    def keep_latent(self, queries: RowBuffer, latent: RowBuffer, spec: LatentSpec) -> None:
        """Append the step's latent vectors and rotated keys to the pool."""
        self._latent.append(queries, latent, spec)

    def keep_hidden(self, x: RowBuffer, kv_layer: int) -> None:
        """Append the step's hidden states to the KV pool, as rows of the KV layer of an MTP head."""
        layout = self._layout.of_layer(kv_layer)
        self.program.call(
            ("keep_hidden", layout, x.stride),
            lambda: keep_hidden(layout, x.stride),
            x.memory,
            Input("slots"),
            Input("kv_pool"),
            self._layout.items_before(kv_layer),
            Size("num_pages"),
            x.num_rows,
        )

    def concat_previous(self, x: RowBuffer, width: int, kv_layer: int) -> Activation:
        """Concatenate `x` with the hidden state stored for the token before."""
        layout = self._layout.of_layer(kv_layer)
        both = RowBuffer.of_tokens(self.program, self.limits, "beside previous", 2 * width)
        self.program.call(
            ("concat_previous", layout, width, x.stride, both.stride),
            lambda: concat_previous(layout, width, x.stride, both.stride),
            x.memory,
            Input("page_table"),
            Input("row_of_token"),
            Input("kv_lengths"),
            Input("kv_pool"),
            self._layout.items_before(kv_layer),
            Size("num_pages"),
            Size("table_stride"),
            both.memory,
            x.num_rows,
        )
        return self.plain(both, 2 * width)

    def short_convolution(self, gates: RowBuffer, spec: ConvolutionSpec) -> Activation:
        """Return a gated convolution over the step's tokens and the state of those before them."""
        return self.plain(self._recurrent.convolve(gates, spec), spec.width)

    def gated_delta(self, joined: RowBuffer, spec: DeltaSpec) -> Activation:
        """Return the gated delta rule over the step's tokens and the state of those before them."""
        return self.plain(self._recurrent.delta_rule(joined, spec), spec.delta.values_width)

    def mamba2(self, joined: RowBuffer, spec: MambaSpec) -> Activation:
        """Return Mamba-2 over the step's tokens and the state of those before them."""
        given = self.plain(self._recurrent.mamba2(joined, spec), spec.mamba.values_width)
        if spec.norm is None:
            given.gates = Gates("silu", joined, joined.columns[-2])
        return given

    def activate(
        self, x: RowBuffer, function: Function, width: int, *, by: RowBuffer | None = None, column: int = 0
    ) -> Activation:
        """Return a function of rows; the matrix product that takes it computes the function."""
        gates = None if by is None else Gates("identity", by, column)
        return Activation(function, x, width, 0, 0.0, gates=gates)

    def experts(self, x: Activation, unnormed: RowBuffer, spec: ExpertsSpec) -> RowBuffer:
        """Return the weighted sum of the experts to which each row is routed."""
        return self._experts.experts(x, unnormed, spec)

    def add_linear(self, x: RowBuffer, y: Activation, layer: Linear, *, factor: float = 1.0) -> RowBuffer:
        """Return `x + factor * W y`, in place of x."""
        self._linear.multiply(y, (layer,), x, add=True, factor=factor, keeps_floats=self._adapts((layer,)))
        self._adapt(y, (layer,), x, factor)
        return x

    def add(self, x: RowBuffer, y: RowBuffer, *, factor: float = 1.0) -> RowBuffer:
        """Return `x + factor * y`, in place of x."""
        return self._add(x, y, AddNormSpec(min(x.stride, y.stride), x.stride, y.stride, 0.0, factor, False), 0)

    def add_gated(self, x: RowBuffer, y: Activation, layer: Linear, gate: Linear, of: Activation) -> RowBuffer:
        """Return `x + sigmoid(gate of) * W y`, in place of x: rows of y are multiplied by the gate before W."""
        assert not layer.has_bias, "a bias would have to be multiplied, too"
        gates = Gates("sigmoid", self.linear(of, gate), width=y.width)
        gated = replace(y, gates=gates, floats=None, codes={})
        return self.add_linear(x, gated, layer)

    def add_norm(self, x: RowBuffer, y: RowBuffer, norm: Norm, *, factor: float = 1.0, parts: int = 1) -> RowBuffer:
        """Return `x + factor * normalized y`, in place of x; parts of rows count as rows."""
        assert norm.kind == "rms", "refused by `implemented.py`"
        whole = x.stride == y.stride == norm.size * parts
        assert whole or parts == 1, "parts do not lie one behind the other; refused by `implemented.py`"
        strides = (norm.size, norm.size) if parts > 1 else (x.stride, y.stride)
        spec = AddNormSpec(norm.size, *strides, norm.eps, factor, has_gain=norm.has_gain)
        self._add(replace(x, num_rows=Size(x.num_rows.name, x.num_rows.times * parts)), y, spec, self._gain(norm))
        return x

    def add_vector(self, x: RowBuffer, y: Vector) -> RowBuffer:
        """Return `x` plus the same stored numbers in each row, in place of x."""
        return self._add_rows(x, y, AddRowsSpec(y.size, x.stride, has_indices=False), 0)

    def add_positions(self, x: RowBuffer, positions: Vector, width: int, *, first: int) -> RowBuffer:
        """Return `x` plus a stored row for each token's position, in place of x."""
        return self._add_rows(x, positions, AddRowsSpec(width, x.stride, first), Input("positions"))

    def add_token_types(self, x: RowBuffer, types: Vector, width: int, *, separator_id: int) -> RowBuffer:
        """Return `x` plus a stored row for each token's type, in place of x."""
        of_tokens = self.program.scratch("token types", self.limits.num_tokens * 4)
        self.program.call(
            ("token_types", separator_id),
            lambda: token_types(separator_id),
            Input("token_ids"),
            Input("positions"),
            of_tokens,
            x.num_rows,
        )
        return self._add_rows(x, types, AddRowsSpec(width, x.stride), of_tokens)

    def scale(self, x: RowBuffer, by: Vector) -> RowBuffer:
        """Return `x` times a stored number, in place of x."""
        number = self._vector(by)
        self.program.call(
            ("scale_rows", x.stride),
            lambda: scale_rows(x.stride, x.stride),
            x.memory,
            number,
            x.num_rows,
        )
        return x

    def logits(
        self, x: RowBuffer, norm: Norm, head: Linear, *, factor: float = 1.0, soft_cap: float | None = None
    ) -> RowBuffer:
        """Normalize the rows whose logits are requested, and multiply them with the output matrix.

        With integer weights, all logits come from activations in 8 bits. Then a row's largest logits are computed again
        from 16 bits.
        """
        normed = self.norm(self._wanted.picked(x), norm)
        out = self._wanted.outputs(head.num_outputs)
        self._linear.multiply(normed, (head,), out, most_outputs=self._most_logits)
        self._linear.refine(normed, head, out, self._most_logits or head.num_outputs)
        if factor != 1.0 or soft_cap is not None:
            self.program.call(
                ("bound_rows", out.stride, factor, soft_cap),
                lambda: bound_rows(out.stride, factor, soft_cap, self._target),
                out.memory,
                out.num_rows,
            )
        return out

    def hidden(self, x: RowBuffer, norm: Norm | None, *dense: Linear) -> RowBuffer:
        """Normalize the rows that are wanted, and multiply them, into the place where logits would be."""
        if not dense:
            picked = self._wanted.picked(x, Input("logits"))
            return picked if norm is None else self.normalize(picked, norm)
        rows = self._wanted.picked(x)
        entering = self.plain(rows, dense[0].num_inputs) if norm is None else self.norm(rows, norm)
        for index, layer in enumerate(dense):
            is_last = index == len(dense) - 1
            rows = (
                self._wanted.outputs(layer.num_outputs)
                if is_last
                else self._wanted.rows(("dense", index), layer.num_outputs)
            )
            self._linear.multiply(entering, (layer,), rows)
            entering = self.plain(rows, layer.num_outputs)
        return rows

    def score(self, x: RowBuffer, spec: ScoreSpec) -> RowBuffer:
        """Pool the texts of the wanted rows, and write one number of each into the place where logits would be."""
        normed = x if spec.last_norm is None else self.normalize(x, spec.last_norm)
        if spec.pooling == "mean":
            self.program.call(
                ("mean_rows", x.stride),
                lambda: mean_rows(x.stride),
                normed.memory,
                Input("row_of_token"),
                normed.num_rows,
            )
        pooled = self._wanted.picked(normed)
        dense = self._wanted.rows("score", spec.dense.num_outputs)
        self._linear.multiply(self.plain(pooled, spec.dense.num_inputs), (spec.dense,), dense)
        entering = self.activate(dense, spec.function, spec.dense.num_outputs)
        if spec.norm is not None:
            floats = replace(dense, memory=self._linear.floats(entering))
            entering = self.plain(self.normalize(floats, spec.norm), spec.norm.size)
        out = self._wanted.outputs(spec.out.num_outputs)
        self._linear.multiply(entering, (spec.out,), out)
        return out

    def _adapt(self, x: Activation, layers: Sequence[Linear], y: RowBuffer, factor: float = 1.0) -> None:
        """Add the adapters' part of the layers' outputs to `y`, if the artifact has room for adapters."""
        if self._lora is not None and self._adapts(layers):
            self._lora.add(self._linear.floats(x), x.float_stride, layers, y, factor)

    def _adapts(self, layers: Sequence[Linear]) -> bool:
        """Return whether adapters may change these layers."""
        return self._lora is not None and self._lora.changes(layers)

    def _add(self, x: RowBuffer, y: RowBuffer, spec: AddNormSpec, gain: Argument) -> RowBuffer:
        """Append `add_norm`. Returns `x`."""
        self.program.call(spec, lambda: add_norm(spec, self._target), y.memory, gain, x.memory, x.num_rows)
        return x

    def _add_rows(self, x: RowBuffer, table: Vector, spec: AddRowsSpec, indices: Argument) -> RowBuffer:
        """Append `add_rows`. Returns `x`."""
        self.program.call(spec, lambda: add_rows(spec), x.memory, self._vector(table), indices, x.num_rows)
        return x

    def _vector(self, vector: Vector) -> WeightTensor:
        """Return a vector of float32."""
        return WeightTensor(self.plan.vector(((vector.name, vector.size),)).name)

    def _gain(self, norm: Norm) -> Argument:
        """Return the gain of a norm, followed by its bias if it has one."""
        parts = ((norm.name, norm.size), (norm.bias_name, norm.size))[: 2 if norm.has_bias else 1]
        return WeightTensor(self.plan.vector(parts).name) if norm.has_gain else 0
