"""Append the kernels of attention, layer by layer: prepare heads, store KV, and attend.

In latent attention, queries are multiplied with latent vectors, and so are the results. The matrices of heads are
multiplied as those of experts are, with every head assigned to each token. Knows pages, queries and the pool; not
weights of layers, nor how a model joins them.
"""

from __future__ import annotations

from dataclasses import dataclass

from radixlm.runtime.artifact.manifest import KVLayout
from radixlm.runtime.artifact.model_config import AnyAttention, Attention, Rope

from ..codegen.targets import Target
from ..kernels.attention import attention, slots_floats
from ..kernels.attention_mass import attention_mass, keep_queries
from ..kernels.attention_shape import AttentionShape, ScoreSpec
from ..kernels.attention_units import AttentionLimits
from ..kernels.experts.entries import ExpertLimits, ExpertRows, find_slabs
from ..kernels.latent import LatentShape, every_head, latent_append
from ..kernels.rope import HeadNorm, HeadSpec, rope_append
from ..weights.plan import WeightPlan
from .layers import HeadLinear, Norm, Vector
from .linear import LinearOps
from .operations import AttentionSpec, LatentSpec
from .program import Activation, Argument, Input, Limits, Program, RowBuffer, Scratch, Size, WeightTensor
from .step_buffers import StepBuffers


class AttentionOps:
    """The attention operations of `program`. `ropes` are all that the model has; `plan` gets the vectors they read."""

    def __init__(
        self,
        program: Program,
        plan: WeightPlan,
        ropes: tuple[Rope, ...],
        layout: KVLayout,
        limits: Limits,
        target: Target,
        *,
        is_scoring: bool,
    ) -> None:
        self._program, self._plan, self._layout, self._limits, self._target = program, plan, layout, limits, target
        self._attention_limits = AttentionLimits(limits.num_tokens, limits.context_length)
        self.step = StepBuffers(program, plan, ropes, self._attention_limits)
        self._is_scoring = is_scoring

    def attend(self, qkv: RowBuffer, spec: AttentionSpec) -> RowBuffer:
        """Rotate queries and keys, append KV to the pool, and attend.

        `forward_scored` also adds up the attention weight of each KV row, and keeps the queries.
        """
        layer, mixer = spec.kv_layer, spec.attention
        shape = AttentionShape.of(self._layout.of_layer(layer), mixer.num_heads, self._target, _scores(mixer))
        return self.gather(self.append(qkv, spec), shape, mixer, layer, spec.sinks)

    def gather(
        self, q: RowBuffer, shape: AttentionShape, mixer: AnyAttention, layer: int, sinks: Vector | None = None
    ) -> RowBuffer:
        """Attend to the rows that are in the pool; `layer` counts the layers that have some."""
        limits = self._attention_limits
        y = RowBuffer.of_tokens(self._program, self._limits, "attention", mixer.num_heads * shape.layout.value_dim)
        num_normalizers = self._limits.num_tokens * mixer.num_heads * 2
        normalizers = self._program.scratch(("normalizers", mixer.num_heads), num_normalizers * 4)
        num_slots = slots_floats(shape, limits)
        before: tuple[Argument, ...] = (
            q.memory,
            Input("kv_pool"),
            Input("page_table"),
            Input("row_of_token"),
            self.step.ends(mixer),
            *self.step.starts(mixer),
        )
        sizes: tuple[Argument, ...] = (Size("num_pages"), Size("table_stride"))
        self._program.call(
            ("attention", shape, y.stride),
            lambda: attention(shape, y.stride, limits),
            *before,
            self.step.units(mixer, shape.tokens),
            self._program.scratch(("slots", num_slots), num_slots * 4),
            *(() if sinks is None else self._vector(sinks.name, sinks.size)),
            y.memory,
            normalizers,
            self._layout.items_before(layer),
            *sizes,
        )
        if self._is_scoring:
            self._score(shape, before, normalizers, q, layer, mixer.num_heads * shape.layout.key_dim)
        return y

    def _score(
        self,
        shape: AttentionShape,
        before: tuple[Argument, ...],
        normalizers: Scratch,
        q: RowBuffer,
        layer: int,
        width: int,
    ) -> None:
        """Append the kernels that sum attention weights and store the queries, for `forward_scored` only."""
        self._program.call(
            ("attention_mass", shape),
            lambda: attention_mass(shape),
            *before,
            normalizers,
            Input("mass"),
            Input("counts"),
            layer,
            *(Size(name) for name in ("num_tokens", "num_pages", "table_stride", "stride")),
            is_scoring=True,
        )
        self._program.call(
            ("keep_queries", width),
            lambda: keep_queries(width, self._limits.num_tokens),
            q.memory,
            Input("queries"),
            layer,
            q.num_rows,
            is_scoring=True,
        )

    def append(self, qkv: RowBuffer, spec: AttentionSpec) -> RowBuffer:
        """Prepare heads, and append KV to the pool if the layer has its own. Returns the queries."""
        mixer, program = spec.attention, self._program
        num_heads, writes_kv = mixer.num_heads, mixer.shared_kv is None
        q_column, k_column, v_column = _columns(mixer, qkv)
        layout = self._layout.of_layer(spec.kv_layer)
        heads = _heads(spec)
        q = RowBuffer.of_tokens(program, self._limits, "q", num_heads * mixer.head_dim)
        pool = Input("kv_pool"), self._layout.items_before(spec.kv_layer), Size("num_pages")
        program.call(
            ("rope_append", layout, num_heads, q_column, k_column, v_column, qkv.stride, heads),
            lambda: rope_append(layout, num_heads, q_column, k_column, v_column, qkv.stride, heads),
            qkv.memory,
            *(() if mixer.rope is None else (self.step.angles(mixer.rope),)),
            *self._gain(spec.q_norm),
            *self._gain(spec.k_norm),
            *(() if mixer.temperature is None else (self.step.temperatures(mixer.temperature),)),
            *((Input("slots"),) if writes_kv else ()),
            q.memory,
            *(pool if writes_kv else ()),
            qkv.num_rows,
        )
        return q

    def _gain(self, norm: Norm | None) -> tuple[Argument, ...]:
        """Return the gain of a norm as arguments; empty if it has none."""
        return () if norm is None or not norm.has_gain else self._vector(norm.name, norm.size)

    def _vector(self, name: str, size: int) -> tuple[Argument, ...]:
        """Return a vector as arguments."""
        return (WeightTensor(self._plan.vector(((name, size),)).name),)


