"""What llama.cpp's converter does to dense families: their metadata, and what it changes in tensors beside their names.

Facts from llama.cpp's `conversion/`; a family that is missing here has no converter, or no second witness.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np

Config = Mapping[str, Any]
Value = bool | int | float | str | list[Any]
Tensors = Iterable[tuple[str, np.ndarray]]
Change = Callable[[Config, str, np.ndarray], Tensors]


@dataclass(frozen=True)
class Converter:
    """`extra` gives metadata beyond the usual; `change` gives what a tensor becomes.

    A name that begins with = is GGUF's own; all others are mapped as the package `gguf` does.
    """

    model_arch: gguf.MODEL_ARCH  # whose names of tensors are the family's
    extra: Callable[[Config], Mapping[str, Value]] = lambda c: {}
    change: Change = lambda c, name, weight: [(name, weight)]
    more: Callable[[Config], Tensors] = lambda c: ()  # tensors that no checkpoint has
    name: str = ""  # of the architecture, where it is not that of `model_arch`

    @property
    def architecture(self) -> str:
        return self.name or gguf.MODEL_ARCH_NAMES[self.model_arch]

    def metadata(self, c: Config) -> dict[str, Value]:
        """Keys without the architecture before them."""
        return {**usual(c), **self.extra(c)}

    def tensors(self, c: Config, tensors: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
        for name, weight in tensors.items():
            yield from self.change(c, name, weight)
        yield from self.more(c)


def usual(c: Config) -> dict[str, Value]:
    """What the converter writes for any family."""
    rope = rope_settings(c)
    found: dict[str, Value] = {
        "block_count": c["num_hidden_layers"],
        "context_length": c["max_position_embeddings"],
        "embedding_length": c["hidden_size"],
        "feed_forward_length": c["intermediate_size"],
        "attention.head_count": c["num_attention_heads"],
        "attention.head_count_kv": c["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": c.get("rms_norm_eps", c.get("norm_eps")),
        "rope.freq_base": float(rope["rope_theta"]),
        "vocab_size": c["vocab_size"],
    }
    if "layer_norm_eps" in c:
        found["attention.layer_norm_epsilon"] = c["layer_norm_eps"]
    if c.get("head_dim"):
        found |= {f"attention.{kind}_length": c["head_dim"] for kind in ("key", "value")}
    kind = rope.get("rope_type", rope.get("type"))
    if kind in ("linear", "yarn"):
        found |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    if kind == "yarn":
        found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        for key in ("beta_fast", "beta_slow"):
            if key in rope:
                found[f"rope.scaling.yarn_{key}"] = float(rope[key])
    return found


def rope_settings(c: Config) -> dict[str, Any]:
    """RoPE's settings of the layers that see everything, in one table."""
    scaling = c.get("rope_parameters") or c.get("rope_scaling") or {}
    scaling = scaling.get("full_attention", scaling)
    return {"rope_theta": c.get("rope_theta", 10000.0), **scaling}


def head_dim(c: Config) -> int:
    return int(c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"])


def windows(c: Config) -> dict[str, Value]:
    """Which layers slide, and how far they see."""
    if c.get("sliding_window") is None:
        return {}
    return {
        "attention.sliding_window": c["sliding_window"],
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in c["layer_types"]],
    }


def permuted(c: Config, name: str, weight: np.ndarray) -> Tensors:
    """LlamaModel: rows of q and k where the two halves of each head take turns."""
    for kind, heads in (("q", c["num_attention_heads"]), ("k", c["num_key_value_heads"])):
        if f".{kind}_proj." in name:
            halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
            weight = halves.swapaxes(1, 2).reshape(weight.shape)
    yield name, weight


def plus_one(c: Config, name: str, weight: np.ndarray) -> Tensors:
    """Gemma: gains are stored with the one that they are added to."""
    yield name, weight + np.float32(1) if name.endswith("norm.weight") else weight


def rotary(fraction: float) -> Callable[[Config], Mapping[str, Value]]:
    return lambda c: {"rope.dimension_count": int(head_dim(c) * c.get("partial_rotary_factor", fraction))}


def granite(c: Config) -> dict[str, Value]:
    return {
        "rope.dimension_count": head_dim(c),
        "attention.scale": c["attention_multiplier"],
        "embedding_scale": c["embedding_multiplier"],
        "residual_scale": c["residual_multiplier"],
        "logit_scale": c["logits_scaling"],
    }


