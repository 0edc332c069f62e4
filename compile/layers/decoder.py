"""A decoder: embedding, layers of two branches beside a residual, the last norm, the output matrix.

Layers may get numbers of a second embedding beside their rows (Gemma 4), and a head may draft tokens. Tensors are named
as checkpoints do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from radixlm.runtime.artifact.model_config import LayerInputs, ModelConfig

from ..ops.layers import Embedding, Linear, Norm, Part
from ..ops.operations import Operations
from .decoder_layer import DecoderLayer, model_norm
from .mtp import MTPHead
from .part_names import PartNames

R = TypeVar("R")
A = TypeVar("A")


class Decoder:
    """Tokens to logits."""

    def __init__(self, config: ModelConfig, names: PartNames) -> None:
        self.config, self.names = config, names
        self.embed_tokens = Embedding(names.model("embedding"), config.vocab_size, config.hidden_size)
        inputs = config.layer_inputs
        self.layer_inputs = None if inputs is None else AllLayerInputs(config, inputs, names)
        self.layers = [DecoderLayer(config, index, names) for index in range(config.num_hidden_layers)]
        self.norm = model_norm(config, names.model("norm"), config.norm_eps)
        head = self.embed_tokens.name if config.tie_word_embeddings else names.model("head")
        self.lm_head = Linear(head, config.vocab_size, config.hidden_size, config.output_bias)
        self.embedding_norm = Norm("", config.hidden_size, config.norm_eps, has_gain=False)
        self.mtp = None if config.mtp is None else MTPHead(config, names)

    @property
    def all_layers(self) -> list[DecoderLayer]:
        """The layers, and behind them that of an MTP head."""
        return self.layers if self.mtp is None else [*self.layers, self.mtp.layer]

    def parts(self) -> Iterator[Part]:
        """Everything that has tensors; a tied output matrix is the embedding."""
        yield self.embed_tokens
        if self.layer_inputs is not None:
            yield from self.layer_inputs.parts()
        for layer in self.layers:
            yield from layer.parts()
        yield self.norm
        if not self.config.tie_word_embeddings:
            yield self.lm_head
        if self.mtp is not None:
            yield from self.mtp.parts()

    def forward(self, op: Operations[R, A]) -> R:
        """The whole model."""
        config = self.config
        x = op.embed(self.embed_tokens, factor=config.embedding_factor)
        if config.embedding_norm:
            x = op.normalize(x, self.embedding_norm)
        inputs = None if self.layer_inputs is None else self.layer_inputs.forward(op, x)
        for layer in self.layers:
            x = layer.forward(op, x, inputs)
        logits = op.logits(x, self.norm, self.lm_head, factor=config.logits_factor, soft_cap=config.logits_soft_cap)
        if self.mtp is not None:
            self.mtp.keep(op, x, self.norm, self.embed_tokens)
        return logits

    def draft(self, op: Operations[R, A]) -> R:
        """The MTP head alone, on tokens that are not computed yet or were just; the model must have one."""
        assert self.mtp is not None
        return self.mtp.draft(op, self.embed_tokens, self.lm_head)


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
