"""Append the kernels of recurrent layers, which read and write the states of the step's sequences.

Knows rows and slots; not weights of matrices, nor how a model joins its layers.
"""

from __future__ import annotations

from radixlm.runtime.artifact.model_config import STATE_ITEM_BYTES

from ..codegen.targets import Target
from ..kernels.recurrent.gated_delta import DeltaShape, GatedNorm, delta_inputs, gated_delta, gated_norm
from ..kernels.recurrent.short_convolution import ConvolutionShape, short_convolution
from ..weights.layout import ROW_BLOCK, round_up
from ..weights.plan import WeightPlan
from .layers import Vector
from .operations import ConvolutionSpec, DeltaSpec
from .program import Argument, Input, Program, Stored
from .rows import Limits, Rows


class RecurrentOps:
    """Appends to `program`, and to `plan` the vectors that recurrent layers read; a state has `state_bytes`."""

    def __init__(self, program: Program, plan: WeightPlan, state_bytes: int, limits: Limits, target: Target) -> None:
        self._program, self._plan, self._limits, self._target = program, plan, limits, target
        self._state_items = state_bytes // STATE_ITEM_BYTES

    def convolve(self, gates: Rows, spec: ConvolutionSpec) -> Rows:
        """`c * convolution(b * x)` of rows that hold b, c and x."""
        size = spec.convolution.kernel_size
        return self._convolve(gates, spec.width, size, spec.first, spec.taps, spec.bias, is_gated=True)

    def delta_rule(self, joined: Rows, spec: DeltaSpec) -> Rows:
        """What value heads give, normalized and gated."""
        delta, program = spec.delta, self._program
        x = self._convolve(joined, delta.convolved_width, delta.kernel_size, spec.first, spec.taps, is_gated=False)
        scalars = Rows.of_tokens(program, self._limits, "delta_scalars", 2 * round_up(delta.num_value_heads, ROW_BLOCK))
        y = Rows.of_tokens(program, self._limits, "delta", delta.values_width)
        _, gates, b, a = joined.columns
        shape = DeltaShape(
            delta.num_key_heads,
            delta.num_value_heads,
            delta.key_dim,
            delta.value_dim,
            delta.tiled,
            x.stride,
            scalars.stride,
            y.stride,
            self._state_items,
        )
        program.call(
            ("delta_inputs", shape, joined.stride, b, a),
            lambda: delta_inputs(shape, joined.stride, b, a, self._target),
            joined.memory,
            self._vector(spec.rate),
            self._vector(spec.dt_bias),
            x.memory,
            scalars.memory,
            x.num_rows,
        )
        program.call(
            ("gated_delta", shape),
            lambda: gated_delta(shape, self._target),
            x.memory,
            scalars.memory,
            *self._states(),
            y.memory,
            spec.first + delta.convolution_size,
            x.num_rows,
        )
        norm = GatedNorm(delta.num_value_heads, delta.value_dim, y.stride, joined.stride, gates, spec.norm.eps)
        gain = Vector(spec.norm.name, spec.norm.size)
        program.call(
            norm, lambda: gated_norm(norm, self._target), y.memory, joined.memory, self._vector(gain), y.num_rows
        )
        return y

    def _convolve(
        self, x: Rows, width: int, size: int, first: int, taps: Vector, bias: Vector | None = None, *, is_gated: bool
    ) -> Rows:
        y = Rows.of_tokens(self._program, self._limits, "convolved", width)
        shape = ConvolutionShape(
            width, size, x.stride, y.stride, self._state_items, has_bias=bias is not None, is_gated=is_gated
        )
        row_of_token, state_in, state_out, pool = self._states()
        self._program.call(
            ("short_convolution", shape),
            lambda: short_convolution(shape, self._target),
            x.memory,
            row_of_token,
            state_in,
            state_out,
            self._vector(taps),
            0 if bias is None else self._vector(bias),
            pool,
            y.memory,
            first,
            x.num_rows,
        )
        return y

    def _states(self) -> tuple[Argument, ...]:
        return tuple(map(Input, ("row_of_token", "state_in", "state_out", "state_pool")))

    def _vector(self, vector: Vector) -> Argument:
        return Stored(self._plan.vector(((vector.name, vector.size),)).name)
