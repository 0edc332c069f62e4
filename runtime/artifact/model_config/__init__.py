"""What a model is: its layers and what stands around them; every number range-checked. Defaults are Llama's.

A mixer, a feed-forward layer and a stretching of rotary frequencies are tagged unions: `kind` says which. Knows what
layers are made of; not how one is computed, nor what its tensors are called.
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
from .ranges import Architecture, ContextLength, Dimension, HeadDim, Heads, Positive, Strict, VocabSize
from .recurrent import GatedDelta, Mamba2, Recurrent, ShortConvolution

__all__ = [
    "STATE_ITEM_BYTES",
    "AnyAttention",
    "Attention",
    "ContextLength",
    "Dense",
    "DenseAndExperts",
    "Dimension",
    "DynamicScaling",
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
    "SharedExpert",
    "ShortConvolution",
    "Strict",
    "Temperature",
    "YarnScaling",
    "is_gated",
]


STATE_ITEM_BYTES = 4  # states are float32

Mixer = AnyAttention | Recurrent


class LayerConfig(Strict, frozen=True, kw_only=True):
    """A mixer and a feed-forward layer, each beside a residual.

    Attributes:
        norms: of what enters a branch (`pre`), of what leaves it (`post`), of both (`sandwich`); in `parallel` layers
            one norm feeds both branches, in `parallel_two` each has its own.
        post_norm_eps: of norms behind a branch, where it is not the model's.
        layer_scalar: the layer's output is multiplied by a stored number.
        beside: of a `pre` layer with attention, what keeps a state, reads the same normed input and is added, too.
        mixer_factor, beside_factor, ffn_factor: what each branch is multiplied with before it is added.
    """

    mixer: Mixer
    ffn: Dense | Experts | DenseAndExperts | None
    beside: Recurrent | None = None
    norms: Literal["pre", "post", "sandwich", "parallel", "parallel_two"] = "pre"
    post_norm_eps: Positive | None = None
    layer_scalar: bool = False
    mixer_factor: Positive = 1.0
    beside_factor: Positive = 1.0
    ffn_factor: Positive = 1.0

    @property
    def recurrent(self) -> Recurrent | None:
        """What keeps a state, if the layer has it."""
        return self.mixer if isinstance(self.mixer, Recurrent) else self.beside

    @property
    def experts(self) -> Experts | None:
        """The experts, if the layer has some."""
        match self.ffn:
            case (Experts() as experts) | DenseAndExperts(experts=experts):
                return experts
        return None


class LayerInputs(Strict, frozen=True, kw_only=True):
    """Every layer gets `size` numbers of each token: of a second embedding, and of the first, projected (Gemma 4).

    At its end a layer lets them through a gate of its own, and adds their projection.
    """

    size: Dimension
    vocab_size: VocabSize
    function: UngatedFunction = "gelu_tanh"


class ModelConfig(Strict, frozen=True, kw_only=True):
    """The sizes of a decoder, under Hugging Face's names, and its layers.

    Attributes:
        architecture: the family's key in the registry.
        norm: of the layers and the last one: root mean square, or LayerNorm without or with a bias.
        embedding_factor: what embeddings are multiplied with; `embedding_norm`: then they get an RMS norm without gain.
        residual_factor: what a branch is multiplied with before it is added, beside the layer's own factor.
        logits_factor: what logits are multiplied with; then `logits_soft_cap` bends them as attention's bends scores.
        layer_inputs: what layers get of each token beside what the layer before them gives.
        mtp: the layer of a multi-token prediction head, which drafts tokens (DeepSeek-V3, 2024); it has attention.
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
    output_bias: bool = False  # of the output matrix
    layer_inputs: LayerInputs | None = None
    mtp: LayerConfig | None = None

    @property
    def num_hidden_layers(self) -> int:
        """How many layers."""
        return len(self.layers)

    @property
    def all_layers(self) -> tuple[LayerConfig, ...]:
        """The layers, and behind them that of an MTP head."""
        return self.layers if self.mtp is None else (*self.layers, self.mtp)

    @property
    def attentions(self) -> tuple[AnyAttention, ...]:
        """The attention of each layer that has it, an MTP head's included."""
        return tuple(layer.mixer for layer in self.all_layers if not isinstance(layer.mixer, Recurrent))

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's state, over all recurrent layers: float32, in the order of layers; 0 without any."""
        return self.state_layer(len(self.layers)) * STATE_ITEM_BYTES

    def state_layer(self, layer: int) -> int:
        """Numbers of a state before those of this layer."""
        recurrent = (each.recurrent for each in self.layers[:layer])
        return sum(each.state_size(self.hidden_size) for each in recurrent if each is not None)

    @property
    def num_attention_heads(self) -> int:
        """Query heads of the first attention."""
        return self.attentions[0].num_heads

    @property
    def num_key_value_heads(self) -> int:
        """KV heads of the first attention."""
        return self.attentions[0].num_kv_heads

    @property
    def head_dim(self) -> int:
        """Numbers of a key that a token keeps for a head of the first attention."""
        return self.attentions[0].head_dim

    @property
    def intermediate_size(self) -> int:
        """The most numbers between the matrices of a feed-forward layer that every token passes."""
        return max((layer.ffn.intermediate_size for layer in self.layers if layer.ffn is not None), default=0)

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The rotary positions of all layers, each once, in order of the first layer that has them."""
        return tuple(dict.fromkeys(each.rope for each in self.attentions if each.rope is not None))

    @property
    def kv_attentions(self) -> tuple[AnyAttention, ...]:
        """The attention of each layer that keeps keys and values of its own, in the order of `kv_layer`."""
        return tuple(attention for attention in self.attentions if attention.shared_kv is None)

    def kv_layer(self, layer: int) -> int:
        """Which of the layers that have keys and values of their own this one reads."""
        mixer = self.all_layers[layer].mixer
        assert not isinstance(mixer, Recurrent), f"layer {layer} reads no keys and values"
        if mixer.shared_kv is not None:
            return self.kv_layer(mixer.shared_kv)
        before = (each.mixer for each in self.layers[:layer])
        return sum(not isinstance(mixer, Recurrent) and mixer.shared_kv is None for mixer in before)

    @property
    def why_not_partial(self) -> str | None:
        """Why this model cannot serve a prefix with a part of its rows; None if it can."""
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
