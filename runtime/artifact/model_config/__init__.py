"""The configuration of a model: its layers, embeddings and output, with every number range-checked.

Defaults are Llama's.

Mixers, feed-forward layers and RoPE scalings are tagged unions: `kind` is the tag. Knows the parts of layers; not how
one is computed, nor the names of its tensors.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from .attention import (
    AnyAttention,
    Attention,
    DynamicScaling,
    FactorsScaling,
    Gate,
    LatentAttention,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    QKNorm,
    Rope,
    RopeScaling,
    Temperature,
    YarnScaling,
)
from .feed_forward import Dense, DenseAndExperts, Experts, Function, Router, SharedExpert, UngatedFunction, is_gated
from .ranges import Architecture, ContextLength, Dimension, HeadDim, Heads, Index, Positive, Strict, VocabSize
from .recurrent import GatedDelta, Mamba2, Recurrent, ShortConvolution

__all__ = [
    "STATE_ITEM_BYTES",
    "AnyAttention",
    "Attention",
    "ContextLength",
    "Dense",
    "DenseAndExperts",
    "DenseOutput",
    "Dimension",
    "DynamicScaling",
    "EncoderInput",
    "Experts",
    "FactorsScaling",
    "Function",
    "Gate",
    "GatedDelta",
    "HeadDim",
    "Heads",
    "LatentAttention",
    "LayerConfig",
    "LayerInputs",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "Mamba2",
    "Mixer",
    "ModelConfig",
    "Positive",
    "ProportionalScaling",
    "QKNorm",
    "Recurrent",
    "Rope",
    "RopeScaling",
    "Router",
    "ScoreHead",
    "SharedExpert",
    "ShortConvolution",
    "Strict",
    "Temperature",
    "UngatedFunction",
    "YarnScaling",
    "is_gated",
]


STATE_ITEM_BYTES = 4  # states are float32

Mixer = AnyAttention | Recurrent


class LayerConfig(Strict, frozen=True, kw_only=True):
    """A mixer and a feed-forward layer, each with a residual connection.

    Attributes:
        norms: of each branch's input (`pre`), of its output (`post`), of both (`sandwich`), or of its sum with the
            residual (`sum`). In `parallel` layers one norm feeds both branches, in `parallel_two` each has its own. In
            `pre_ffn` layers only the feed-forward layer has one.
        post_norm_eps: of norms after a branch, if it differs from the model's.
        layer_scalar: the layer's output is multiplied by a stored number.
        beside: a recurrent mixer that reads the same normed input as the attention, and is added to it; for `pre`
            layers.
        mixer_factor, beside_factor, ffn_factor: multiply each branch before it is added.
    """

    mixer: Mixer
    ffn: Dense | Experts | DenseAndExperts | None
    beside: Recurrent | None = None
    norms: Literal["pre", "post", "sandwich", "sum", "parallel", "parallel_two", "pre_ffn"] = "pre"
    post_norm_eps: Positive | None = None
    layer_scalar: bool = False
    mixer_factor: Positive = 1.0
    beside_factor: Positive = 1.0
    ffn_factor: Positive = 1.0

    @property
    def recurrent(self) -> Recurrent | None:
        """The mixer that keeps a state; None if the layer has none."""
        return self.mixer if isinstance(self.mixer, Recurrent) else self.beside

    @property
    def experts(self) -> Experts | None:
        """The experts; None if the layer has none."""
        match self.ffn:
            case (Experts() as experts) | DenseAndExperts(experts=experts):
                return experts
        return None


class LayerInputs(Strict, frozen=True, kw_only=True):
    """Additional input of every layer: `size` numbers per token (Gemma 4).

    They come from a second embedding, plus a projection of the first. At its end a layer passes them through its own
    gate, and adds their projection.
    """

    size: Dimension
    vocab_size: VocabSize
    function: UngatedFunction = "gelu_tanh"


class EncoderInput(Strict, frozen=True, kw_only=True):
    """The sum that enters an encoder: a token's embedding and the vectors that are set here, then normalized.

    Attributes:
        positions: each position has a learned vector; `first_position` is the row of a sequence's first token.
        token_type: all tokens have the vector of the first token type.
        separator_id: tokens after the first one of this id have the vector of the second token type instead: they are
            the second text of a pair.
    """

    positions: bool = False
    first_position: Index = 0
    token_type: bool = False
    separator_id: Index | None = None


class DenseOutput(Strict, frozen=True, kw_only=True):
    """A linear layer behind the last norm of an embedding model, of so many outputs."""

    size: Dimension
    bias: bool = False


class ScoreHead(Strict, frozen=True, kw_only=True):
    """The head of a reranker, which makes one number of a text's hidden states: a linear layer with one output.

    Attributes:
        pooling: which hidden state enters: that of the first token, or the mean of all.
        function: a linear layer of `hidden_size` outputs comes before, followed by this function.
        dense_bias, bias: of that layer, and of the last one.
        norm: after the function there is a norm like that of the layers.
    """

    pooling: Literal["cls", "mean"] = "cls"
    function: UngatedFunction = "tanh"
    dense_bias: bool = True
    norm: bool = False
    bias: bool = True


class ModelConfig(Strict, frozen=True, kw_only=True):
    """The sizes of a decoder, under Hugging Face's names, and its layers.

    Attributes:
        architecture: the family's key in the registry.
        norm: of the layers and the last one: root mean square, or LayerNorm without or with a bias.
        embedding_factor: multiplies embeddings; `embedding_norm`: then they get an RMS norm without gain.
        residual_factor: multiplies a branch before it is added, in addition to the layer's own factor.
        logits_factor: multiplies logits; then `logits_soft_cap` caps them like attention's `soft_cap` caps scores.
        encoder_input: what is added to embeddings before they are normalized, in models such as BERT.
        layer_inputs: additional input of the layers for each token.
        mtp: the layer of a multi-token prediction head, which drafts tokens (DeepSeek-V3, 2024); it has attention.
        output: what is computed of a token: logits, or in embedding models the hidden state after the last norm.
        dense: outputs of linear layers that hidden states then pass, one after the other.
        score: the head that makes one number of the hidden states of a text, in rerankers.
    """

    architecture: Architecture
    vocab_size: VocabSize
    hidden_size: Dimension
    layers: Annotated[tuple[LayerConfig, ...], msgspec.Meta(min_length=1, max_length=1024)]
    norm_eps: Positive
    max_position_embeddings: ContextLength
    tie_word_embeddings: bool = False
    norm: Literal["rms", "layer", "layer_bias"] = "rms"
    embedding_factor: Positive = 1.0
    embedding_norm: bool = False
    residual_factor: Positive = 1.0
    logits_factor: Positive = 1.0
    logits_soft_cap: Positive | None = None
    output_bias: bool = False  # the output matrix has a bias
    encoder_input: EncoderInput | None = None
    layer_inputs: LayerInputs | None = None
    mtp: LayerConfig | None = None
    output: Literal["logits", "hidden"] = "logits"
    dense: tuple[DenseOutput, ...] = ()
    score: ScoreHead | None = None

    @property
    def num_outputs(self) -> int:
        """Numbers that are computed of a token: logits of the vocabulary, a hidden state, or a score."""
        if self.output == "logits":
            return self.vocab_size
        if self.score is not None:
            return 1
        return self.dense[-1].size if self.dense else self.hidden_size

    @property
    def has_last_norm(self) -> bool:
        """False if the last layer's own norm is the last one."""
        return self.layers[-1].norms != "sum"

    @property
    def is_bidirectional(self) -> bool:
        """True if tokens see those after them: a text is computed in one step, and nothing of it is reused."""
        return any(attention.bidirectional for attention in self.attentions)

    @property
    def num_hidden_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def all_layers(self) -> tuple[LayerConfig, ...]:
        """The layers, followed by that of an MTP head."""
        return self.layers if self.mtp is None else (*self.layers, self.mtp)

    @property
    def attentions(self) -> tuple[AnyAttention, ...]:
        """The attention of each layer that has one, an MTP head's included."""
        return tuple(layer.mixer for layer in self.all_layers if not isinstance(layer.mixer, Recurrent))

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's state, over all recurrent layers: float32, in the order of layers; 0 without any."""
        return self.state_layer(len(self.layers)) * STATE_ITEM_BYTES

    def state_layer(self, layer: int) -> int:
        """Return the offset of a layer's numbers in a state."""
        recurrent = (each.recurrent for each in self.layers[:layer])
        return sum(each.state_size(self.hidden_size) for each in recurrent if each is not None)

    @property
    def num_attention_heads(self) -> int:
        """Number of query heads of the first attention."""
        return self.attentions[0].num_heads

    @property
    def num_key_value_heads(self) -> int:
        """Number of KV heads of the first attention."""
        return self.attentions[0].num_kv_heads

    @property
    def head_dim(self) -> int:
        """Numbers in a key of one head of the first attention."""
        return self.attentions[0].head_dim

    @property
    def intermediate_size(self) -> int:
        """The largest intermediate size of a feed-forward layer that every token passes."""
        return max((layer.ffn.intermediate_size for layer in self.layers if layer.ffn is not None), default=0)

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The rotary positions of all layers, each once, in order of the first layer that has them."""
        return tuple(dict.fromkeys(each.rope for each in self.attentions if each.rope is not None))

    @property
    def kv_attentions(self) -> tuple[AnyAttention, ...]:
        """The attention of each layer that keeps KV of its own, in the order of `kv_layer`."""
        return tuple(attention for attention in self.attentions if attention.shared_kv is None)

    def kv_layer(self, layer: int) -> int:
        """Return the index, among layers with KV of their own, of the one whose KV this layer reads."""
        mixer = self.all_layers[layer].mixer
        assert not isinstance(mixer, Recurrent), f"layer {layer} reads no keys and values"
        if mixer.shared_kv is not None:
            return self.kv_layer(mixer.shared_kv)
        before = (each.mixer for each in self.layers[:layer])
        return sum(not isinstance(mixer, Recurrent) and mixer.shared_kv is None for mixer in before)

    @property
    def why_not_partial(self) -> str | None:
        """Reason why this model cannot serve a prefix with a part of its rows; None if it can."""
        if self.is_bidirectional:
            return "its tokens see those after them, so that no prefix is reused"
        if self.state_bytes:
            return "some layers keep a state of all tokens, which has no part for a few of them"
        if self.mtp is not None:
            return "its MTP head keeps rows of other shapes"
        attentions = self.attentions
        if any(isinstance(attention, LatentAttention) for attention in attentions):
            return "its layers keep one latent row of each token, and neither keys nor values of single heads"
        if any(attention.window or attention.chunk for attention in attentions):
            return "some layers see a window of the tokens only"
        if any(attention.shared_kv is not None for attention in attentions):
            return "some layers read the keys and values of others"
        shapes = {(each.num_heads, each.num_kv_heads, each.head_dim) for each in attentions}
        return f"its layers have {len(shapes)} different shapes of keys and values" if len(shapes) > 1 else None
