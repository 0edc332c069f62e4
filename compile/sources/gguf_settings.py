"""GGUF's metadata under the keys of config.json, so that a family reads both.

Knows llama.cpp's keys. A key that is not listed is found by its own name after the architecture, `qwen3.some.key`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from radixlm.runtime.errors import CorruptSource, UnsupportedArchitecture

from ..families.registry import FAMILIES, unsupported
from ..families.settings import Settings
from .gguf_file import GGUFFile

ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
_KEYS: Mapping[str, str] = {  # config.json's key -> GGUF's, after the architecture
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "max_position_embeddings": "context_length",
    "rope_theta": "rope.freq_base",
    "rope_local_base_freq": "rope.freq_base_swa",
    "rotary_dim": "rope.dimension_count",
    "kv_lora_rank": "attention.kv_lora_rank",
    "q_lora_rank": "attention.q_lora_rank",
    "qk_rope_head_dim": "rope.dimension_count",
    "sliding_window": "attention.sliding_window",
    "sliding_window_pattern": "attention.sliding_window_pattern",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "num_kv_shared_layers": "attention.shared_kv_layers",
    "num_local_experts": "expert_count",
    "num_experts": "expert_count",
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "norm_topk_prob": "expert_weights_norm",
    "routed_scaling_factor": "expert_weights_scale",
    "first_k_dense_replace": "leading_dense_block_count",
    "conv_L_cache": "shortconv.l_cache",
}
_SCALING_KEYS: Mapping[str, str] = {
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "attention_factor": "rope.scaling.attn_factor",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}
_ARCHITECTURES = {name: key for key, family in FAMILIES.items() for name in family.gguf}


def gguf_settings(file: GGUFFile) -> Settings:
    """Return the settings of a file.

    Raises:
        UnsupportedArchitecture: the family is unknown.
        CorruptSource: the embedding is missing.
    """
    metadata, label = file.metadata, str(file.path)
    architecture = metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise unsupported(label, architecture)

    def get(key: str) -> Any:
        value = metadata.get(f"{architecture}.{key}")
        return value[0] if isinstance(value, list) and len(set(value)) == 1 else value  # the same value in each layer

    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CorruptSource(f"{label}: token_embd.weight is missing; the file is incomplete, fetch it again")
    begin = f"{architecture}."
    values = {key.removeprefix(begin): get(key.removeprefix(begin)) for key in metadata if key.startswith(begin)}
    values |= {key: get(stored) for key, stored in _KEYS.items()}
    values["vocab_size"] = int(embedding.shape[1])
    values["tie_word_embeddings"] = "output.weight" not in file.tensors
    values["sliding_window"] = values["sliding_window"] or None
    values["rope_scaling"] = _rope_scaling(get)
    if not values["kv_lora_rank"]:  # otherwise values are a part of keys
        _check_heads(label, values, get("attention.value_length"))
    return Settings(
        label,
        "gguf",
        _ARCHITECTURES[architecture],
        str(architecture),
        values,
        frozenset(file.tensors),
        {name.removesuffix(".weight"): _factors(file, name) for name in ROPE_FACTORS if name in file.tensors},
    )


def _check_heads(label: str, values: Mapping[str, Any], value_length: int | None) -> None:
    """Raise UnsupportedArchitecture if the sizes of a head's keys and values differ.

    Args:
        label: begins the message.
        value_length: size of a head's values; None: not stated.
    """
    head_dim = values["head_dim"]
    if head_dim is not None and value_length not in (None, head_dim):
        raise UnsupportedArchitecture(
            f"{label}: keys of {head_dim} numbers and values of {value_length} are not supported; take another model"
        )


def _rope_scaling(get: Any) -> dict[str, Any] | None:
    """Return the RoPE scaling.

    With tensors of factors, the kind may be missing even if there is an attention factor.
    """
    kind = get("rope.scaling.type") or ("linear" if get("rope.scale_linear") else "none")
    scaling = {key: get(stored) for key, stored in _SCALING_KEYS.items()}
    given = {key: value for key, value in scaling.items() if value is not None}
    if kind == "none":
        return {**given, "rope_type": kind} if given else None
    return {**given, "rope_type": kind, "factor": scaling["factor"] or get("rope.scale_linear") or 1.0}


def _factors(file: GGUFFile, name: str) -> tuple[float, ...]:
    """Return RoPE's divisors that a tensor stores. Raises CorruptSource if it is not a float32 vector."""
    tensor = file.tensors[name]
    if tensor.tensor_type.name != "F32" or len(tensor.shape) != 1:
        raise CorruptSource(f"{file.path}: {name} is not a row of numbers in F32")
    return tuple(file.blocks(name).view("<f4").tolist())
