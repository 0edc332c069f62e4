"""Append the kernels of recurrent layers, which read and write the states of the step's sequences.

Knows rows and slots; not weights of matrices, nor how a model joins its layers.
"""

from __future__ import annotations

from radixlm.runtime.artifact.model_config import STATE_ITEM_BYTES

from ..codegen.targets import Target
from ..kernels.recurrent.matrix_state import (
    GatedNorm,
    HeadScalars,
    MatrixShape,
    UnitHeads,
    gated_norm,
    head_scalars,
    matrix_state,
    unit_heads,
)
from ..kernels.recurrent.short_convolution import ConvolutionShape, short_convolution
from ..weights.layout import ROW_BLOCK, round_up
from ..weights.plan import WeightPlan
from .layers import Norm, Vector
from .operations import ConvolutionSpec, DeltaSpec, MambaSpec
from .program import Argument, Input, Limits, Program, RowBuffer, WeightTensor


class RecurrentOps:
    """The recurrent operations of `program`; `plan` gets the vectors that they read. A state has `state_bytes`."""

    def __init__(self, program: Program, plan: WeightPlan, state_bytes: int, limits: Limits, target: Target) -> None:
        self._program, self._plan, self._limits, self._target = program, plan, limits, target
        self._state_items = state_bytes // STATE_ITEM_BYTES

    def convolve(self, gates: RowBuffer, spec: ConvolutionSpec) -> RowBuffer:
        """Return `c * convolution(b * x)` of rows that hold b, c and x."""
        size = spec.convolution.kernel_size
        return self._convolve(gates, spec.width, size, spec.first, spec.taps, spec.bias, is_gated=True)

    def delta_rule(self, joined: RowBuffer, spec: DeltaSpec) -> RowBuffer:
        """Return the output of value heads, normalized and gated."""
        delta = spec.delta
        x = self._convolve(joined, delta.convolved_width, delta.kernel_size, spec.first, spec.taps, is_gated=False)
        _, gates, b, a = joined.columns
        unit = UnitHeads(delta.num_key_heads, delta.key_dim, x.stride)
        self._program.call(unit, lambda: unit_heads(unit, self._target), x.memory, x.num_rows)
        scalars = self._scalars(joined, a, b, delta.num_value_heads, spec.rate, spec.dt_bias)
        y = RowBuffer.of_tokens(self._program, self._limits, "matrix_state", delta.values_width)
        shape = MatrixShape(
            delta.num_key_heads,
            delta.num_value_heads,
            delta.key_dim,
            delta.value_dim,
            delta.tiled,
            0,
            delta.keys_width,
            2 * delta.keys_width,
            x.stride,
            scalars.stride,
            y.stride,
            self._state_items,
            corrects=True,
        )
        self._add_and_read(x, scalars, y, shape, spec.first + delta.convolution_size, 0)
        norm = GatedNorm(delta.num_value_heads, delta.value_dim, y.stride, joined.stride, gates, spec.norm.eps)
        return self._gated_norm(y, joined, norm, spec.norm)

    def mamba2(self, joined: RowBuffer, spec: MambaSpec) -> RowBuffer:
        """Return the output of heads, gated and normalized; without a norm, before their gates."""
        mamba, width = spec.mamba, spec.mamba.values_width
        first, keys = spec.first, spec.mamba.keys_width
        x = self._convolve(
            joined, mamba.convolved_width, mamba.kernel_size, first, spec.taps, spec.bias, is_gated=False
        )
        gates, dt = joined.columns[-2:]
        scalars = self._scalars(joined, dt, None, mamba.num_heads, spec.rate, spec.dt_bias)
        y = RowBuffer.of_tokens(self._program, self._limits, "matrix_state", width)
        shape = MatrixShape(
            mamba.num_groups,
            mamba.num_heads,
            mamba.state_dim,
            mamba.head_dim,
            False,
            width + keys,
            width,
            0,
            x.stride,
            scalars.stride,
            y.stride,
            self._state_items,
            corrects=False,
            skips=True,
        )
        self._add_and_read(x, scalars, y, shape, first + mamba.convolution_size, self._vector(spec.skip))
        if spec.norm is None:
            return y
        size = width // mamba.num_groups
        norm = GatedNorm(
            mamba.num_groups,
            size,
            y.stride,
            joined.stride,
            gates,
            spec.norm.eps,
            gates_first=True,
            own_gains=True,
        )
        return self._gated_norm(y, joined, norm, spec.norm)

    def _scalars(
        self, joined: RowBuffer, step: int, b: int | None, num_heads: int, rate: Vector, dt_bias: Vector
    ) -> RowBuffer:
        """Return the decay and the learning rate of each head."""
        width = 2 * round_up(num_heads, ROW_BLOCK)
        scalars = RowBuffer.of_tokens(self._program, self._limits, "head_scalars", width)
        shape = HeadScalars(step, b, joined.stride, scalars.stride)
        self._program.call(
            shape,
            lambda: head_scalars(shape, self._target),
            joined.memory,
            self._vector(rate),
            self._vector(dt_bias),
            scalars.memory,
            joined.num_rows,
        )
        return scalars

    def _add_and_read(
        self, x: RowBuffer, scalars: RowBuffer, y: RowBuffer, shape: MatrixShape, first: int, skip: Argument
    ) -> None:
        """Append the update of matrix states, and the reading of their outputs into `y`."""
        row_of_token, state_in, state_out, pool = self._states()
        self._program.call(
            shape,
            lambda: matrix_state(shape, self._target),
            *(x.memory, scalars.memory, row_of_token, state_in, state_out, skip, pool, y.memory),
            first,
            x.num_rows,
        )

    def _gated_norm(self, y: RowBuffer, gates: RowBuffer, shape: GatedNorm, norm: Norm) -> RowBuffer:
        """Append a gated norm of `y`. Returns `y`."""
        gain = self._vector(Vector(norm.name, norm.size))
        self._program.call(shape, lambda: gated_norm(shape, self._target), y.memory, gates.memory, gain, y.num_rows)
        return y

    def _convolve(
        self,
        x: RowBuffer,
        width: int,
        size: int,
        first: int,
        taps: Vector,
        bias: Vector | None = None,
        *,
        is_gated: bool,
    ) -> RowBuffer:
        """Append a short convolution of columns of `x`. Returns its output."""
        y = RowBuffer.of_tokens(self._program, self._limits, "convolved", width)
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
        """Return the arguments of the state pool and its slots."""
        return tuple(map(Input, ("row_of_token", "state_in", "state_out", "state_pool")))

    def _vector(self, vector: Vector) -> Argument:
        """Return a vector as an argument."""
        return WeightTensor(self._plan.vector(((vector.name, vector.size),)).name)
