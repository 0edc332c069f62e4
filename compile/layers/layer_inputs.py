"""What each layer gets of a token beside its row: numbers of a second embedding (Gemma 4). Named as checkpoints do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from radixlm.runtime.artifact.model_config import LayerInputs, ModelConfig

from ..ops.layers import Embedding, Linear, Norm, Part
from ..ops.operations import Operations
from .part_names import PartNames

R = TypeVar("R")
A = TypeVar("A")


class AllLayerInputs:
    """The numbers of all layers, side by side: `(embedding * sqrt(size) + normalized projection) / sqrt(2)`.

    What is projected is the token's row before the first layer; each layer's part is normalized by itself.
    """

    def __init__(self, config: ModelConfig, inputs: LayerInputs, names: PartNames) -> None:
        width, hidden = config.num_hidden_layers * inputs.size, config.hidden_size
        self.inputs, self.num_layers, self.hidden_size = inputs, config.num_hidden_layers, hidden
        self.embedding = Embedding(names.model("inputs_embedding"), inputs.vocab_size, width)
        self.projection = Linear(names.model("inputs_projection"), width, hidden)
        # the projection is over the root of its inputs; beside a norm that only makes its eps another
        self.norm = Norm(names.model("inputs_norm"), inputs.size, config.norm_eps * hidden)

    def parts(self) -> Iterator[Part]:
        """Everything that has tensors."""
        yield from (self.embedding, self.projection, self.norm)

    def forward(self, op: Operations[R, A], x: R) -> R:
        """Rows of all layers' numbers, for the embedded tokens `x`."""
        half = 0.5**0.5
        inputs = op.embed(self.embedding, factor=self.inputs.size**0.5 * half)
        projected = op.linear(op.plain(x, self.hidden_size), self.projection)
        return op.add_norm(inputs, projected, self.norm, factor=half, parts=self.num_layers)


class OneLayerInput:
    """The end of layer `index`: `x + normalized projection of (function(gate x) * the layer's numbers)`."""

    def __init__(self, config: ModelConfig, inputs: LayerInputs, index: int, names: PartNames) -> None:
        size, hidden = inputs.size, config.hidden_size
        self.function, self.size, self.column, self.hidden_size = inputs.function, size, index * size, hidden
        self.gate = Linear(names.layer(index, "input_gate"), size, hidden)
        self.projection = Linear(names.layer(index, "input_projection"), hidden, size)
        self.norm = Norm(names.layer(index, "input_post_norm"), hidden, config.norm_eps)

    def parts(self) -> Iterator[Part]:
        """Everything that has tensors."""
        yield from (self.gate, self.projection, self.norm)

    def forward(self, op: Operations[R, A], x: R, inputs: R) -> R:
        """x after it; `inputs` are those of all layers."""
        gate = op.linear(op.plain(x, self.hidden_size), self.gate)
        through = op.activate(gate, self.function, self.size, by=inputs, column=self.column)
        return op.add_norm(x, op.linear(through, self.projection), self.norm)