def _scores(mixer: Attention) -> ScoreSpec:
    """Return the score spec of an attention configuration."""
    has_starts = mixer.window is not None or mixer.chunk is not None or mixer.skips_first
    scale = None if mixer.scale == mixer.head_dim**-0.5 else mixer.scale
    return ScoreSpec(scale, mixer.soft_cap, mixer.sinks, has_starts)


def _heads(spec: AttentionSpec) -> HeadSpec:
    """Return the changes of heads before attention."""
    mixer, norm, value_norm = spec.attention, spec.attention.qk_norm, spec.value_norm
    qk_norm = None
    if norm is not None:
        assert spec.q_norm is not None
        qk_norm = HeadNorm(spec.q_norm.eps, norm.over, norm.has_gain, norm.after_rope, norm.kind)
    return HeadSpec(
        rotary_dim=0 if mixer.rope is None else mixer.rope.rotary_dim,
        qk_norm=qk_norm,
        value_eps=None if value_norm is None else value_norm.eps,
        has_temperatures=mixer.temperature is not None,
        writes_kv=mixer.shared_kv is None,
    )


def _columns(mixer: Attention, qkv: RowBuffer) -> tuple[int, int, int]:
    """Return the first columns of queries, keys and values; keys and values are 0 if the layer has none of its own."""
    if mixer.shared_kv is not None:
        return qkv.columns[0], 0, 0
    q, k = qkv.columns[:2]
    return q, k, k if mixer.keys_are_values else qkv.columns[2]


