"""A multi-token prediction (MTP) head: one more layer, which drafts the token after the next (DeepSeek-V3, 2024).

The input of a token is its embedding and the model's hidden state of the token before it. It therefore depends on the
tokens up to its own and on no later one, as all KV does. Shared pages include the head's KV. The hidden state is stored
in the pool, too, so that a sequence can continue anywhere.
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
    """The MTP head of a model, with its `layer`. It shares the model's embedding and output matrix."""

    def __init__(self, config: ModelConfig, names: PartNames) -> None:
        index, hidden = config.num_hidden_layers, config.hidden_size

        def norm(role: str) -> Norm:
            return Norm(names.layer(index, role), hidden, config.norm_eps)

        self.config, self.layer = config, DecoderLayer(config, index, names)
        self.embedding_norm, self.hidden_norm = norm("mtp_embedding_norm"), norm("mtp_hidden_norm")
        self.norm = norm("mtp_norm")
        self.projection = Linear(names.layer(index, "mtp_projection"), hidden, 2 * hidden)
        self.kv_layer = len(config.kv_attentions)  # the KV layer of the hidden states

    def parts(self) -> Iterator[Part]:
        """Yield everything with tensors of its own."""
        yield from (self.embedding_norm, self.hidden_norm, self.projection, self.norm)
        yield from self.layer.parts()

    def keep(self, op: Operations[R, A], x: R, norm: Norm, embedding: Embedding) -> None:
        """Append the head's KV of the step's tokens to the pool; `x` is the last layer's output."""
        self._keep_hidden(op, x, norm)
        self.layer.keep(op, self._entering(op, embedding))

    def draft(self, op: Operations[R, A], embedding: Embedding, output: Linear) -> R:
        """Return the logits of the token after the next. The next draft continues from the head's output."""
        config = self.config
        x = self.layer.forward(op, self._entering(op, embedding), None)
        logits = op.logits(x, self.norm, output, factor=config.logits_factor, soft_cap=config.logits_soft_cap)
        self._keep_hidden(op, x, self.norm)
        return logits

    def _keep_hidden(self, op: Operations[R, A], x: R, norm: Norm) -> None:
        """Store the normalized hidden states of the step in the pool."""
        op.keep_hidden(op.normalize(op.normalize(x, norm), self.hidden_norm), self.kv_layer)

    def _entering(self, op: Operations[R, A], embedding: Embedding) -> R:
        """Return the layer's input; the projection takes the embedding first."""
        embedded = op.normalize(op.embed(embedding, factor=self.config.embedding_factor), self.embedding_norm)
        both = op.concat_previous(embedded, self.config.hidden_size, self.kv_layer)
        return op.linear(both, self.projection)
