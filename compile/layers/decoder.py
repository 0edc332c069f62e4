"""A decoder: embedding, layers of two branches beside a residual, the last norm, the output matrix.

Layers may get numbers of a second embedding beside their rows (Gemma 4). Tensors are named as checkpoints do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from radixlm.runtime.artifact.model_config import (
    Dense,
    DenseAndExperts,
    Experts,
    GatedDelta,
    LatentAttention,
    LayerInputs,
    Mamba2,
    Mixer,
    ModelConfig,
    ShortConvolution,
)

from ..ops.layers import Embedding, Linear, Norm, Part, Vector
from ..ops.operations import Operations
from .attention import LatentSelfAttention, SelfAttention
from .feed_forward import DenseAndExpertsFeedForward, DenseFeedForward, ExpertsFeedForward
from .part_names import PartNames
from .recurrent import GatedDeltaMixer, Mamba2Mixer, ShortConvolutionMixer

R = TypeVar("R")
A = TypeVar("A")


class DecoderLayer:
    """Layer `index`: a mixer, called `self_attn`, and feed-forward, with the norms that its configuration asks for."""

    def __init__(self, config: ModelConfig, index: int, names: PartNames) -> None:
        self.layer = layer = config.layers[index]
        self.factor, self.hidden_size = config.residual_factor, config.hidden_size

        def norm(role: str, wanted: bool, eps: float = config.norm_eps) -> Norm | None:
            return model_norm(config, names.layer(index, role), eps) if wanted else None

        has_post, has_ffn = layer.norms in ("post", "sandwich"), layer.ffn is not None
        post_eps = layer.post_norm_eps or config.norm_eps
        assert layer.beside is None or layer.norms == "pre"
        self.self_attn = _mixer(config, layer.mixer, index, names)
        self.beside = None if layer.beside is None else _mixer(config, layer.beside, index, names)
        self.mlp = _feed_forward(config, index, names)
        self.attention_norm = norm("attention_norm", layer.norms != "post")
        self.attention_post_norm = norm("attention_post_norm", has_post, post_eps)
        self.ffn_norm = norm("ffn_norm", has_ffn and layer.norms not in ("post", "parallel"))
        self.ffn_post_norm = norm("ffn_post_norm", has_ffn and has_post, post_eps)
        inputs = config.layer_inputs
        self.input = None if inputs is None else OneLayerInput(config, inputs, index, names)
        self.scalar = Vector(names.layer(index, "layer_scalar"), 1) if layer.layer_scalar else None

    def parts(self) -> Iterator[Part]:
        """Everything that has tensors."""
        norms = (self.attention_norm, self.attention_post_norm, self.ffn_norm, self.ffn_post_norm)
        yield from (part for part in (*norms, self.scalar) if part is not None)
        yield from self.self_attn.parts()
        if self.beside is not None:
            yield from self.beside.parts()
        if self.mlp is not None:
            yield from self.mlp.parts()
        if self.input is not None:
            yield from self.input.parts()

    def forward(self, op: Operations[R, A], x: R, inputs: R | None) -> R:
        """x after this layer; `inputs` are what all layers get beside it."""
        if self.layer.norms in ("parallel", "parallel_two"):
            x = self._parallel(op, x)
        else:
            x = self._mix(op, x)
            if self.mlp is not None:
                x = self._branch(op, x, self.mlp, self._feed(op, x), self.ffn_post_norm, self.layer.ffn_factor)
        if self.input is not None and inputs is not None:
            x = self.input.forward(op, x, inputs)
        return x if self.scalar is None else op.scale(x, self.scalar)

    def _mix(self, op: Operations[R, A], x: R) -> R:
        """The mixer, and what is beside it; neither is added before both have read x."""
        entering = self._entering(op, x, self.attention_norm)
        mixed = self.self_attn.forward(op, entering)
        beside = None if self.beside is None else self.beside.forward(op, entering)
        x = self._branch(op, x, self.self_attn, mixed, self.attention_post_norm, self.layer.mixer_factor)
        return x if beside is None else self._branch(op, x, self.beside, beside, None, self.layer.beside_factor)

    def _feed(self, op: Operations[R, A], x: R) -> Any:
        assert self.mlp is not None
        return self.mlp.forward(op, self._entering(op, x, self.ffn_norm), x)

    def _entering(self, op: Operations[R, A], x: R, norm: Norm | None) -> A:
        return op.plain(x, self.hidden_size) if norm is None else op.norm(x, norm)

    def _branch(self, op: Operations[R, A], x: R, branch: Any, value: Any, post_norm: Norm | None, factor: float) -> R:
        factor *= self.factor
        if post_norm is None:
            added: R = branch.add(op, x, value, factor)
            return added
        return op.add_norm(x, branch.finish(op, value), post_norm, factor=factor)

    def _parallel(self, op: Operations[R, A], x: R) -> R:
        """Both branches read the same x; neither is added before both have read it."""
        assert self.mlp is not None and self.attention_norm is not None
        normed = op.norm(x, self.attention_norm)
        gathered = self.self_attn.forward(op, normed)
        entering = normed if self.ffn_norm is None else op.norm(x, self.ffn_norm)
        fed: Any = self.mlp.forward(op, entering, x)
        x = self._branch(op, x, self.self_attn, gathered, None, self.layer.mixer_factor)
        return self._branch(op, x, self.mlp, fed, None, self.layer.ffn_factor)


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

    def forward(self, op: Operations[R, A]) -> R:
        """The whole model."""
        config = self.config
        x = op.embed(self.embed_tokens, factor=config.embedding_factor)
        if config.embedding_norm:
            x = op.normalize(x, self.embedding_norm)
        inputs = None if self.layer_inputs is None else self.layer_inputs.forward(op, x)
        for layer in self.layers:
            x = layer.forward(op, x, inputs)
        return op.logits(x, self.norm, self.lm_head, factor=config.logits_factor, soft_cap=config.logits_soft_cap)


def model_norm(config: ModelConfig, name: str, eps: float) -> Norm:
    """A norm over the model's width, of the model's kind."""
    return Norm(
        name, config.hidden_size, eps, "rms" if config.norm == "rms" else "layer", has_bias=config.norm == "layer_bias"
    )


TokenMixer = SelfAttention | LatentSelfAttention | ShortConvolutionMixer | GatedDeltaMixer | Mamba2Mixer


def _mixer(config: ModelConfig, mixer: Mixer, index: int, names: PartNames) -> TokenMixer:
    match mixer:
        case Mamba2() as mamba:
            return Mamba2Mixer(config, mamba, index, names)
        case GatedDelta() as delta:
            return GatedDeltaMixer(config, delta, index, names)
        case ShortConvolution() as convolution:
            return ShortConvolutionMixer(config, convolution, index, names)
        case LatentAttention() as latent:
            return LatentSelfAttention(config, latent, index, names)
        case attention:
            return SelfAttention(config, attention, index, names)


FeedForward = DenseFeedForward | ExpertsFeedForward | DenseAndExpertsFeedForward


def _feed_forward(config: ModelConfig, index: int, names: PartNames) -> FeedForward | None:
    match config.layers[index].ffn:
        case Dense() as dense:
            return DenseFeedForward(config, dense, index, names)
        case Experts() as experts:
            return ExpertsFeedForward(config, experts, index, names)
        case DenseAndExperts() as both:
            return DenseAndExpertsFeedForward(config, both, index, names)
    return None


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
