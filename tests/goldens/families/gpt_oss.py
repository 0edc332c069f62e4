"""gpt-oss: sinks, biases everywhere, experts whose gates are clamped. Its experts are floats here, not MXFP4."""

from __future__ import annotations

from collections.abc import Iterator

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


def _gpt_oss(name: str, seed: int, truncate: bool) -> TinyFamily:
    """Released models do not truncate YaRN's borders. llama.cpp always does, so it is asked about another one."""
    yarn = {"rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0}
    return TinyFamily(
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
)
