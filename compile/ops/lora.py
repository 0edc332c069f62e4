"""Append the kernels of LoRA adapters, after the matrices that an adapter may change. Knows layers and places."""

from __future__ import annotations

from collections.abc import Sequence

from radixlm.runtime.artifact.lora import LoraInfo

from ..codegen.targets import Target
from ..kernels.adapters import AdapterPart, AdapterSpec, adapt_rows
from ..weights.layout import ROW_BLOCK, round_up
from .layers import Linear
from .program import Argument, Input, Program, RowBuffer


class LoraOps:
    """The adapters' part of `program`: of each linear layer that `info` names."""

    def __init__(self, program: Program, info: LoraInfo, target: Target) -> None:
        self._program, self._target, self._info = program, target, info
        self._places = {tuple(place.matrix.name for place in places): places for places in info.places()}

    def changes(self, layers: Sequence[Linear]) -> bool:
        """Return whether adapters may change these layers."""
        return tuple(layer.name for layer in layers) in self._places

    def add(self, x: Argument, x_stride: int, layers: Sequence[Linear], y: RowBuffer, factor: float) -> None:
        """Add `factor` times the adapters' part of all layers' outputs to `y`; `x` are the inputs as floats."""
        info, places = self._info, self._places[tuple(layer.name for layer in layers)]
        begin = places[0].a_at
        parts = tuple(
            AdapterPart(
                place.a_at - begin,
                place.b_at - begin,
                round_up(layer.num_outputs, ROW_BLOCK),
                column,
                factor * layer.factor,
            )
            for layer, place, column in zip(layers, places, y.columns, strict=True)
        )
        inputs, strides = layers[0].num_inputs, (x_stride, y.stride, info.stride, info.num_matrices)
        spec = AdapterSpec(info.dtype, inputs, info.max_rank, *strides, parts)
        self._program.call(
            spec,
            lambda: adapt_rows(spec, self._target),
            Input("adapter_ranks", places[0].number),
            Input("adapters", begin),
            Input("adapter_of_token"),
            x,
            y.memory,
            y.num_rows,
        )
