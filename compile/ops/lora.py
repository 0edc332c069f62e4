"""Append the kernels of LoRA adapters: `y += factor * B (A x)`, for the rows whose request has an adapter.

An adapter is an expert that a token has, or has not: the kernels are those of experts' float matrices. So a row's
result depends on the row and its adapter alone, and a row without one is not touched.
"""

from __future__ import annotations

from collections.abc import Sequence

from radixlm.runtime.artifact.lora import LoraInfo, LoraPlace

from ..codegen.targets import Target
from ..kernels.experts.entries import ExpertLimits, ExpertRows, find_slabs
from ..kernels.float_linear import float_linear
from ..kernels.linear import LinearSpec
from ..weights.kinds import F32
from ..weights.layout import ROW_BLOCK, round_up
from .layers import Linear
from .program import Argument, EntryPlaces, Input, Limits, Program, RowBuffer, Scratch, Size


class LoraOps:
    """The adapters' part of `program`: of each linear layer that `info` names."""

    def __init__(self, program: Program, info: LoraInfo, limits: Limits, target: Target) -> None:
        self._program, self._target, self._rank = program, target, info.max_rank
        self._limits = ExpertLimits(info.max_loras, 1, limits.num_tokens)
        self._places = {tuple(matrix.name for matrix in place.group.matrices): place for place in info.places()}
        self._lists: EntryPlaces | None = None

    def changes(self, layers: Sequence[Linear]) -> bool:
        """Return whether adapters may change these layers."""
        return tuple(layer.name for layer in layers) in self._places

    def add(self, x: Argument, x_stride: int, layers: Sequence[Linear], y: RowBuffer, factor: float) -> None:
        """Add `factor` times the adapters' part of all layers' outputs to `y`; `x` are the inputs as floats."""
        place, lists = self._places[tuple(layer.name for layer in layers)], self._found()
        limits, width = self._limits, len(layers) * self._rank
        narrow = self._program.scratch(("adapters", width), limits.num_places * width * 4)
        shrink, to_places = (
            LinearSpec(F32, width, place.group.num_inputs, width),
            ExpertRows(limits, "tokens", "places"),
        )
        self._program.call(
            (shrink, x_stride, to_places),
            lambda: float_linear(shrink, self._target, x_stride, to_places),
            Input("adapters", place.first),
            0,
            x,
            narrow,
            lists.memory,
        )
        for part, layer in enumerate(layers):
            self._expand(place, part, Scratch(narrow.offset + part * self._rank * 4), layer, y, factor)

    def _expand(self, place: LoraPlace, part: int, x: Scratch, layer: Linear, y: RowBuffer, factor: float) -> None:
        """Add one layer's part to `y`."""
        rows, x_stride = ExpertRows(self._limits, "places", "tokens"), len(place.group.matrices) * self._rank
        spec = LinearSpec(
            F32,
            round_up(layer.num_outputs, ROW_BLOCK),
            self._rank,
            y.stride,
            y.columns[part],
            add_to_output=True,
            factor=factor * layer.factor,
        )
        self._program.call(
            (spec, x_stride, rows),
            lambda: float_linear(spec, self._target, x_stride, rows),
            Input("adapters", place.first_of_b(part)),
            0,
            x,
            y.memory,
            self._found().memory,
        )

    def _found(self) -> EntryPlaces:
        """Return the lists of rows by adapter, which are found once a step."""
        if self._lists is None:
            limits = self._limits
            self._lists = EntryPlaces(self._program.scratch(("adapters of rows", limits), limits.num_ints * 4), limits)
            self._program.call(
                ("find_slabs", limits, "skips negative"),
                lambda: find_slabs(limits, skips_negative=True),
                Input("adapter_of_token"),
                self._lists.memory,
                Size("num_tokens"),
            )
        return self._lists
