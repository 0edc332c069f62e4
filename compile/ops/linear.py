"""Append the kernels of matrices, chosen by how their weights are stored, and of the activations that enter them.

Knows weights and rows; not what a model makes of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from radixlm.runtime.artifact.manifest import TOP_LOGITS

from ..codegen.targets import Target
from ..kernels.activation import ActivationSpec, activation
from ..kernels.embedding import gather_columns
from ..kernels.experts.entries import ExpertRows
from ..kernels.float_linear import float_linear
from ..kernels.integer_linear import integer_candidates, integer_linear
from ..kernels.linear import LinearSpec
from ..kernels.quantized_rows import quantized_bytes
from ..kernels.sampling.top_k import num_maxima, top_k
from ..weights.kinds import WeightKind
from ..weights.layout import ROW_BLOCK, round_up
from ..weights.plan import Matrix, WeightPlan
from .layers import ExpertLinear, HeadLinear, Linear
from .program import Activation, Argument, Place, Program, Rows, Stored


class LinearOps:
    """Appends to `program`, and to `plan` the matrices that are multiplied with.

    Attributes:
        rounded_inputs: matrices whose inputs are rounded to 8 bits.
    """

    def __init__(self, program: Program, plan: WeightPlan, target: Target) -> None:
        self._program, self._plan, self._target = program, plan, target
        self.rounded_inputs: set[str] = set()

    def multiply(
        self, x: Activation, layers: Sequence[Linear], y: Rows, *, add: bool = False, factor: float = 1.0
    ) -> None:
        """Write `factor` times the outputs of all layers side by side into `y`, or add them to what is there."""
        column = 0
        for run in _runs_of_one_kind(layers, self._plan):
            matrix = self._plan.matrix(tuple((layer.name, layer.num_outputs) for layer in run), x.width)
            bias: Argument = 0
            if run[0].has_bias:
                parts = tuple((layer.bias_name, layer.num_outputs) for layer in run)
                bias = Stored(self._plan.vector(parts).name)
            entering = self._sorted(x, matrix) if matrix.is_sorted else x
            spec = LinearSpec(
                matrix.kind,
                matrix.num_outputs,
                matrix.padded_inputs,
                y.stride,
                column,
                run[0].has_bias,
                add,
                run[0].sensitive and matrix.kind.is_quantized,
                factor * run[0].factor,
            )
            codes, scales, offsets = arrays(matrix.name, matrix.kind)
            if matrix.kind.is_quantized:
                if not spec.wide:
                    self.rounded_inputs.update(layer.name for layer in run)
                self._program.call(
                    spec,
                    lambda spec=spec: integer_linear(spec, self._target),  # type: ignore[misc]
                    codes,
                    scales,
                    offsets,
                    bias,
                    *self._quantized(entering, spec.wide),
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

    def refine(self, x: Activation, head: Linear, y: Rows) -> None:
        """Write the largest outputs of each row of `y` once more, from activations in 16 bits.

        Which ones these are depends on the row's own outputs in 8 bits. Plain weights have nothing to refine.
        """
        matrix = self._plan.matrix(((head.name, head.num_outputs),), x.width)
        if not matrix.kind.is_quantized:
            return
        most, count, num_rows = y.max_rows, TOP_LOGITS, y.num_rows
        sizes = {"maxima": num_maxima(head.num_outputs), "largest": count, "ids": count, "is_finite": 1}
        maxima, largest, ids, is_finite = (
            self._program.place(("candidates", role), most * size * 4) for role, size in sizes.items()
        )
        self._program.call(
            ("top_k", count),
            lambda: top_k(count),
            *(y.memory, maxima, largest, ids, is_finite, y.stride, head.num_outputs),
            num_rows,
        )
        bias: Argument = 0
        if head.has_bias:
            bias = Stored(self._plan.vector(((head.bias_name, head.num_outputs),)).name)
        entering = self._sorted(x, matrix) if matrix.is_sorted else x
        spec = LinearSpec(
            matrix.kind, matrix.num_outputs, matrix.padded_inputs, y.stride, has_bias=head.has_bias, wide=True
        )
        self._program.call(
            ("candidates", spec),
            lambda: integer_candidates(spec, count, self._target),
            *arrays(matrix.name, matrix.kind),
            bias,
            *self._quantized(entering, True),
            y.memory,
            ids,
            num_rows,
        )

    def multiply_experts(self, x: Activation, layer: ExpertLinear, y: Rows, lists: Place, rows: ExpertRows) -> None:
        """Write the outputs of each entry's expert into its row of `y`, or of those columns that `y` names."""
        matrix = self._plan.matrix(((layer.name, layer.num_outputs),), x.width, layer.num_experts)
        biases: Argument = 0
        if layer.has_bias:
            biases = Stored(self._plan.vector(((layer.bias_name, layer.num_outputs),), layer.num_experts).name)
        self._multiply_stack(x, matrix, y, lists, rows, biases)

    def multiply_heads(self, x: Activation, layer: HeadLinear, y: Rows, lists: Place, rows: ExpertRows) -> None:
        """The same, where each head is an expert that every token has."""
        matrix = self._plan.matrix(((layer.name, layer.num_outputs),), x.width, layer.num_heads)
        self._multiply_stack(x, matrix, y, lists, rows, is_sensitive=True)

    def _multiply_stack(
        self,
        x: Activation,
        matrix: Matrix,
        y: Rows,
        lists: Place,
        rows: ExpertRows,
        biases: Argument = 0,
        *,
        is_sensitive: bool = False,
    ) -> None:
        kind, x_stride, arrays_ = matrix.kind, x.float_stride, arrays(matrix.name, matrix.kind)
        spec = LinearSpec(
            kind,
            matrix.num_outputs,
            matrix.padded_inputs,
            y.stride,
            y.columns[0],
            has_bias=biases != 0,
            wide=is_sensitive and kind.is_quantized,
        )
        if kind.is_quantized:
            if not spec.wide:
                self.rounded_inputs.add(matrix.name)
            self._program.call(
                (spec, rows),
                lambda: integer_linear(spec, self._target, rows),
                *arrays_,
                biases,
                *self._quantized(x, spec.wide),
                y.memory,
                lists,
            )
        else:
            self._program.call(
                (spec, x_stride, rows),
                lambda: float_linear(spec, self._target, x_stride, rows),
                arrays_[0],
                biases,
                self._floats(x),
                y.memory,
                lists,
            )

    def _quantized(self, x: Activation, wide: bool) -> tuple[Place, Place, Place]:
        if wide not in x.codes:
            most, role = x.rows.max_rows, x.role
            codes, scales, sums = quantized_bytes(most, x.width, wide)
            x.codes[wide] = (
                self._program.place((role, "codes", x.width, most, wide), codes),
                self._program.place((role, "scales", x.width, most, wide), scales),
                self._program.place((role, "sums", x.width, most, wide), sums),
            )
            self._activate(x, None, x.codes[wide], wide)
        return x.codes[wide]

    def _sorted(self, x: Activation, matrix: Matrix) -> Activation:
        """The inputs in the order in which the matrix has them; its own codes, beside those of `x`."""
        stride = round_up(x.width, ROW_BLOCK)
        place = self._program.place(("sorted", x.width, x.rows.max_rows), x.rows.max_rows * stride * 4)
        self._program.call(
            ("gather_columns", x.width, x.float_stride),
            lambda: gather_columns(x.width, x.float_stride, stride),
            self._floats(x),
            Stored(f"{matrix.name}.order"),
            place,
            x.rows.num_rows,
        )
        rows = Rows(place, stride, (0,), x.rows.num_rows, x.rows.max_rows)
        return Activation("identity", rows, x.width, 0, 0.0, role="sorted")

    def _floats(self, x: Activation) -> Argument:
        if x.is_rows:
            return x.rows.memory
        if x.floats is None:
            stride = round_up(x.width, ROW_BLOCK)
            x.floats = self._program.place((x.role, "floats", x.width, x.rows.max_rows), x.rows.max_rows * stride * 4)
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
            has_gain=x.gain != 0,
            has_bias=x.has_bias,
        )
        if x.gates is not None:
            spec = replace(
                spec,
                gate=x.gates.function,
                gate_stride=x.gates.rows.stride,
                gate_column=x.gates.column,
                gate_width=x.gates.width,
            )
        self._program.call(
            spec,
            lambda: activation(spec, self._target),
            x.rows.memory,
            x.gain,
            0 if x.gates is None else x.gates.rows.memory,
            0 if floats is None else floats,
            *(codes or (0, 0, 0)),
            x.rows.num_rows,
        )


def arrays(name: str, kind: WeightKind) -> tuple[Argument, Argument, Argument]:
    """A stored matrix as kernels take it: codes, scales and offsets, with 0 for those that its kind lacks."""
    return (
        Stored(f"{name}.codes"),
        Stored(f"{name}.scales") if kind.is_quantized else 0,
        Stored(f"{name}.offsets") if kind.has_minimum or kind.has_zeros else 0,
    )


def _runs_of_one_kind(layers: Sequence[Linear], plan: WeightPlan) -> list[list[Linear]]:
    """The layers in runs of neighbours that are stored alike; each run becomes one matrix.

    A layer whose inputs are sorted stands alone: another's are in another order.
    """
    runs: list[list[Linear]] = []
    for layer in layers:
        before = runs[-1][0] if runs else None
        is_sorted = before is not None and not plan.sorted_inputs.isdisjoint((before.name, layer.name))
        if before and not is_sorted and plan.kinds[before.name] == plan.kinds[layer.name] and _alike(before, layer):
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return runs


def _alike(a: Linear, b: Linear) -> bool:
    return (a.has_bias, a.sensitive, a.factor) == (b.has_bias, b.sensitive, b.factor)
