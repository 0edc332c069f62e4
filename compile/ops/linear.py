"""Append the kernels of matrices, selected by the storage of their weights, and of the activations that enter them.

Knows weights and rows; not what a model computes with them.
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
from .program import Activation, Argument, EntryPlaces, Program, RowBuffer, Scratch, WeightTensor


class LinearOps:
    """The matrix operations of `program`; `plan` gets the matrices.

    Attributes:
        rounded_inputs: matrices whose inputs are rounded to 8 bits.
    """

    def __init__(self, program: Program, plan: WeightPlan, target: Target) -> None:
        self._program, self._plan, self._target = program, plan, target
        self.rounded_inputs: set[str] = set()

    def multiply(
        self,
        x: Activation,
        layers: Sequence[Linear],
        y: RowBuffer,
        *,
        add: bool = False,
        factor: float = 1.0,
        keeps_floats: bool = False,
        most_outputs: int | None = None,
    ) -> None:
        """Write `factor` times the outputs of all layers side by side into `y`, or add them to it.

        With `keeps_floats`, the kernel that computes codes of `x` stores the floats as well. With `most_outputs`, only
        so many first outputs of one layer are computed.
        """
        column = 0
        for run in _runs_of_one_kind(layers, self._plan):
            matrix = self._plan.matrix(tuple((layer.name, layer.num_outputs) for layer in run), x.width)
            bias: Argument = 0
            if run[0].has_bias:
                parts = tuple((layer.bias_name, layer.num_outputs) for layer in run)
                bias = WeightTensor(self._plan.vector(parts).name)
            entering = self._sorted(x, matrix) if matrix.is_sorted else x
            spec = LinearSpec(
                matrix.kind,
                matrix.num_outputs if most_outputs is None else most_outputs,
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
                    *self.quantized(entering, spec.wide, keeps_floats=keeps_floats),
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
                    self.floats(x),
                    y.memory,
                    y.num_rows,
                )
            column += matrix.num_outputs

    def refine(self, x: Activation, head: Linear, y: RowBuffer, most_outputs: int) -> None:
        """Recompute the largest of the `most_outputs` first outputs of each row of `y` from activations in 16 bits.

        The selection depends on the row's own outputs from 8 bits. Plain weights have nothing to refine.
        """
        matrix = self._plan.matrix(((head.name, head.num_outputs),), x.width)
        if not matrix.kind.is_quantized:
            return
        most, count, num_rows = y.max_rows, TOP_LOGITS, y.num_rows
        sizes = {"maxima": num_maxima(head.num_outputs), "largest": count, "ids": count, "is_finite": 1}
        maxima, largest, ids, is_finite = (
            self._program.scratch(("candidates", role), most * size * 4) for role, size in sizes.items()
        )
        self._program.call(
            ("top_k", count),
            lambda: top_k(count),
            *(y.memory, maxima, largest, ids, is_finite, y.stride, most_outputs),
            num_rows,
        )
        bias: Argument = 0
        if head.has_bias:
            bias = WeightTensor(self._plan.vector(((head.bias_name, head.num_outputs),)).name)
        entering = self._sorted(x, matrix) if matrix.is_sorted else x
        spec = LinearSpec(
            matrix.kind, matrix.num_outputs, matrix.padded_inputs, y.stride, has_bias=head.has_bias, wide=True
        )
        self._program.call(
            ("candidates", spec),
            lambda: integer_candidates(spec, count, self._target),
            *arrays(matrix.name, matrix.kind),
            bias,
            *self.quantized(entering, True),
            y.memory,
            ids,
            num_rows,
        )

    def multiply_experts(self, x: Activation, layer: ExpertLinear, y: RowBuffer, places: EntryPlaces) -> None:
        """Write the outputs of each entry's expert into its row of `y`, in the columns that `y` names.

        Rows of `x` are those of tokens, or are at the places of entries.
        """
        matrix = self._plan.matrix(((layer.name, layer.num_outputs),), x.width, layer.num_experts)
        rows = ExpertRows(places.limits, "tokens" if x.rows.places is None else "places", "places")
        biases: Argument = 0
        if layer.has_bias:
            biases = WeightTensor(self._plan.vector(((layer.bias_name, layer.num_outputs),), layer.num_experts).name)
        self._multiply_stack(x, matrix, y, places.memory, rows, biases)

    def multiply_heads(self, x: Activation, layer: HeadLinear, y: RowBuffer, lists: Scratch, rows: ExpertRows) -> None:
        """Multiply the matrices of heads, as those of experts that every token has."""
        matrix = self._plan.matrix(((layer.name, layer.num_outputs),), x.width, layer.num_heads)
        self._multiply_stack(x, matrix, y, lists, rows, is_sensitive=True)

    def _multiply_stack(
        self,
        x: Activation,
        matrix: Matrix,
        y: RowBuffer,
        lists: Scratch,
        rows: ExpertRows,
        biases: Argument = 0,
        *,
        is_sensitive: bool = False,
    ) -> None:
        """Append the product of a stack of matrices with the rows of `x`, by the lists of slabs."""
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
                *self.quantized(x, spec.wide),
                y.memory,
                lists,
            )
        else:
            self._program.call(
                (spec, x_stride, rows),
                lambda: float_linear(spec, self._target, x_stride, rows),
                arrays_[0],
                biases,
                self.floats(x),
                y.memory,
                lists,
            )

    def quantized(self, x: Activation, wide: bool, *, keeps_floats: bool = False) -> tuple[Scratch, Scratch, Scratch]:
        """Return codes, scales and sums of its rows, which are computed once, with the floats if these are kept."""
        if wide not in x.codes:
            x.codes[wide] = self.place_codes(x, wide)
            floats = None
            if keeps_floats and not x.is_rows and x.floats is None:
                floats = x.floats = self._place_floats(x)
            self._activate(x, floats, x.codes[wide], wide)
        return x.codes[wide]

    def place_codes(self, x: Activation, wide: bool) -> tuple[Scratch, Scratch, Scratch]:
        """Allocate scratch memory for codes, scales and sums of its rows."""
        most, role = x.rows.max_rows, x.role
        codes, scales, sums = quantized_bytes(most, x.width, wide)
        return (
            self._program.scratch((role, "codes", x.width, most, wide), codes),
            self._program.scratch((role, "scales", x.width, most, wide), scales),
            self._program.scratch((role, "sums", x.width, most, wide), sums),
        )

    def _sorted(self, x: Activation, matrix: Matrix) -> Activation:
        """Return the inputs in the order of the matrix; its codes are separate from those of `x`."""
        stride = round_up(x.width, ROW_BLOCK)
        place = self._program.scratch(("sorted", x.width, x.rows.max_rows), x.rows.max_rows * stride * 4)
        self._program.call(
            ("gather_columns", x.width, x.float_stride),
            lambda: gather_columns(x.width, x.float_stride, stride),
            self.floats(x),
            WeightTensor(f"{matrix.name}.order"),
            place,
            x.rows.num_rows,
        )
        rows = RowBuffer(place, stride, (0,), x.rows.num_rows, x.rows.max_rows)
        return Activation("identity", rows, x.width, 0, 0.0, role="sorted")

    def floats(self, x: Activation) -> Argument:
        """Return the activation as floats, computing it at its first use."""
        if x.is_rows:
            return x.rows.memory
        if x.floats is None:
            x.floats = self._place_floats(x)
            self._activate(x, x.floats, None, False)
        return x.floats

    def _place_floats(self, x: Activation) -> Scratch:
        """Allocate scratch memory for the floats of its rows."""
        most, stride = x.rows.max_rows, round_up(x.width, ROW_BLOCK)
        return self._program.scratch((x.role, "floats", x.width, most), most * stride * 4)

    def _activate(
        self, x: Activation, floats: Scratch | None, codes: tuple[Scratch, Scratch, Scratch] | None, wide: bool
    ) -> None:
        """Append the kernel that computes an activation as floats, codes, or both."""
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
        places = x.rows.places
        if places is not None:
            spec = replace(spec, experts=places.limits)
        self._program.call(
            spec,
            lambda: activation(spec, self._target),
            x.rows.memory,
            x.gain,
            0 if x.gates is None else x.gates.rows.memory,
            *(() if places is None else (places.memory,)),
            0 if floats is None else floats,
            *(codes or (0, 0, 0)),
            x.rows.num_rows,
        )


def arrays(name: str, kind: WeightKind) -> tuple[Argument, Argument, Argument]:
    """Return the arguments of a stored matrix: codes, scales and offsets, 0 for those that its kind lacks."""
    return (
        WeightTensor(f"{name}.codes"),
        WeightTensor(f"{name}.scales") if kind.is_quantized else 0,
        WeightTensor(f"{name}.offsets") if kind.has_minimum or kind.has_zeros else 0,
    )


def _runs_of_one_kind(layers: Sequence[Linear], plan: WeightPlan) -> list[list[Linear]]:
    """Divide layers into runs of neighbours that are stored alike; each run becomes one matrix.

    A layer with sorted inputs is a run of its own, because another layer's order is different.
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
    """Return whether two layers can be joined in one matrix."""
    return (a.has_bias, a.sensitive, a.factor) == (b.has_bias, b.sensitive, b.factor)
