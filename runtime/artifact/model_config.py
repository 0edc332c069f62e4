"""A decoder, layer by layer: what each computes, and with which numbers; every number range-checked.

Knows types and ranges; not how a layer is computed, nor what its tensors are called. Defaults are Llama's. A mixer, a
feed-forward layer and a stretching of rotary frequencies are tagged unions: `kind` says which.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

Dimension = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
VocabSize = Annotated[int, msgspec.Meta(ge=1, le=1 << 22)]
ContextLength = Annotated[int, msgspec.Meta(ge=16, le=1 << 22)]
Positive = Annotated[float, msgspec.Meta(gt=0.0, le=1e30)]
NotNegative = Annotated[float, msgspec.Meta(ge=0.0, le=1e30)]
Heads = Annotated[int, msgspec.Meta(ge=1, le=1024)]
HeadDim = Annotated[int, msgspec.Meta(ge=2, le=1024)]
Index = Annotated[int, msgspec.Meta(ge=0, le=1023)]
Count = Annotated[int, msgspec.Meta(ge=1, le=4096)]
Window = Annotated[int, msgspec.Meta(ge=1, le=1 << 22)]
Factors = Annotated[tuple[Positive, ...], msgspec.Meta(min_length=1, max_length=512)]
Architecture = Annotated[str, msgspec.Meta(pattern="^[a-z0-9_]{1,32}$")]
GatedFunction = Literal["silu_mul", "gelu_mul", "gelu_tanh_mul", "relu2_mul", "swiglu_clamped"]
UngatedFunction = Literal["silu", "gelu", "gelu_tanh", "relu2"]
Function = GatedFunction | UngatedFunction


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A struct that refuses fields that it does not have."""


class _Scaling(Strict, frozen=True, kw_only=True, tag_field="kind"):
    pass


class LinearScaling(_Scaling, frozen=True, kw_only=True, tag="linear"):
    """All frequencies are divided by `factor`."""

    factor: Positive


class Llama3Scaling(_Scaling, frozen=True, kw_only=True, tag="llama3"):
    """Slow frequencies are divided by `factor`, fast ones are kept, those between are blended (Llama 3.1)."""

    factor: Positive
    low_freq_factor: Positive
    high_freq_factor: Positive
    original_max_position_embeddings: ContextLength


class YarnScaling(_Scaling, frozen=True, kw_only=True, tag="yarn"):
    """YaRN (Peng et al., 2023). Without `attention_factor` it follows from `factor`, or from both `mscale`s."""

    factor: Positive
    original_max_position_embeddings: ContextLength
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    truncate: bool = True
    attention_factor: Positive | None = None
    mscale: NotNegative = 0.0
    mscale_all_dim: NotNegative = 0.0


class FactorsScaling(_Scaling, frozen=True, kw_only=True, tag="factors"):
    """A divisor for each frequency, as GGUF stores them in `rope_freqs.weight`."""

    factors: Factors
    attention_factor: Positive = 1.0


class LongRopeScaling(_Scaling, frozen=True, kw_only=True, tag="longrope"):
    """Divisors for contexts up to the original length, and for longer ones (Phi-3). The compiled context length
    chooses, never a prompt's: a manifest holds the choice, as `factors`."""

    short_factors: Factors
    long_factors: Factors
    original_max_position_embeddings: ContextLength
    attention_factor: Positive


class ProportionalScaling(_Scaling, frozen=True, kw_only=True, tag="proportional"):
    """Only the first `num_pairs` pairs turn, at the frequencies that they have among all (Gemma 4)."""

    num_pairs: Dimension
    factor: Positive = 1.0


class DynamicScaling(_Scaling, frozen=True, kw_only=True, tag="dynamic"):
    """A larger base: `theta * alpha ** (d / (d - 2))` (Hunyuan)."""

    alpha: Positive


RopeScaling = (
    LinearScaling
    | Llama3Scaling
    | YarnScaling
    | FactorsScaling
    | LongRopeScaling
    | ProportionalScaling
    | DynamicScaling
)


class Rope(Strict, frozen=True, kw_only=True):
    """Rotary positions (Su et al., 2021) of the first `rotary_dim` numbers of a head; halves are rotated."""

    theta: Positive
    rotary_dim: HeadDim
    scaling: RopeScaling | None = None


class QKNorm(Strict, frozen=True, kw_only=True):
    """Norm of queries and keys: of each head, with gains of all heads or of its own, or of all heads together."""

    over: Literal["head", "each_head", "width"] = "head"
    kind: Literal["rms", "layer"] = "rms"
    has_gain: bool = True
    after_rope: bool = False