@dataclass(frozen=True)
class LatentOps:
    """The latent attention operations of `program`; `plan` gets the weights that they read."""

    program: Program
    plan: WeightPlan
    layout: KVLayout
    limits: Limits
    target: Target
    linear: LinearOps
    attention: AttentionOps

    def attend(self, queries: RowBuffer, latent: RowBuffer, spec: LatentSpec) -> RowBuffer:
        """Append latent KV, and attend. Returns the output of all heads, side by side."""
        mixer, layer = spec.attention, spec.kv_layer
        heads, size = mixer.num_heads, mixer.head_dim
        assert queries.stride == heads * mixer.query_size, "refused by `implemented.py`"
        q = self._queries(spec)
        self._multiply(spec.keys, self._by_head(queries, mixer.query_size, heads), self._by_head(q, size, heads))
        self.append(queries, latent, spec)
        shape = AttentionShape.of(
            self.layout.of_layer(layer), heads, self.target, ScoreSpec(mixer.scale, has_starts=mixer.skips_first)
        )
        y = self.attention.gather(q, shape, mixer, layer)
        out = RowBuffer.of_tokens(self.program, self.limits, "latent outputs", heads * mixer.value_dim)
        gathered = self._by_head(y, mixer.latent_dim, heads)
        self._multiply(spec.values, gathered, self._by_head(out, mixer.value_dim, heads))
        return out

    def append(self, queries: RowBuffer, latent: RowBuffer, spec: LatentSpec) -> None:
        """Append latent KV to the pool, and rotate the tokens' queries."""
        mixer, norm = spec.attention, spec.latent_norm
        layout = self.layout.of_layer(spec.kv_layer)
        temperature, step = mixer.temperature, self.attention.step
        shape = LatentShape(
            mixer.num_heads,
            mixer.plain_dim,
            mixer.latent_dim,
            mixer.rope.rotary_dim,
            queries.stride,
            latent.stride,
            latent.columns[-1],
            norm.eps,
            has_temperatures=temperature is not None,
        )
        self.program.call(
            ("latent_append", layout, shape),
            lambda: latent_append(layout, shape),
            queries.memory,
            latent.memory,
            step.angles(mixer.rope),
            WeightTensor(self.plan.vector(((norm.name, norm.size),)).name),
            *(() if temperature is None else (step.temperatures(temperature),)),
            Input("slots"),
            self._queries(spec).memory,
            Input("kv_pool"),
            self.layout.items_before(spec.kv_layer),
            Size("num_pages"),
            latent.num_rows,
        )

    def _queries(self, spec: LatentSpec) -> RowBuffer:
        """Return memory for queries of the pool's row size."""
        width = spec.attention.num_heads * spec.attention.head_dim
        return RowBuffer.of_tokens(self.program, self.limits, "latent queries", width)

    def _multiply(self, layer: HeadLinear, x: RowBuffer, y: RowBuffer) -> None:
        """Append the product of each head's matrix with its rows of `x`."""
        entering = Activation("identity", x, layer.num_inputs, 0, 0.0, role=("heads", x.stride))
        limits = ExpertLimits(layer.num_heads, layer.num_heads, self.limits.num_tokens)
        lists, rows = self._lists(limits), ExpertRows(limits, "entries", "entries")
        self.linear.multiply_heads(entering, layer, y, lists, rows)

    def _lists(self, limits: ExpertLimits) -> Scratch:
        """Return the rows that each head multiplies, found once in a step."""
        step, size = self.attention.step, limits.num_entries
        heads = step.once(
            ("every head", limits), size, ("every_head", limits.top_k), lambda: every_head(limits.top_k), ()
        )
        return step.once(
            ("lists of heads", limits), limits.num_ints, ("find_slabs", limits), lambda: find_slabs(limits), (heads,)
        )

    def _by_head(self, x: RowBuffer, size: int, num_heads: int) -> RowBuffer:
        """Return the same numbers as a row for each head of a token."""
        return RowBuffer(x.memory, size, (0,), Size("num_tokens", num_heads), x.max_rows * num_heads)
