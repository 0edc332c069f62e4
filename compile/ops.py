"""The operations that a model file is written in: each appends kernel calls to a program.

Chooses kernels by how weights are stored and quantizes activations where the next matrix wants it; a model file knows
nothing of either.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from radixlm.runtime.manifest import KVLayout, ModelConfig

from .kernels.activation import ActivationSpec, Function, activation, gather_rows
from .kernels.attention import attention, slots_floats, units_ints
from .kernels.attention_mass import attention_mass, keep_queries
from .kernels.attention_shape import AttentionShape
from .kernels.attention_units import AttentionLimits, find_units
from .kernels.embedding import embedding
from .kernels.float_linear import float_linear
from .kernels.integer_linear import integer_linear
from .kernels.layout import ROW_BLOCK, LinearSpec, round_up
from .kernels.quantized_rows import quantized_bytes
from .kernels.rope import rope_angles, rope_append
from .layers import Embedding, Linear, RMSNorm
from .program import Argument, Input, Place, Program, Size, Stored
from .quantization import WeightKind
from .rope_frequencies import ROPE_FREQUENCIES
from .targets import Target
from .weight_plan import WeightPlan


@dataclass(frozen=True)
class Limits:
    """The most that one forward takes."""

    num_tokens: int
    num_logits: int
    context_length: int


@dataclass(frozen=True)
class Rows:
    """float32 `[rows, stride]` in the workspace (or the logits); `columns` are where joined outputs begin."""

    memory: Argument
    stride: int
    columns: tuple[int, ...]
    num_rows: Size
    max_rows: int


@dataclass
class Activation:
    """A function of rows that is computed when a linear needs it, in the form that it needs: floats or codes."""

    function: Function
    rows: Rows
    width: int
    gain: Argument
    eps: float
    floats: Place | None = None
    codes: dict[bool, tuple[Place, Place, Place]] = field(default_factory=dict)  # by whether they are wide


class Ops:
    """Appends the kernels of one model to `program`, and its weights to `plan`."""

    def __init__(self, config: ModelConfig, layout: KVLayout, limits: Limits, target: Target, plan: WeightPlan) -> None:
        self.config, self.layout, self.limits, self.target, self.plan = config, layout, limits, target, plan
        self.program = Program()
        self.rounded_inputs: set[str] = set()  # matrices whose inputs are rounded to 8 bits
        self._layer = 0

    # What a model file calls.

    def embed(self, layer: Embedding) -> Rows:
        """Rows of the embedding for the step's tokens; also what is the same in each layer's attention."""
        config = self.config
        self._rope_angles()
        self._find_units()
        matrix = self.plan.matrix(((layer.name, layer.num_rows),), config.hidden_size)
        rows = self._token_rows("hidden", config.hidden_size, (0,))
        self.program.call(
            ("embedding", matrix.kind, config.hidden_size),
            lambda: embedding(matrix.kind, config.hidden_size, rows.stride),
            Input("token_ids"),
            *self._arrays(matrix.name, matrix.kind),
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
        rows = self._token_rows(("linear", role), width, tuple(columns))
        self._multiply(x, layers, rows)
        return rows

    def add_linear(self, x: Rows, y: Activation, layer: Linear) -> Rows:
        """`x + W y`, in place of x."""
        self._multiply(y, (layer,), x, add=True)
        return x

    def attention(self, qkv: Rows) -> Activation:
        """Rotate queries and keys, append keys and values to the pool, attend; one call for each decoder layer.

        When `forward_scored` is run, how much weight each KV row got is added up, too, and the queries are kept.
        """
        config, layout, layer = self.config, self.layout, self._layer
        self._layer += 1
        width = config.num_attention_heads * config.head_dim
        q_column, k_column, v_column = qkv.columns
        q = self._token_rows("q", width, (0,))
        self.program.call(
            ("rope_append", qkv.columns, qkv.stride),
            lambda: rope_append(layout, config.num_attention_heads, q_column, k_column, v_column, qkv.stride),
            qkv.memory,
            self._angles(),
            Input("slots"),
            q.memory,
            Input("kv_pool"),
            layer,
            Size("num_pages"),
            qkv.num_rows,
        )
        shape, limits = self._attention_shape(), self._attention_limits()
        y = self._token_rows("attention", width, (0,))
        normalizers = self.program.place("normalizers", self.limits.num_tokens * config.num_attention_heads * 2 * 4)
        before: tuple[Argument, ...] = (
            q.memory,
            Input("kv_pool"),
            Input("page_table"),
            Input("row_of_token"),
            Input("kv_lengths"),
            self._units(),
        )
        sizes: tuple[Argument, ...] = (layer, Size("num_pages"), Size("table_stride"))
        self.program.call(
            "attention",
            lambda: attention(shape, y.stride, limits),
            *before,
            self.program.place("slots", slots_floats(shape, limits) * 4),
            y.memory,
            normalizers,
            *sizes,
        )
        self.program.call(
            "attention_mass",
            lambda: attention_mass(shape, limits),
            *before,
            normalizers,
            Input("mass"),
            *sizes,
            is_scoring=True,
        )
        self.program.call(
            "keep_queries",
            lambda: keep_queries(width, self.limits.num_tokens),
            q.memory,
            Input("queries"),
            layer,
            qkv.num_rows,
            is_scoring=True,
        )
        return Activation("identity", y, width, 0, 0.0)

    def silu_mul(self, gate_up: Rows) -> Activation:
        """`silu(gate) * up` (SwiGLU, Shazeer, 2020)."""
        return Activation("silu_mul", gate_up, self.config.intermediate_size, 0, 0.0)

    def logits(self, x: Rows, norm: RMSNorm, head: Linear) -> None:
        """Normalize the rows whose logits are wanted, and multiply them with the output matrix."""
        num_rows = Size("num_logits")
        picked = Rows(
            self.program.place("picked", self.limits.num_logits * x.stride * 4),
            x.stride,
            (0,),
            num_rows,
            self.limits.num_logits,
        )
        self.program.call(
            ("gather_rows", x.stride),
            lambda: gather_rows(x.stride),
            x.memory,
            Input("logit_rows"),
            picked.memory,
            num_rows,
        )
        stride = round_up(head.num_outputs, ROW_BLOCK)
        out = Rows(Input("logits"), stride, (0,), num_rows, self.limits.num_logits)
        self._multiply(self.rms_norm(picked, norm), (head,), out)

    # How it is done.

    def _token_rows(self, role: Hashable, width: int, columns: tuple[int, ...]) -> Rows:
        stride, most = round_up(width, ROW_BLOCK), self.limits.num_tokens
        memory = self.program.place(role, most * stride * 4)
        return Rows(memory, stride, columns, Size("num_tokens"), most)

    def _angles(self) -> Place:
        return self.program.place("angles", self.limits.num_tokens * self.config.head_dim * 4)

    def _rope_angles(self) -> None:
        frequencies = self.plan.vector(((ROPE_FREQUENCIES, self.config.head_dim // 2),))
        self.program.call(
            "rope_angles",
            lambda: rope_angles(self.config.head_dim),
            Input("positions"),
            Stored(frequencies.name),
            self._angles(),
            Size("num_tokens"),
        )

    def _attention_shape(self) -> AttentionShape:
        return AttentionShape.of(self.layout, self.config.num_attention_heads, self.target)

    def _attention_limits(self) -> AttentionLimits:
        return AttentionLimits(self.limits.num_tokens, self.limits.context_length)

    def _units(self) -> Place:
        return self.program.place("units", units_ints(self._attention_limits()) * 4)

    def _find_units(self) -> None:
        self.program.call(
            "find_units",
            lambda: find_units(self._attention_limits(), self._attention_shape().tokens),
            Input("row_of_token"),
            Input("kv_lengths"),
            self._units(),
            Size("num_tokens"),
        )

    def _arrays(self, name: str, kind: WeightKind) -> tuple[Argument, Argument, Argument]:
        return (
            Stored(f"{name}.codes"),
            Stored(f"{name}.scales") if kind.is_quantized else 0,
            Stored(f"{name}.minima") if kind.has_minimum else 0,
        )

    def _multiply(self, x: Activation, layers: Sequence[Linear], y: Rows, *, add: bool = False) -> None:
        column = 0
        for run in _runs_of_one_kind(layers, self.plan):
            matrix = self.plan.matrix(tuple((layer.name, layer.num_outputs) for layer in run), x.width)
            bias: Argument = 0
            if run[0].has_bias:
                parts = tuple((layer.bias_name, layer.num_outputs) for layer in run)
                bias = Stored(self.plan.vector(parts).name)
            spec = LinearSpec(
                matrix.kind,
                matrix.num_outputs,
                matrix.padded_inputs,
                y.stride,
                column,
                run[0].has_bias,
                add,
                run[0].sensitive and matrix.kind.is_quantized,
            )
            codes, scales, minima = self._arrays(matrix.name, matrix.kind)
            if matrix.kind.is_quantized:
                if not spec.wide:
                    self.rounded_inputs.update(layer.name for layer in run)
                self.program.call(
                    spec,
                    lambda spec=spec: integer_linear(spec, self.target),  # type: ignore[misc]
                    codes,
                    scales,
                    minima,
                    bias,
                    *self._quantized(x, spec.wide),
                    y.memory,
                    y.num_rows,
                )
            else:
                x_stride = round_up(x.width, ROW_BLOCK)
                self.program.call(
                    (spec, x_stride),
                    lambda spec=spec, x_stride=x_stride: float_linear(spec, self.target, x_stride),  # type: ignore[misc]
                    codes,
                    bias,
                    self._floats(x),
                    y.memory,
                    y.num_rows,
                )
            column += matrix.num_outputs

    def _quantized(self, x: Activation, wide: bool) -> tuple[Place, Place, Place]:
        if wide not in x.codes:
            most = x.rows.max_rows
            codes, scales, sums = quantized_bytes(most, x.width, wide)
            x.codes[wide] = (
                self.program.place(("codes", x.width, most, wide), codes),
                self.program.place(("scales", x.width, most, wide), scales),
                self.program.place(("sums", x.width, most, wide), sums),
            )
            self._activate(x, None, x.codes[wide], wide)
        return x.codes[wide]

    def _floats(self, x: Activation) -> Argument:
        if x.function == "identity":
            return x.rows.memory
        if x.floats is None:
            stride = round_up(x.width, ROW_BLOCK)
            x.floats = self.program.place(("floats", x.width, x.rows.max_rows), x.rows.max_rows * stride * 4)
            self._activate(x, x.floats, None, False)
        return x.floats

    def _activate(
        self, x: Activation, floats: Place | None, codes: tuple[Place, Place, Place] | None, wide: bool
    ) -> None:
        spec = ActivationSpec(
            x.function,
            x.width,
            x.rows.stride,
            quantize=codes is not None,
            keep_float=floats is not None,
            y_stride=round_up(x.width, ROW_BLOCK),
            up_column=x.rows.columns[-1],
            eps=x.eps,
            wide=wide,
        )
        self.program.call(
            spec,
            lambda: activation(spec, self.target),
            x.rows.memory,
            x.gain,
            0 if floats is None else floats,
            *(codes or (0, 0, 0)),
            x.rows.num_rows,
        )


def _runs_of_one_kind(layers: Sequence[Linear], plan: WeightPlan) -> list[list[Linear]]:
    """Neighbours that are stored alike, and so run as one matrix."""
    runs: list[list[Linear]] = []
    for layer in layers:
        if runs and plan.kinds[runs[-1][0].name] == plan.kinds[layer.name] and _alike(runs[-1][0], layer):
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return runs


def _alike(a: Linear, b: Linear) -> bool:
    return a.has_bias == b.has_bias and a.sensitive == b.sensitive