class Gate(Strict, frozen=True, kw_only=True):
    """What attention gathers is multiplied by a function of the layer's input: number by number, or head by head."""

    over: Literal["element", "head"] = "element"
    function: Literal["sigmoid", "softplus"] = "sigmoid"


class Temperature(Strict, frozen=True, kw_only=True):
    """Queries are multiplied by `1 + beta * ln(1 + floor((position + shift) / original_length))`."""

    beta: Positive
    original_length: ContextLength
    shift: Literal[0, 1] = 0


class Attention(Strict, frozen=True, kw_only=True, tag_field="kind", tag="attention"):
    """Softmax attention of grouped query heads.

    Attributes:
        scale: what scores are multiplied with.
        bias: queries, keys and values have one; `output_bias`: so has the output.
        value_norm: values get an RMS norm of each head, without gain.
        window: a token sees itself and `window - 1` before it; `chunk`: only its own chunk of so many positions.
        soft_cap: scores become `soft_cap * tanh(score / soft_cap)`.
        sinks: each head has a logit that takes part in the softmax, and has no value.
        keys_are_values: values are what `k_proj` gives, before norm and rotation.
        shared_kv: the layer whose keys and values are read; this one then has none of its own.
    """

    num_heads: Heads
    num_kv_heads: Heads
    head_dim: HeadDim
    scale: Positive
    rope: Rope | None = None
    bias: bool = False
    output_bias: bool = False
    qk_norm: QKNorm | None = None
    value_norm: bool = False
    window: Window | None = None
    chunk: Window | None = None
    soft_cap: Positive | None = None
    sinks: bool = False
    gate: Gate | None = None
    temperature: Temperature | None = None
    keys_are_values: bool = False
    shared_kv: Index | None = None


class LatentAttention(Strict, frozen=True, kw_only=True, tag_field="kind", tag="latent_attention"):
    """Multi-head latent attention (DeepSeek-V2, 2024): a token keeps one row for all heads.

    The row is a latent vector of `latent_dim` numbers, normalized, and behind it a rotated key. A head's query is
    multiplied by its own matrix before it meets the rows, and what it gathers of the latent vectors by another.

    Attributes:
        scale: what scores are multiplied with.
        rope: of the rotated key, and of as many numbers at the end of each query; `neighbours`: of a checkpoint's rows
            for these, neighbours rotate against each other.
        plain_dim: the numbers of a query before those; `value_dim`: of what a head hands to the output matrix.
        query_dim: queries are made of a normalized vector of so many numbers; None of the layer's input itself.
        bias: what makes the latent vectors has one; `output_bias`: so has the output.
    """

    num_heads: Heads
    latent_dim: HeadDim
    plain_dim: HeadDim
    value_dim: HeadDim
    scale: Positive
    rope: Rope
    query_dim: Dimension | None = None
    neighbours: bool = True
    bias: bool = False
    output_bias: bool = False
    temperature: Temperature | None = None

    @property
    def num_kv_heads(self) -> int:
        """All heads read the same row."""
        return 1

    @property
    def head_dim(self) -> int:
        """Numbers of the row that a token keeps; of these the first `latent_dim` are what heads gather."""
        return self.latent_dim + self.rope.rotary_dim

    @property
    def query_size(self) -> int:
        """Numbers of a head's query before its matrix."""
        return self.plain_dim + self.rope.rotary_dim

    # What only `Attention` may have.

    @property
    def window(self) -> None:
        """A token sees all before it."""

    @property
    def chunk(self) -> None:
        """As `window`."""

    @property
    def soft_cap(self) -> None:
        """Scores are not bent."""

    @property
    def sinks(self) -> bool:
        """There are none."""
        return False

    @property
    def shared_kv(self) -> None:
        """Each layer keeps rows of its own."""


class Dense(Strict, frozen=True, kw_only=True, tag_field="kind", tag="dense"):
    """A feed-forward layer; functions that end in `_mul` have a gate."""

    intermediate_size: Dimension
    function: Function = "silu_mul"
    bias: bool = False

    @property
    def is_gated(self) -> bool:
        """Whether the function has two arguments."""
        return is_gated(self.function)


