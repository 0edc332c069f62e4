"""A Hugging Face `config.json` as a ModelConfig.

Knows the keys that all families share and both spellings of RoPE's parameters. A setting that would change the
arithmetic and is not supported is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from radixlm.runtime.artifact.manifest import ModelConfig
from radixlm.runtime.errors import UnsupportedArchitecture, UnsupportedTensor

from ..models.registry import MODELS, SUPPORTED
from .checkpoint import check_heads, checked

Json = Mapping[str, Any]

_CLASSES = {name: key for key, model in MODELS.items() for name in model.huggingface_types}
_CLASS_OF_TYPE = {type_: name for model in MODELS.values() for name, type_ in model.huggingface_types.items()}
_ROPE_THETA = 10000.0  # what all classes take where the configuration has none


def model_config(label: str, config: Json) -> ModelConfig:
    """Raises UnsupportedArchitecture or -Tensor by name of the setting, CorruptSource for bad numbers."""
    class_name = _class_name(label, config)
    _refuse_settings(label, config)
    hidden_size, num_heads = config.get("hidden_size"), config.get("num_attention_heads")
    head_dim = config.get("head_dim")
    if head_dim is None and isinstance(hidden_size, int) and isinstance(num_heads, int) and num_heads > 0:
        head_dim = hidden_size // num_heads
    rope = _rope_parameters(config)
    result = checked(
        label,
        {
            "architecture": _CLASSES[class_name],
            "vocab_size": config.get("vocab_size"),
            "hidden_size": hidden_size,
            "intermediate_size": config.get("intermediate_size"),
            "num_hidden_layers": config.get("num_hidden_layers"),
            "num_attention_heads": num_heads,
            "num_key_value_heads": config.get("num_key_value_heads") or num_heads,
            "head_dim": head_dim,
            "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
            "rope_theta": rope.get("rope_theta") or config.get("rope_theta") or _ROPE_THETA,
            "rope_scaling": _rope_scaling(label, rope),
            "max_position_embeddings": config.get("max_position_embeddings"),
            "tie_word_embeddings": config.get("tie_word_embeddings", False),
            **MODELS[_CLASSES[class_name]].settings(class_name, config),
        },
        ModelConfig,
    )
    check_heads(label, result)
    return result


def _class_name(label: str, config: Json) -> str:
    declared = config.get("architectures") or [_CLASS_OF_TYPE.get(str(config.get("model_type")))]
    if isinstance(declared, list) and declared[0] in _CLASSES:
        return str(declared[0])
    name = declared[0] if isinstance(declared, list) and declared[0] else config.get("model_type")
    raise UnsupportedArchitecture(f"{label}: architecture {name!r} is not supported; {SUPPORTED}")


def _refuse_settings(label: str, config: Json) -> None:
    for key in ("attention_bias", "mlp_bias"):  # Qwen2's bias on q, k and v is no key
        if config.get(key):
            raise UnsupportedArchitecture(f"{label}: {key} is not supported; {SUPPORTED}")
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedArchitecture(f"{label}: hidden_act {config['hidden_act']!r} is not supported, only silu")
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedArchitecture(f"{label}: partial_rotary_factor is not supported; {SUPPORTED}")
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        raise UnsupportedTensor(
            f"{label}: weights quantized by {method} are not supported; take the original model, or a GGUF file"
        )


def _rope_parameters(config: Json) -> Json:
    """`rope_parameters` of newer files holds all; `rope_scaling` of older ones lies beside `rope_theta`."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return rope if isinstance(rope, Mapping) else {"rope_type": rope}


def _rope_scaling(label: str, rope: Json) -> dict[str, Any] | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return {"type": "linear", "factor": rope.get("factor")}
    if kind == "llama3":
        keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        return {"type": "llama3", **{key: rope.get(key) for key in keys}}
    raise UnsupportedArchitecture(f"{label}: RoPE scaling {kind!r} is not supported, only linear and llama3")
