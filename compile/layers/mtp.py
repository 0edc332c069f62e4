"""A multi-token prediction head: one more layer, which drafts the token after the next (DeepSeek-V3, 2024).

The row of a token is made of its embedding and of what the model made of the token before it. So it depends on the
tokens up to its own and on no later one, as all keys and values do, and pages are shared with its own among them. The
row that it is made of is kept in the pool, too: a sequence can go on anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from radixlm.runtime.artifact.model_config import ModelConfig

from ..ops.layers import Embedding, Linear, Norm, Part
from ..ops.operations import Operations
from .decoder_layer import DecoderLayer
from .part_names import PartNames

R = TypeVar("R")
A = TypeVar("A")


class MTPHead:
    """The head of a model, around its `layer`. It shares the model's embedding and output matrix."""

    def __init__(self, config: ModelConfig, names: PartNames) -> None:
        index, hidden = config.num_hidden_layers, config.hidden_size

        def norm(role: str) -> Norm:
            return Norm(names.layer(index, role), hidden, config.norm_eps)

        self.config, self.layer = config, DecoderLayer(config, index, names)
        self.embedding_norm, self.hidden_norm = norm("mtp_embedding_norm"), norm("mtp_hidden_norm")
        self.norm = norm("mtp_norm")
        self.projection = Linear(names.layer(index, "mtp_projection"), hidden, 2 * hidden)
        self.kv_layer = len(config.kv_attentions)  # of the rows of the model's width

    def parts(self) -> Iterator[Part]:
        """Everything that has tensors of its own."""
        yield from (self.embedding_norm, self.hidden_norm, self.projection, self.norm)
        yield from self.layer.parts()

    def keep(self, op: Operations[R, A], x: R, norm: Norm, embedding: Embedding) -> None:
        """Have the pool get the head's rows of the step's tokens, of which `x` left the last layer."""
        self._keep_hidden(op, x, norm)
        self.layer.keep(op, self._entering(op, embedding))

    def draft(self, op: Operations[R, A], embedding: Embedding, output: Linear) -> R:
        """The logits of the token after the next. The next draft goes on from what the head made of this token."""
        config = self.config
        x = self.layer.forward(op, self._entering(op, embedding), None)
        logits = op.logits(x, self.norm, output, factor=config.logits_factor, soft_cap=config.logits_soft_cap)
        self._keep_hidden(op, x, self.norm)
        return logits

    def _keep_hidden(self, op: Operations[R, A], x: R, norm: Norm) -> None:
        op.keep_hidden(op.normalize(op.normalize(x, norm), self.hidden_norm), self.kv_layer)

    def _entering(self, op: Operations[R, A], embedding: Embedding) -> R:
        """What enters the layer; the embedding comes first in what is projected."""
        embedded = op.normalize(op.embed(embedding, factor=self.config.embedding_factor), self.embedding_norm)
        both = op.beside_previous(embedded, self.config.hidden_size, self.kv_layer)
        return op.linear(both, self.projection)
