"""Append the kernels of attention: once those whose results all layers share, then the others layer by layer.

Knows positions, pages and queries; not weights of layers, nor how a model joins them.
"""

from __future__ import annotations

from radixlm.runtime.artifact.manifest import KVLayout, ModelConfig

from ..codegen.targets import Target
from ..kernels.attention import attention, slots_floats
from ..kernels.attention_mass import attention_mass, keep_queries
from ..kernels.attention_rows import AttentionShape
from ..kernels.attention_units import AttentionLimits, find_units, units_ints
from ..kernels.rope import rope_angles, rope_append
from .program import Argument, Input, Place, Program, Size, Stored
from .rows import Limits, Rows


class AttentionOps:
    """Appends to `program`: `begin` once, then `attend` for each decoder layer."""

    def __init__(self, program: Program, config: ModelConfig, layout: KVLayout, limits: Limits, target: Target) -> None:
        self._program, self._config, self._layout, self._limits = program, config, layout, limits
        self._shape = AttentionShape.of(layout, config.num_attention_heads, target)
        self._attention_limits = AttentionLimits(limits.num_tokens, limits.context_length)
        self._layer = 0

    def begin(self, frequencies: Stored) -> None:
        """Compute what all layers share: the angles of the step's positions, and the units of work."""
        self._program.call(
            "rope_angles",
            lambda: rope_angles(self._config.head_dim),
            Input("positions"),
            frequencies,
            self._angles(),
            Size("num_tokens"),
        )
        self._program.call(
            "find_units",
            lambda: find_units(self._attention_limits, self._shape.tokens),
            Input("row_of_token"),
            Input("kv_lengths"),
            self._units(),
            Size("num_tokens"),
        )

    def attend(self, qkv: Rows) -> Rows:
        """Rotate queries and keys, append keys and values to the pool, and attend, for the next layer at each call.

        `forward_scored` also adds up the weight that each KV row gets, and keeps the queries.
        """
        layer, limits = self._layer, self._attention_limits
        self._layer += 1
        q = self._append(qkv, layer)
        width = self._config.num_attention_heads * self._config.head_dim
        y = Rows.of_tokens(self._program, self._limits, "attention", width)
        num_normalizers = self._limits.num_tokens * self._config.num_attention_heads * 2
        normalizers = self._program.place("normalizers", num_normalizers * 4)
        before: tuple[Argument, ...] = (
            q.memory,
            Input("kv_pool"),
            Input("page_table"),
            Input("row_of_token"),
            Input("kv_lengths"),
            self._units(),
        )
        sizes: tuple[Argument, ...] = (layer, Size("num_pages"), Size("table_stride"))
        self._program.call(
            "attention",
            lambda: attention(self._shape, y.stride, limits),
            *before,
            self._program.place("slots", slots_floats(self._shape, limits) * 4),
            y.memory,
            normalizers,
            *sizes,
        )
        self._program.call(
            "attention_mass",
            lambda: attention_mass(self._shape, limits),
            *before,
            normalizers,
            Input("mass"),
            *sizes,
            is_scoring=True,
        )
        self._program.call(
            "keep_queries",
            lambda: keep_queries(width, self._limits.num_tokens),
            q.memory,
            Input("queries"),
            layer,
            qkv.num_rows,
            is_scoring=True,
        )
        return y

    def _append(self, qkv: Rows, layer: int) -> Rows:
        """Rotate, and append keys and values to the pool; returns the rotated queries."""
        num_heads, (q_column, k_column, v_column) = self._config.num_attention_heads, qkv.columns
        q = Rows.of_tokens(self._program, self._limits, "q", num_heads * self._config.head_dim)
        self._program.call(
            ("rope_append", qkv.columns, qkv.stride),
            lambda: rope_append(self._layout, num_heads, q_column, k_column, v_column, qkv.stride),
            qkv.memory,
            self._angles(),
            Input("slots"),
            q.memory,
            Input("kv_pool"),
            layer,
            Size("num_pages"),
            qkv.num_rows,
        )
        return q

    def _angles(self) -> Place:
        return self._program.place("angles", self._limits.num_tokens * self._config.head_dim * 4)

    def _units(self) -> Place:
        return self._program.place("units", units_ints(self._attention_limits) * 4)
