"""Append the kernels of matrices, chosen by how their weights are stored, and of the activations that enter them.

Knows weights and rows; not what a model makes of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..codegen.targets import Target
from ..kernels.activation import ActivationSpec, activation
from ..kernels.float_linear import float_linear
from ..kernels.integer_linear import integer_linear
from ..kernels.linear import LinearSpec
from ..kernels.quantized_rows import quantized_bytes
from ..weights.layout import ROW_BLOCK, round_up
from ..weights.plan import WeightPlan
from ..weights.quantization import WeightKind
from .layers import Linear
from .program import Argument, Place, Program, Stored
from .rows import Activation, Rows


class LinearOps:
    """Appends to `program`, and to `plan` the matrices that are multiplied with.

    Attributes:
        rounded_inputs: matrices whose inputs are rounded to 8 bits.
    """

    def __init__(self, program: Program, plan: WeightPlan, target: Target) -> None:
        self._program, self._plan, self._target = program, plan, target
        self.rounded_inputs: set[str] = set()

    def multiply(self, x: Activation, layers: Sequence[Linear], y: Rows, *, add: bool = False) -> None:
        """Write the outputs of all layers side by side into `y`, or add them to what is there."""
        column = 0
        for run in _runs_of_one_kind(layers, self._plan):
            matrix = self._plan.matrix(tuple((layer.name, layer.num_outputs) for layer in run), x.width)
            bias: Argument = 0
            if run[0].has_bias:
                parts = tuple((layer.bias_name, layer.num_outputs) for layer in run)
                bias = Stored(self._plan.vector(parts).name)
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
            codes, scales, minima = arrays(matrix.name, matrix.kind)
            if matrix.kind.is_quantized:
                if not spec.wide:
                    self.rounded_inputs.update(layer.name for layer in run)
                self._program.call(
                    spec,
                    lambda spec=spec: integer_linear(spec, self._target),  # type: ignore[misc]
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
                self._program.call(
                    (spec, x_stride),
                    lambda spec=spec, x_stride=x_stride: float_linear(spec, self._target, x_stride),  # type: ignore[misc]
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
                self._program.place(("codes", x.width, most, wide), codes),
                self._program.place(("scales", x.width, most, wide), scales),
                self._program.place(("sums", x.width, most, wide), sums),
            )
            self._activate(x, None, x.codes[wide], wide)
        return x.codes[wide]

    def _floats(self, x: Activation) -> Argument:
        if x.function == "identity":
            return x.rows.memory
        if x.floats is None:
            stride = round_up(x.width, ROW_BLOCK)
            x.floats = self._program.place(("floats", x.width, x.rows.max_rows), x.rows.max_rows * stride * 4)
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
        self._program.call(
            spec,
            lambda: activation(spec, self._target),
            x.rows.memory,
            x.gain,
            0 if floats is None else floats,
            *(codes or (0, 0, 0)),
            x.rows.num_rows,
        )


def arrays(name: str, kind: WeightKind) -> tuple[Argument, Argument, Argument]:
    """A stored matrix as kernels take it: codes, scales and minima, with 0 for those that its kind lacks."""
    return (
        Stored(f"{name}.codes"),
        Stored(f"{name}.scales") if kind.is_quantized else 0,
        Stored(f"{name}.minima") if kind.has_minimum else 0,
    )


def _runs_of_one_kind(layers: Sequence[Linear], plan: WeightPlan) -> list[list[Linear]]:
    """The layers in runs of neighbours that are stored alike; each run becomes one matrix."""
    runs: list[list[Linear]] = []
    for layer in layers:
        if runs and plan.kinds[runs[-1][0].name] == plan.kinds[layer.name] and _alike(runs[-1][0], layer):
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return runs


def _alike(a: Linear, b: Linear) -> bool:
    return a.has_bias == b.has_bias and a.sensitive == b.sensitive
