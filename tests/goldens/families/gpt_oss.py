"""gpt-oss: sinks, biases everywhere, experts whose gates are clamped; as floats, and as MXFP4 like the hub's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property

import numpy as np

from ..tiny_models import Part
from .family import Config, Off, TinyFamily
from .moe import NUM_EXPERTS, top
from .parts import NO_WINDOW, QKV, QKV_BIAS, attention, bias, config, decoder, matrix, sizes


def _gpt_oss_attention(c: Config, layer: int, prefix: str) -> Iterator[Part]:
    yield from attention(biases=(*QKV, "o_proj"))(c, layer, prefix)
    yield f"{prefix}self_attn.sinks", (c["num_attention_heads"],), 1.0, 1.0


def _gpt_oss_experts(c: Config, layer: int, prefix: str) -> Iterator[Part]:
    """Wide enough that gates reach the limit; columns of gate and up take turns, and rows are inputs."""
    hidden, inner, at = c["hidden_size"], c["intermediate_size"], f"{prefix}mlp."
    yield matrix(f"{at}router", NUM_EXPERTS, hidden)
    yield bias(f"{at}router", NUM_EXPERTS)
    yield f"{at}experts.gate_up_proj", (NUM_EXPERTS, hidden, 2 * inner), 0.0, 3.5 * hidden**-0.5
    yield f"{at}experts.gate_up_proj_bias", (NUM_EXPERTS, 2 * inner), 0.0, 0.5
    yield f"{at}experts.down_proj", (NUM_EXPERTS, inner, hidden), 0.0, 0.1 * inner**-0.5
    yield f"{at}experts.down_proj_bias", (NUM_EXPERTS, hidden), 0.0, 0.3


_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_OF_EXPERTS = re.compile(r"\.experts\.(gate_up|down)_proj$")
_GROUP = 32  # inputs that share a power of two


class Mxfp4Family(TinyFamily):
    """A checkpoint whose experts are stored as the hub's: `NAME_blocks`, two codes a byte, and `NAME_scales`.

    `tensors` are the numbers that they stand for, in the shapes that transformers gives them.
    """

    @cached_property
    def tensors(self) -> dict[str, np.ndarray]:
        drawn = super().tensors
        return {name: _worth(*_mxfp4(weight)) if _OF_EXPERTS.search(name) else weight for name, weight in drawn.items()}

    def stored(self, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Bytes `[experts, outputs, inputs / 32, 16]` and `[experts, outputs, inputs / 32]`."""
        found = {}
        for name, weight in tensors.items():
            if _OF_EXPERTS.search(name):
                codes, exponents = _mxfp4(weight)
                found[f"{name}_blocks"] = codes[..., ::2] | codes[..., 1::2] << 4
                found[f"{name}_scales"] = exponents
            else:
                found[name] = weight
        return found


def _mxfp4(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes uint8 `[experts, outputs, groups, 32]` and exponents uint8 `[experts, outputs, groups]` of rows of inputs.

    The largest number of a group is between 4 and 8 times its power of two; each becomes the nearest of the values.
    """
    turned = weight.swapaxes(1, 2)
    groups = turned.reshape(*turned.shape[:2], -1, _GROUP)
    exponents = np.floor(np.log2(np.maximum(np.abs(groups).max(axis=-1), 2.0**-40))) - 2
    scaled = groups / np.exp2(exponents)[..., None]
    codes = np.abs(scaled[..., None] - _VALUES).argmin(axis=-1).astype(np.uint8)
    return codes, (exponents + 127).astype(np.uint8)


def _worth(codes: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """What codes stand for, float32 `[experts, inputs, outputs]`."""
    values = _VALUES[codes] * np.exp2(exponents.astype(np.float32) - 127)[..., None]
    flat = values.reshape(*values.shape[:2], -1)
    return np.ascontiguousarray(flat.swapaxes(1, 2), np.float32)


def _gpt_oss(name: str, seed: int, truncate: bool, mxfp4: bool = False) -> TinyFamily:
    """Released models do not truncate YaRN's borders. llama.cpp always does, so it is asked about another one."""
    yarn = {"rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0}
    quantization = {"modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"], "quant_method": "mxfp4"}
    return (Mxfp4Family if mxfp4 else TinyFamily)(
        name,
        seed,
        config(
            "GptOssForCausalLM",
            "gpt_oss",
            sizes(64, 64, 2, 4, 2, 32),
            attention_bias=True,
            layer_types=["sliding_attention", "full_attention"],
            num_local_experts=NUM_EXPERTS,
            num_experts_per_tok=3,
            experts_per_token=3,
            rope_scaling={**yarn, "original_max_position_embeddings": 64, "truncate": truncate},
            sliding_window=16,
            swiglu_limit=7.0,
            **({"quantization_config": quantization} if mxfp4 else {}),
        ),
        parts=decoder(_gpt_oss_attention, _gpt_oss_experts),
        offs=(
            NO_WINDOW,
            QKV_BIAS,
            top(),
            Off("sinks", tensors={"sinks": -1e4}),
            Off("swiglu_limit", config={"swiglu_limit": 1e4}),
            Off("router_bias", tensors={r"router\.bias": 0.0}),
            Off("gate_up_bias", tensors={"gate_up_proj_bias": 0.0}),
            Off("down_bias", tensors={"down_proj_bias": 0.0}),
            Off("rope_scaling", config={"rope_scaling": None}),
            Off("truncate", config={"rope_scaling|truncate": not truncate}),
        ),
        no_witness="" if truncate else "llama.cpp truncates YaRN's borders to whole dimensions",
    )


GPT_OSS = (
    _gpt_oss("gpt_oss", 31, truncate=False),
    _gpt_oss("gpt_oss-truncated", 159, truncate=True),
    _gpt_oss("gpt_oss-mxfp4", 1391, truncate=False, mxfp4=True),
)
