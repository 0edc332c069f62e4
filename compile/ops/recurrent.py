"""Append the kernels of recurrent layers, which read and write the states of the step's sequences.

Knows rows and slots; not weights of matrices, nor how a model joins its layers.
"""

from __future__ import annotations

from radixlm.runtime.artifact.model_config import STATE_ITEM_BYTES

from ..codegen.targets import Target
from ..kernels.recurrent.short_convolution import ConvolutionShape, short_convolution
from ..weights.plan import WeightPlan
from .layers import Vector
from .operations import ConvolutionSpec
from .program import Argument, Input, Program, Size, Stored
from .rows import Limits, Rows


class RecurrentOps:
    """Appends to `program`, and to `plan` the vectors that recurrent layers read; a state has `state_bytes`."""

    def __init__(self, program: Program, plan: WeightPlan, state_bytes: int, limits: Limits, target: Target) -> None:
        self._program, self._plan, self._limits, self._target = program, plan, limits, target
        self._state_items = state_bytes // STATE_ITEM_BYTES

    def convolve(self, gates: Rows, spec: ConvolutionSpec) -> Rows:
        """`c * convolution(b * x)` of rows that hold b, c and x."""
        y = Rows.of_tokens(self._program, self._limits, "convolved", spec.width)
        shape = ConvolutionShape(
            spec.width,
            spec.convolution.kernel_size,
            gates.stride,
            y.stride,
            self._state_items,
            has_bias=spec.bias is not None,
        )
        self._program.call(
            ("short_convolution", shape),
            lambda: short_convolution(shape, self._target),
            gates.memory,
            Input("row_of_token"),
            Input("state_in"),
            Input("state_out"),
            self._vector(spec.taps),
            0 if spec.bias is None else self._vector(spec.bias),
            Input("state_pool"),
            y.memory,
            spec.first,
            Size("num_tokens"),
        )
        return y

    def _vector(self, vector: Vector) -> Argument:
        return Stored(self._plan.vector(((vector.name, vector.size),)).name)
