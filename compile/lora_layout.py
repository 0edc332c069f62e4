"""Plan the room for LoRA adapters: which matrices they may change, and what adapters call these."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from radixlm.runtime.artifact.lora import LORA_BLOCK, LoraDType, LoraGroup, LoraInfo, LoraMatrix, LoraSource
from radixlm.runtime.artifact.model_config import Attention, Dense, ModelConfig
from radixlm.runtime.errors import InvalidParameter

from .families.family import Views
from .families.registry import FAMILIES
from .layers.attention import SelfAttention
from .layers.decoder import Decoder
from .layers.feed_forward import DenseFeedForward
from .ops.layers import Linear
from .weights.layout import round_up


def lora_layout(config: ModelConfig, max_loras: int, max_rank: int, dtype: LoraDType = "f32") -> LoraInfo:
    """Return the room for `max_loras` adapters of up to `max_rank` on attention and feed-forward matrices.

    Raises:
        InvalidParameter: the model has layers that adapters cannot change.
    """
    if (why := _unsupported_layers(config)) is not None:
        raise InvalidParameter(
            f"max_loras is {max_loras}, and LoRA adapters are for models of attention and dense feed-forward layers; "
            f"{config.architecture} has {why}: leave it out"
        )
    family = FAMILIES[config.architecture]
    decoder = family.decoder(config)
    huggingface = family.views(decoder, "huggingface", ())
    gguf = family.views(decoder, "gguf", ()) if family.gguf else {}

    def matrix(linear: Linear) -> LoraMatrix:
        source = _lora_source(huggingface[linear.name])
        assert source is not None, f"{linear.name} is no run of rows"
        in_gguf = _lora_source(gguf[linear.name]) if linear.name in gguf else None
        return LoraMatrix(name=linear.name, num_outputs=linear.num_outputs, huggingface=source, gguf=in_gguf)

    groups = (
        LoraGroup(num_inputs=linears[0].num_inputs, matrices=tuple(map(matrix, linears)))
        for linears in _matrices_by_input(decoder)
    )
    return LoraInfo(max_loras=max_loras, max_rank=round_up(max_rank, LORA_BLOCK), dtype=dtype, groups=tuple(groups))


def _unsupported_layers(config: ModelConfig) -> str | None:
    """Return a description of layers that adapters cannot change; None if a model has none."""
    if config.output != "logits":
        return "no output matrix, and makes embeddings"
    if config.mtp is not None:
        return "a multi-token prediction head"
    if any(not isinstance(layer.mixer, Attention) or layer.beside is not None for layer in config.layers):
        return "layers without plain attention"
    return None if all(isinstance(layer.ffn, Dense) for layer in config.layers) else "experts"


def _matrices_by_input(decoder: Decoder) -> Iterator[Sequence[Linear]]:
    """Yield groups of matrices that have the same input, layer by layer."""
    for layer in decoder.layers:
        mixer, ffn = layer.self_attn, layer.mlp
        assert isinstance(mixer, SelfAttention) and isinstance(ffn, DenseFeedForward)
        yield from (mixer.inputs, [mixer.o_proj], ffn.inputs, [ffn.down_proj])


def _lora_source(views: Views) -> LoraSource | None:
    """Return the stored rows of a matrix, as adapters have them; None if they are not consecutive."""
    if len(views) != 1 or views[0].step != 1:
        return None
    (view,) = views
    turns = {} if view.pairs is None else {"head_dim": view.pairs.head_dim, "rotary_dim": view.pairs.rotary_dim}
    return LoraSource(name=view.name, first_row=view.start, **turns)