def phi3(c: Config) -> dict[str, Value]:
    original = c["original_max_position_embeddings"]
    factor = c["max_position_embeddings"] / original
    return {
        **rotary(1.0)(c),
        "rope.scaling.original_context_length": original,
        "rope.scaling.attn_factor": math.sqrt(1 + math.log(factor) / math.log(original)),
        "attention.sliding_window": c["sliding_window"],
    }


def phi3_factors(c: Config) -> Tensors:
    for kind in ("long", "short"):
        yield f"=rope_factors_{kind}.weight", np.array(c["rope_scaling"][f"{kind}_factor"], np.float32)


def llama3_factors(c: Config) -> Tensors:
    """What divides each frequency, for the rope type llama3."""
    rope = rope_settings(c)
    if rope.get("rope_type") != "llama3":
        return
    size = head_dim(c)
    turns = rope["rope_theta"] ** -(np.arange(0, size, 2) / size) * rope["original_max_position_embeddings"]
    turns /= 2 * np.pi
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    yield "=rope_freqs.weight", (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)


def ministral3(c: Config) -> dict[str, Value]:
    rope = c["rope_parameters"]
    return {
        "rope.dimension_count": head_dim(c),
        "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
        "attention.temperature_scale": rope["llama_4_scaling_beta"],
    }


def hunyuan(c: Config) -> dict[str, Value]:
    """The base is stretched once and for all."""
    size = head_dim(c)
    stretched = c["rope_theta"] * c["rope_scaling"]["alpha"] ** (size / (size - 2))
    return {"rope.freq_base": stretched, "rope.scaling.type": "none", "rope.scaling.factor": 1.0}


def stablelm(c: Config) -> dict[str, Value]:
    return {"use_parallel_residual": c["use_parallel_residual"], **rotary(0.25)(c)}


def stablelm_norms(c: Config, name: str, weight: np.ndarray) -> Tensors:
    """The norms of heads are one tensor of queries and one of keys."""
    yield name.replace("_layernorm.norms.", "_layernorm."), weight


def cohere2(c: Config) -> dict[str, Value]:
    return {
        "logit_scale": c["logit_scale"],
        "attention.sliding_window": c["sliding_window"],
        "rope.dimension_count": head_dim(c),
        "rope.scaling.type": "none",
    }


def gemma2(c: Config) -> dict[str, Value]:
    return {
        "attn_logit_softcapping": c["attn_logit_softcapping"],
        "final_logit_softcapping": c["final_logit_softcapping"],
        "attention.sliding_window": c["sliding_window"],
    }


def gemma3(c: Config) -> dict[str, Value]:
    return {"attention.sliding_window": c["sliding_window"], "rope.freq_base_swa": c["rope_local_base_freq"]}


ARCH = gguf.MODEL_ARCH
DENSE: dict[str, Converter] = {
    "llama": Converter(ARCH.LLAMA, rotary(1.0), permuted, more=llama3_factors),
    "mistral": Converter(ARCH.LLAMA, rotary(1.0), permuted),
    "qwen2": Converter(ARCH.QWEN2),
    "qwen3": Converter(ARCH.QWEN3),
    "phi3": Converter(ARCH.PHI3, phi3, more=phi3_factors),
    "granite": Converter(ARCH.GRANITE, granite, permuted),
    "smollm3": Converter(ARCH.SMOLLM3, rotary(1.0), permuted),
    "olmo2": Converter(ARCH.OLMO2),
    "olmo3": Converter(ARCH.OLMO2, windows),
    "glm4": Converter(ARCH.GLM4, rotary(0.5)),
    "ministral3": Converter(ARCH.MISTRAL3, ministral3, permuted),
    "exaone4": Converter(ARCH.EXAONE4, windows, more=llama3_factors),
    "hunyuan_v1_dense": Converter(ARCH.HUNYUAN_DENSE, hunyuan),
    "seed_oss": Converter(ARCH.SEED_OSS),
    "ernie4_5": Converter(ARCH.ERNIE4_5),
    "stablelm": Converter(ARCH.STABLELM, stablelm, stablelm_norms),
    "cohere2": Converter(ARCH.COHERE2, cohere2),
    "gemma2": Converter(ARCH.GEMMA2, gemma2, plus_one),
    "gemma3_text": Converter(ARCH.GEMMA3, gemma3, plus_one),
}
