"""A decoder: embedding, layers of two residual branches, the last norm, the output matrix.

Layers may get inputs from a second embedding (Gemma 4), and a head may draft tokens. An encoder is a decoder whose
tokens see those after them. Tensors have the checkpoint's names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from radixlm.runtime.artifact.model_config import EncoderInput, LayerInputs, ModelConfig, ScoreHead

from ..ops.layers import Embedding, Linear, Norm, Part, Vector
from ..ops.operations import Operations, ScoreSpec
from .decoder_layer import DecoderLayer, model_norm
from .mtp import MTPHead
from .part_names import PartNames

R = TypeVar("R")
A = TypeVar("A")


class Decoder:
    """The whole model, from tokens to logits, to hidden states or to a score, as the configuration says."""

    def __init__(self, config: ModelConfig, names: PartNames) -> None:
        self.config, self.names = config, names
        self.embed_tokens = Embedding(names.model("embedding"), config.vocab_size, config.hidden_size)
        entering, inputs = config.encoder_input, config.layer_inputs
        self.encoder_input = None if entering is None else EmbeddingSum(config, entering, names)
        self.layer_inputs = None if inputs is None else AllLayerInputs(config, inputs, names)
        self.layers = [DecoderLayer(config, index, names) for index in range(config.num_hidden_layers)]
        self.norm = model_norm(config, names.model("norm"), config.norm_eps) if config.has_last_norm else None
        head = self.embed_tokens.name if config.tie_word_embeddings else names.model("head")
        self.lm_head = Linear(head, config.vocab_size, config.hidden_size, config.output_bias)
        widths = (config.hidden_size, *(each.size for each in config.dense))
        self.dense = [
            Linear(names.dense(index), each.size, widths[index], each.bias) for index, each in enumerate(config.dense)
        ]
        self.score = None if config.score is None else self._score_spec(config.score)
        self.embedding_norm = Norm("", config.hidden_size, config.norm_eps, has_gain=False)
        self.mtp = None if config.mtp is None else MTPHead(config, names)

    @property
    def all_layers(self) -> list[DecoderLayer]:
        """The layers, followed by that of an MTP head."""
        return self.layers if self.mtp is None else [*self.layers, self.mtp.layer]

    def parts(self) -> Iterator[Part]:
        """Yield everything that has tensors; a tied output matrix is the embedding."""
        yield self.embed_tokens
        if self.encoder_input is not None:
            yield from self.encoder_input.parts()
        if self.layer_inputs is not None:
            yield from self.layer_inputs.parts()
        for layer in self.layers:
            yield from layer.parts()
        if self.norm is not None:
            yield self.norm
        if self.config.output == "logits" and not self.config.tie_word_embeddings:
            yield self.lm_head
        yield from self.dense
        if (score := self.score) is not None:
            yield from (part for part in (score.dense, score.norm, score.out) if part is not None)
        if self.mtp is not None:
            yield from self.mtp.parts()

    def forward(self, op: Operations[R, A]) -> R:
        """Return the logits of the whole model."""
        config = self.config
        x = op.embed(self.embed_tokens, factor=config.embedding_factor)
        if config.embedding_norm:
            x = op.normalize(x, self.embedding_norm)
        if self.encoder_input is not None:
            x = self.encoder_input.forward(op, x)
        inputs = None if self.layer_inputs is None else self.layer_inputs.forward(op, x)
        for layer in self.layers:
            x = layer.forward(op, x, inputs)
        if self.score is not None:
            return op.score(x, self.score)
        if config.output == "hidden":
            return op.hidden(x, self.norm, *self.dense)
        assert self.norm is not None, "a model without a last norm makes no logits"
        logits = op.logits(x, self.norm, self.lm_head, factor=config.logits_factor, soft_cap=config.logits_soft_cap)
        if self.mtp is not None:
            self.mtp.keep(op, x, self.norm, self.embed_tokens)
        return logits

    def draft(self, op: Operations[R, A]) -> R:
        """Return the logits of the MTP head alone, for new or just computed tokens; the model must have one."""
        assert self.mtp is not None
        return self.mtp.draft(op, self.embed_tokens, self.lm_head)

    def _score_spec(self, head: ScoreHead) -> ScoreSpec:
        """Return the parts of a reranker's head. The last layer has one row, which is not worth rounding."""
        config, names, size = self.config, self.names, self.config.hidden_size
        return ScoreSpec(
            pooling=head.pooling,
            last_norm=self.norm,
            dense=Linear(names.model("score_dense"), size, size, head.dense_bias, sensitive=True),
            function=head.function,
            norm=model_norm(config, names.model("score_norm"), config.norm_eps) if head.norm else None,
            out=Linear(names.model("score"), 1, size, head.bias, sensitive=True, exact=True),
        )


class EmbeddingSum:
    """The normalized sum of a token's embedding, its position's vector and its type's, as the configuration says."""

    def __init__(self, config: ModelConfig, entering: EncoderInput, names: PartNames) -> None:
        def vector(role: str, size: int, wanted: bool) -> Vector | None:
            return Vector(names.model(role), size) if wanted else None

        self.first_position = entering.first_position
        num_positions = config.max_position_embeddings + self.first_position
        self.separator_id = entering.separator_id
        num_types = 1 if self.separator_id is None else 2
        self.token_type = vector("token_type", num_types * config.hidden_size, entering.token_type)
        self.positions = vector("positions", num_positions * config.hidden_size, entering.positions)
        self.norm = model_norm(config, names.model("embedding_norm"), config.norm_eps)

    def parts(self) -> Iterator[Part]:
        """Yield everything that has tensors."""
        yield from (part for part in (self.token_type, self.positions) if part is not None)
        yield self.norm

    def forward(self, op: Operations[R, A], x: R) -> R:
        """Return the sum for the embedded tokens `x`."""
        if self.token_type is not None and self.separator_id is not None:
            x = op.add_token_types(x, self.token_type, self.norm.size, separator_id=self.separator_id)
        elif self.token_type is not None:
            x = op.add_vector(x, self.token_type)
        if self.positions is not None:
            x = op.add_positions(x, self.positions, self.norm.size, first=self.first_position)
        return op.normalize(x, self.norm)


class AllLayerInputs:
    """The per-layer inputs of all layers, side by side: `(embedding * sqrt(size) + projection) / sqrt(2)`.

    The projection is of the token's row before the first layer; each layer's part of it is normalized by itself.
    """

    def __init__(self, config: ModelConfig, inputs: LayerInputs, names: PartNames) -> None:
        width, hidden = config.num_hidden_layers * inputs.size, config.hidden_size
        self.inputs, self.num_layers, self.hidden_size = inputs, config.num_hidden_layers, hidden
        self.embedding = Embedding(names.model("inputs_embedding"), inputs.vocab_size, width)
        self.projection = Linear(names.model("inputs_projection"), width, hidden)
        # the projection is divided by the root of its inputs; before a norm, that only changes its eps
        self.norm = Norm(names.model("inputs_norm"), inputs.size, config.norm_eps * hidden)

    def parts(self) -> Iterator[Part]:
        """Yield everything that has tensors."""
        yield from (self.embedding, self.projection, self.norm)

    def forward(self, op: Operations[R, A], x: R) -> R:
        """Return rows of all layers' inputs, for the embedded tokens `x`."""
        half = 0.5**0.5
        inputs = op.embed(self.embedding, factor=self.inputs.size**0.5 * half)
        projected = op.linear(op.plain(x, self.hidden_size), self.projection)
        return op.add_norm(inputs, projected, self.norm, factor=half, parts=self.num_layers)
