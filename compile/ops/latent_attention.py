"""Append the kernels of latent attention: queries meet latent vectors, and what is gathered of these leaves them.

The matrices of heads are multiplied as those of experts are, of which each token has all. Knows rows and matrices; not
which layers have them.
"""

from __future__ import annotations

from dataclasses import dataclass

from radixlm.runtime.artifact.manifest import KVLayout

from ..codegen.targets import Target
from ..kernels.attention_shape import AttentionShape, ScoreSpec
from ..kernels.experts.entries import ExpertLimits, ExpertRows, find_slabs
from ..kernels.latent import LatentShape, every_head, latent_append
from ..weights.plan import WeightPlan
from .attention import AttentionOps
from .layers import HeadLinear
from .linear import LinearOps
from .operations import LatentSpec
from .program import Input, Place, Program, Size, Stored
from .rows import Activation, Limits, Rows


@dataclass(frozen=True)
class LatentOps:
    """Appends to `program`, and to `plan` what it reads of weights."""

    program: Program
    plan: WeightPlan
    layout: KVLayout
    limits: Limits
    target: Target
    linear: LinearOps
    attention: AttentionOps

    def attend(self, queries: Rows, latent: Rows, spec: LatentSpec) -> Rows:
        """What heads make of what they gather, side by side."""
        mixer, layer = spec.attention, spec.kv_layer
        heads, size = mixer.num_heads, mixer.head_dim
        assert queries.stride == heads * mixer.query_size, "refused by `implemented.py`"
        q = Rows.of_tokens(self.program, self.limits, "latent queries", heads * size)
        self._multiply(spec.keys, self._by_head(queries, mixer.query_size, heads), self._by_head(q, size, heads))
        self._append(queries, latent, q, spec)
        shape = AttentionShape.of(self.layout.of_layer(layer), heads, self.target, ScoreSpec(mixer.scale))
        y = self.attention.gather(q, shape, mixer, layer)
        out = Rows.of_tokens(self.program, self.limits, "latent outputs", heads * mixer.value_dim)
        gathered = self._by_head(y, mixer.latent_dim, heads)
        self._multiply(spec.values, gathered, self._by_head(out, mixer.value_dim, heads))
        return out

    def _append(self, queries: Rows, latent: Rows, q: Rows, spec: LatentSpec) -> None:
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
            Stored(self.plan.vector(((norm.name, norm.size),)).name),
            *(() if temperature is None else (step.temperatures(temperature),)),
            Input("slots"),
            q.memory,
            Input("kv_pool"),
            self.layout.items_before(spec.kv_layer),
            Size("num_pages"),
            latent.num_rows,
        )

    def _multiply(self, layer: HeadLinear, x: Rows, y: Rows) -> None:
        entering = Activation("identity", x, layer.num_inputs, 0, 0.0, role=("heads", x.stride))
        limits = ExpertLimits(layer.num_heads, layer.num_heads, self.limits.num_tokens)
        lists, rows = self._lists(limits), ExpertRows(limits, are_tokens=False)
        self.linear.multiply_heads(entering, layer, y, lists, rows)

    def _lists(self, limits: ExpertLimits) -> Place:
        """Which rows each head multiplies, found once in a step."""
        step, size = self.attention.step, limits.num_entries
        heads = step.once(
            ("every head", limits), size, ("every_head", limits.top_k), lambda: every_head(limits.top_k), ()
        )
        return step.once(
            ("lists of heads", limits), limits.num_ints, ("find_slabs", limits), lambda: find_slabs(limits), (heads,)
        )

    def _by_head(self, x: Rows, size: int, num_heads: int) -> Rows:
        """The same numbers, a row for each head of a token."""
        return Rows(x.memory, size, (0,), Size("num_tokens", num_heads), x.max_rows * num_heads)