class Router(Strict, frozen=True, kw_only=True):
    """Which experts get a token, and with which weights.

    Attributes:
        scores: softmax or sigmoid of all logits, or of those that were chosen, by their logits.
        bias: the linear has one; `selection_bias`: one is added to scores to choose, and not to weigh.
        num_groups: experts are chosen from the best `num_active_groups` groups of so many, by the sum of a group's two
            best scores, or by its best.
        renormalise: weights are divided by their sum, which counts as `least_sum` at least.
        scale: weights are multiplied with it; `expert_scale`: and with a number of each expert.
        input_norm: logits are of the layer's input, normalised without gain, times a vector, over the root of its size.
    """

    scores: Literal["softmax", "sigmoid", "softmax_of_chosen", "sigmoid_of_chosen"] = "softmax"
    bias: bool = False
    selection_bias: bool = False
    num_groups: Count = 1
    num_active_groups: Count = 1
    group_score: Literal["sum_of_two", "best"] = "sum_of_two"
    renormalise: bool = True
    least_sum: NotNegative = 0.0
    scale: Positive = 1.0
    expert_scale: bool = False
    input_norm: bool = False


class SharedExpert(Strict, frozen=True, kw_only=True):
    """A feed-forward layer that gets every token; with a `gate`, times the sigmoid of a linear of one output."""

    intermediate_size: Dimension
    gate: bool = False


class Experts(Strict, frozen=True, kw_only=True, tag_field="kind", tag="experts"):
    """Feed-forward layers of which a token gets `num_active`; `input_scaled` weighs their input, not their output."""

    num_experts: Count
    num_active: Count
    intermediate_size: Dimension
    function: Function = "silu_mul"
    router: Router = Router()
    shared: SharedExpert | None = None
    bias: bool = False
    input_scaled: bool = False


class DenseAndExperts(Strict, frozen=True, kw_only=True, tag_field="kind", tag="dense_and_experts"):
    """A dense layer and experts beside each other; both outputs are normalized and added, and experts have a norm of
    their own before them (Gemma 4)."""

    dense: Dense
    experts: Experts

    @property
    def intermediate_size(self) -> int:
        """Numbers between the matrices that every token passes."""
        return self.dense.intermediate_size


Mixer = Attention | LatentAttention


class LayerConfig(Strict, frozen=True, kw_only=True):
    """A mixer and a feed-forward layer, each beside a residual.

    Attributes:
        norms: of what enters a branch (`pre`), of what leaves it (`post`), of both (`sandwich`); in `parallel` layers
            one norm feeds both branches, in `parallel_two` each has its own.
        post_norm_eps: of norms behind a branch, where it is not the model's.
        layer_scalar: the layer's output is multiplied by a stored number.
    """

    mixer: Mixer
    ffn: Dense | Experts | DenseAndExperts | None
    norms: Literal["pre", "post", "sandwich", "parallel", "parallel_two"] = "pre"
    post_norm_eps: Positive | None = None
    layer_scalar: bool = False

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
        residual_factor: what a branch is multiplied with before it is added.
        logits_factor: what logits are multiplied with; then `logits_soft_cap` bends them as attention's bends scores.
        layer_inputs: what layers get of each token beside what the layer before them gives.
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

    @property
    def num_hidden_layers(self) -> int:
        """How many layers."""
        return len(self.layers)

    @property
    def attentions(self) -> tuple[Mixer, ...]:
        """The attention of each layer that has it."""
        return tuple(layer.mixer for layer in self.layers)

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
    def kv_attentions(self) -> tuple[Mixer, ...]:
        """The attention of each layer that keeps keys and values of its own, in the order of `kv_layer`."""
        return tuple(attention for attention in self.attentions if attention.shared_kv is None)

    def kv_layer(self, layer: int) -> int:
        """Which of the layers that have keys and values of their own this one reads."""
        shared = self.attentions[layer].shared_kv
        if shared is not None:
            return self.kv_layer(shared)
        return sum(attention.shared_kv is None for attention in self.attentions[:layer])

    @property
    def why_not_partial(self) -> str | None:
        """Why this model cannot serve a prefix with a part of its rows; None if it can."""
        attentions = self.attentions
        if any(isinstance(attention, LatentAttention) for attention in attentions):
            return "its layers keep one latent row of each token, and neither keys nor values of single heads"
        if any(attention.window or attention.chunk for attention in attentions):
            return "some layers see a window of the tokens only"
        if any(attention.shared_kv is not None for attention in attentions):
            return "some layers read the keys and values of others"
        shapes = {(each.num_heads, each.num_kv_heads, each.head_dim) for each in attentions}
        return f"its layers have {len(shapes)} different shapes of keys and values" if len(shapes) > 1 else None


def is_gated(function: Function) -> bool:
    """Whether a function multiplies what a gate lets through."""
    return function.endswith("_mul") or function == "swiglu_clamped"
