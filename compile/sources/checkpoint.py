"""The tensors that a checkpoint must have, and configurations held to their ranges.

Knows the Llama family's names and shapes under Hugging Face's spelling; knows no file format.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from radixlm.runtime.errors import CorruptSource, UnsupportedArchitecture
from radixlm.runtime.manifest import ModelConfig

from .source import TensorInfo

ARCHITECTURES = ("llama", "qwen2")
SUPPORTED = "supported are Llama 1, 2 and 3 (also SmolLM2, TinyLlama, Mistral) and Qwen2"

# Texts of tokens that end a reply, whatever the metadata declares (llama.cpp's end-of-generation list).
END_OF_REPLY = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<EOT>",
)

T = TypeVar("T")


def checked(label: str, values: Mapping[str, Any], type_: type[T]) -> T:
    """`values` as `type_`, every number in its range; raises CorruptSource that names one which is not."""
    try:
        return msgspec.convert(dict(values), type_)
    except msgspec.ValidationError as error:
        raise CorruptSource(f"{label}: {error}; the source's configuration cannot be right") from error


def check_heads(label: str, config: ModelConfig) -> None:
    """Raise CorruptSource where query heads do not divide among key-value heads, or a head's size is odd."""
    if config.num_attention_heads % config.num_key_value_heads:
        raise CorruptSource(
            f"{label}: {config.num_attention_heads} attention heads cannot share "
            f"{config.num_key_value_heads} key-value heads"
        )
    if config.head_dim % 2:
        raise CorruptSource(f"{label}: a head of {config.head_dim} values cannot be rotated in pairs")


def check_tensors(label: str, config: ModelConfig, tensors: Mapping[str, TensorInfo]) -> None:
    """Raise CorruptSource for a missing tensor or a wrong shape, UnsupportedArchitecture for one too many."""
    expected = expected_shapes(config)
    for name, shape in expected.items():
        if name not in tensors:
            raise CorruptSource(f"{label}: {name} is missing; the file is incomplete, fetch it again")
        if tensors[name].shape != shape:
            raise CorruptSource(
                f"{label}: {name} has shape {list(tensors[name].shape)}, "
                f"the configuration asks for {list(shape)}"
            )
    for name in tensors:
        if name not in expected:
            raise UnsupportedArchitecture(
                f"{label}: {name} has no place in the {config.architecture} architecture; {SUPPORTED}"
            )


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors of a model of these dimensions; matrices are `[out, in]`."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query = config.num_attention_heads * config.head_dim
    key_value = config.num_key_value_heads * config.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (key_value, hidden),
        "self_attn.v_proj.weight": (key_value, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config.attention_bias:
        layer |= {
            "self_attn.q_proj.bias": (query,),
            "self_attn.k_proj.bias": (key_value,),
            "self_attn.v_proj.bias": (key_value,),
        }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for index in range(config.num_hidden_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes
