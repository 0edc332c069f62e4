"""Families of which some layers have a state in place of keys and values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ..tiny_models import Part
from .family import Config, Off, TinyFamily
from .moe import NUM_EXPERTS, SELECTION_BIAS, experts, top
from .parts import QK_NORM, attention, bias, config, decoder, gain, gated_mlp, matrix, sizes, whole

LFM2_NORMS = ("q_layernorm", "k_layernorm")
LFM2_NAMES = {"o_proj": "out_proj", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
CONVOLUTION = Off("convolution", tensors={r"conv\.conv\.weight": 0.0})
LFM2_QK_NORM = Off("qk_norm", modules=r"self_attn\.[qk]_layernorm$")
LFM2_QK_GAIN = Off("qk_gain", tensors={r"\.[qk]_layernorm": 1.5})


def renamed(parts: Iterator[Part]) -> Iterator[Part]:
    """Parts under LFM2's names."""
    for name, *rest in parts:
        *before, part, suffix = name.split(".")
        yield ".".join([*before, LFM2_NAMES.get(part, part), suffix]), *rest


def convolution(c: Config, prefix: str) -> Iterator[Part]:
    """A short convolution under a layer's `conv.`."""
    hidden, size = c["hidden_size"], c["conv_L_cache"]
    for name, rows in (("in_proj", 3 * hidden), ("out_proj", hidden)):
        yield matrix(f"{prefix}conv.{name}", rows, hidden)
        if c["conv_bias"]:
            yield bias(f"{prefix}conv.{name}", rows)
    yield f"{prefix}conv.conv.weight", (hidden, 1, size), 0.0, size**-0.5
    if c["conv_bias"]:
        yield bias(f"{prefix}conv.conv", hidden)


def lfm2_mixer(c: Config, layer: int, prefix: str) -> Iterator[Part]:
    if c["layer_types"][layer] == "conv":
        yield from convolution(c, prefix)
    else:
        yield from renamed(attention(qk_norm=LFM2_NORMS)(c, layer, prefix))


def lfm2_inner(c: Config) -> int:
    """Numbers between the matrices of a dense layer."""
    size = c["intermediate_size"]
    if not c.get("block_auto_adjust_ff_dim"):
        return int(size)
    block = c["block_multiple_of"]
    return -(-int(c["block_ffn_dim_multiplier"] * int(2 * size / 3)) // block) * block


def lfm2_mlp(c: Config, layer: int, prefix: str) -> Iterator[Part]:
    yield from renamed(gated_mlp(c, layer, prefix, name="feed_forward", inner=lfm2_inner(c)))


def lfm2_feed(c: Config, layer: int, prefix: str) -> Iterator[Part]:
    if layer < c["num_dense_layers"]:
        yield from lfm2_mlp(c, layer, prefix)
    else:
        names = ("w1", "w3", "w2")
        yield from experts(at="feed_forward.", names=names, selection_bias="expert_bias")(c, layer, prefix)


def lfm2(feed: Callable[[Config, int, str], Iterator[Part]]) -> Callable[[Config], Iterator[Part]]:
    return decoder(lfm2_mixer, feed, norms=("operator_norm", "ffn_norm"), last_norm="embedding_norm")


def lfm2_config(architecture: str, model_type: str, kinds: str, **changes: Any) -> dict[str, Any]:
    """`kinds` says of each layer whether it has a convolution or attention."""
    found = config(
        architecture,
        model_type,
        whole(sizes(128, 200, len(kinds), 4, 2, 32)),
        norm_eps=1e-5,
        layer_types=["conv" if kind == "c" else "full_attention" for kind in kinds],
        **{"conv_L_cache": 3, "conv_bias": False, "tie_word_embeddings": True, **changes},
    )
    return {key: value for key, value in found.items() if key not in ("rms_norm_eps", "hidden_act")}


def delta_rule(c: Config, prefix: str) -> Iterator[Part]:
    """A gated delta rule under a layer's `linear_attn.`; what it keeps fades by a fifth a token, more or less."""
    hidden, heads = c["hidden_size"], c["linear_num_value_heads"]
    values = heads * c["linear_value_head_dim"]
    convolved = 2 * c["linear_num_key_heads"] * c["linear_key_head_dim"] + values
    size, at = c["linear_conv_kernel_dim"], f"{prefix}linear_attn."
    for name, rows in (("qkv", convolved), ("z", values), ("b", heads), ("a", heads)):
        yield matrix(f"{at}in_proj_{name}", rows, hidden)
    yield f"{at}conv1d.weight", (convolved, 1, size), 0.0, 1.5 * size**-0.5
    yield f"{at}dt_bias", (heads,), -2.0, 0.7
    yield f"{at}A_log", (heads,), 0.5, 0.5
    yield gain(f"{at}norm", c["linear_value_head_dim"])
    yield matrix(f"{at}out_proj", hidden, values)


def gated_heads(c: Config, layer: int, prefix: str) -> Iterator[Part]:
    """Attention whose queries have gates beside them, head by head."""
    for name, shape, mean, std in attention(qk_norm=("q_norm", "k_norm"), neutral=0.0)(c, layer, prefix):
        yield name, (2 * shape[0], *shape[1:]) if name.endswith("q_proj.weight") else shape, mean, std


def qwen35_mixer(c: Config, layer: int, prefix: str) -> Iterator[Part]:
    if c["layer_types"][layer] == "linear_attention":
        yield from delta_rule(c, prefix)
    else:
        yield from gated_heads(c, layer, prefix)


def qwen35_config(architecture: str, model_type: str, kinds: str, **changes: Any) -> dict[str, Any]:
    """`kinds` says of each layer whether it has the delta rule or attention."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]}
    return config(
        architecture,
        model_type,
        sizes(128, 160, len(kinds), 4, 2, 32),
        **{
            "attention_bias": False,
            "layer_types": ["linear_attention" if kind == "d" else "full_attention" for kind in kinds],
            "full_attention_interval": 3,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 6,
            "rope_parameters": rope,
            **changes,
        },
    )


def stacked_experts(c: Config, layer: int, prefix: str) -> Iterator[Part]:
    """A router, experts as two stacks, and one that every token passes through a gate."""
    hidden, inner, at = c["hidden_size"], c["moe_intermediate_size"], f"{prefix}mlp."
    yield matrix(f"{at}gate", NUM_EXPERTS, hidden)
    yield f"{at}experts.gate_up_proj", (NUM_EXPERTS, 2 * inner, hidden), 0.0, hidden**-0.5
    yield f"{at}experts.down_proj", (NUM_EXPERTS, hidden, inner), 0.0, inner**-0.5
    yield from shared_expert(c, layer, prefix)


def shared_expert(c: Config, layer: int, prefix: str) -> Iterator[Part]:
    inner = c["shared_expert_intermediate_size"]
    yield from gated_mlp(c, layer, prefix, name="mlp.shared_expert", inner=inner)
    yield matrix(f"{prefix}mlp.shared_expert_gate", 1, c["hidden_size"])


def next_experts(c: Config, layer: int, prefix: str) -> Iterator[Part]:
    yield from experts()(c, layer, prefix)
    yield from shared_expert(c, layer, prefix)


def next_mixer(c: Config, layer: int, prefix: str) -> Iterator[Part]:
    """As Qwen3.5's, but that all which enters the delta rule is two matrices."""
    hidden = c["hidden_size"]
    for part in qwen35_mixer(c, layer, prefix):
        name, shape = part[0], part[1]
        if name.endswith("in_proj_qkv.weight"):
            yield matrix(
                f"{prefix}linear_attn.in_proj_qkvz",
                shape[0] + c["linear_num_value_heads"] * c["linear_value_head_dim"],
                hidden,
            )
        elif name.endswith("in_proj_b.weight"):
            yield matrix(f"{prefix}linear_attn.in_proj_ba", 2 * shape[0], hidden)
        elif not name.endswith(("in_proj_z.weight", "in_proj_a.weight")):
            yield part


MOE_SIZES = {
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 96,
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": 3,
}
MOE_OFFS = (
    top(),
    Off("shared_expert", tensors={r"shared_expert\.down_proj": 0.0}),
    Off("shared_gate", tensors={r"shared_expert_gate": 0.0}),
)
DELTA_OFFS = (
    Off("decay", tensors={r"linear_attn\.A_log": -20.0}),
    Off("time_step", tensors={r"linear_attn\.in_proj_a": 0.0}),
    Off("learning", tensors={r"linear_attn\.in_proj_b": 0.0}),
    Off("earlier_tokens", tensors={r"linear_attn\.conv1d": 0.5}),
    Off("delta_gain", tensors={r"linear_attn\.norm": 1.0}),
    Off("delta_norm", modules=r"linear_attn\.norm$"),
)


def mamba(c: Config, prefix: str) -> Iterator[Part]:
    """Mamba-2 under a layer's `mamba.`; what it keeps fades by a fifth a token, more or less."""
    hidden, heads, groups = c["hidden_size"], c["mamba_n_heads"], c["mamba_n_groups"]
    width = heads * c["mamba_d_head"]
    convolved, size, at = width + 2 * groups * c["mamba_d_state"], c["mamba_d_conv"], f"{prefix}mamba."
    yield matrix(f"{at}in_proj", width + convolved + heads, hidden)
    yield f"{at}conv1d.weight", (convolved, 1, size), 0.0, 1.5 * size**-0.5
    if c["mamba_conv_bias"]:
        yield bias(f"{at}conv1d", convolved)
    yield f"{at}dt_bias", (heads,), -2.0, 0.7
    yield f"{at}A_log", (heads,), 0.5, 0.5
    yield f"{at}D", (heads,), 1.0, 0.5
    yield gain(f"{at}norm", width)
    yield matrix(f"{at}out_proj", hidden, width)


def granite_mixer(c: Config, layer: int, prefix: str) -> Iterator[Part]:
    if c["layer_types"][layer] == "full_attention":
        yield from attention()(c, layer, prefix)
    else:
        yield from mamba(c, prefix)


def granite_feed(c: Config, layer: int, prefix: str) -> Iterator[Part]:
    hidden, inner, shared = c["hidden_size"], c["intermediate_size"], c["shared_intermediate_size"]
    if c["num_local_experts"]:
        at = f"{prefix}block_sparse_moe."
        yield matrix(f"{at}router.layer", NUM_EXPERTS, hidden)
        yield f"{at}input_linear.weight", (NUM_EXPERTS, 2 * inner, hidden), 0.0, hidden**-0.5
        yield f"{at}output_linear.weight", (NUM_EXPERTS, hidden, inner), 0.0, inner**-0.5
    yield matrix(f"{prefix}shared_mlp.input_linear", 2 * shared, hidden)
    yield matrix(f"{prefix}shared_mlp.output_linear", hidden, shared)


def granite_config(kinds: str, **changes: Any) -> dict[str, Any]:
    """`kinds` says of each layer whether it has Mamba-2 or attention."""
    return config(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        whole(sizes(128, 64, len(kinds), 4, 2, 32)),
        **{
            "attention_bias": False,
            "attention_multiplier": 0.25,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 4.0,
            "tie_word_embeddings": True,
            "layer_types": ["linear_attention" if kind == "m" else "full_attention" for kind in kinds],
            "mamba_chunk_size": 64,
            "mamba_conv_bias": True,
            "mamba_d_conv": 4,
            "mamba_d_head": 32,
            "mamba_d_state": 48,
            "mamba_expand": 2,
            "mamba_n_groups": 1,
            "mamba_n_heads": 8,
            "mamba_proj_bias": False,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "position_embedding_type": "nope",
            "shared_intermediate_size": 160,
            **changes,
        },
    )


def nemotron_layers(c: Config) -> Iterator[Part]:
    """A decoder each of whose layers is a norm and one branch, under `mixer.`."""
    hidden, inner = c["hidden_size"], c["intermediate_size"]
    sizes_of_mamba = {
        "mamba_n_heads": c["mamba_num_heads"],
        "mamba_d_head": c["mamba_head_dim"],
        "mamba_n_groups": c["n_groups"],
        "mamba_d_state": c["ssm_state_size"],
        "mamba_d_conv": c["conv_kernel"],
        "mamba_conv_bias": c["use_conv_bias"],
    }
    yield "backbone.embeddings.weight", (c["vocab_size"], hidden), 0.0, 1.5
    for layer, kind in enumerate(c["layers_block_type"]):
        at = f"backbone.layers.{layer}."
        yield gain(f"{at}norm", hidden)
        if kind == "mlp":
            yield from ungated(f"{at}mixer", hidden, inner)
            continue
        if kind == "moe":
            yield matrix(f"{at}mixer.gate", NUM_EXPERTS, hidden)
            yield f"{at}mixer.gate.e_score_correction_bias", (NUM_EXPERTS,), 0.0, 0.3
            for expert in range(NUM_EXPERTS):
                yield from ungated(f"{at}mixer.experts.{expert}", hidden, c["moe_intermediate_size"])
            yield from ungated(f"{at}mixer.shared_experts", hidden, c["moe_shared_expert_intermediate_size"])
            continue
        parts = attention()(c, layer, at) if kind == "full_attention" else mamba({**c, **sizes_of_mamba}, at)
        for name, *rest in parts:
            yield name.replace(".self_attn.", ".mixer.").replace(".mamba.", ".mixer."), *rest
    yield gain("backbone.norm_f", hidden)
    yield matrix("lm_head", c["vocab_size"], hidden, 2.0)


def ungated(at: str, hidden: int, inner: int) -> Iterator[Part]:
    """An MLP without a gate."""
    yield matrix(f"{at}.up_proj", inner, hidden)
    yield matrix(f"{at}.down_proj", hidden, inner, 0.7)


def nemotron_config(pattern: str, **changes: Any) -> dict[str, Any]:
    """`pattern` has a letter a layer: M for Mamba-2, * for attention, - for an MLP, E for experts."""
    kinds = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
    return config(
        "NemotronHForCausalLM",
        "nemotron_h",
        sizes(128, 160, len(pattern), 4, 2, 48),
        **{
            "layers_block_type": [kinds[letter] for letter in pattern],
            "layer_norm_epsilon": 1e-5,
            "mlp_hidden_act": "relu2",
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "n_groups": 2,
            "ssm_state_size": 48,
            "conv_kernel": 4,
            "chunk_size": 64,
            "time_step_min": 1e-6,
            "use_conv_bias": True,
            **changes,
        },
    )


MAMBA_OFFS = (
    Off("decay", tensors={r"mamba\.A_log": -20.0}),
    Off("steps", tensors={r"mamba\.dt_bias": 0.0}),
    Off("skip", tensors={r"mamba\.D": 0.0}),
    Off("earlier_tokens", tensors={r"mamba\.conv1d\.weight": 0.5}),
    Off("convolution_bias", tensors={r"mamba\.conv1d\.bias": 0.0}),
    Off("mamba_gain", tensors={r"mamba\.norm": 1.0}),
    Off("mamba_norm", modules=r"mamba\.norm$"),
)

NEMOTRON_OFFS = tuple(
    Off(
        off.feature,
        tensors={pattern.replace("mamba", "mixer"): value for pattern, value in off.tensors.items()},
        modules=off.modules.replace("mamba", "mixer"),
    )
    for off in MAMBA_OFFS
)

HYBRID = (
    TinyFamily(
        "nemotron_h",
        3420,
        nemotron_config("M-M*-M*M-"),
        parts=nemotron_layers,
        offs=(*NEMOTRON_OFFS, Off("mlp", tensors={r"mixer\.down_proj": 0.0})),
    ),
    TinyFamily(
        "nemotron_h-moe",
        3740,
        nemotron_config(
            "MEM*EME",
            n_routed_experts=NUM_EXPERTS,
            num_experts_per_tok=3,
            moe_intermediate_size=64,
            moe_shared_expert_intermediate_size=96,
            n_shared_experts=1,
            n_group=1,
            topk_group=1,
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
        ),
        parts=nemotron_layers,
        offs=(
            *NEMOTRON_OFFS,
            top(),
            SELECTION_BIAS,
            Off("experts_scale", config={"routed_scaling_factor": 1.0}),
            Off("renormalise", config={"norm_topk_prob": False}),
            Off("shared_expert", tensors={r"shared_experts\.down_proj": 0.0}),
        ),
    ),
    TinyFamily(
        "granite4_h",
        2900,
        granite_config("mmamma"),
        parts=decoder(granite_mixer, granite_feed),
        offs=(*MAMBA_OFFS, Off("attention_scale", config={"attention_multiplier": 32**-0.5})),
    ),
    TinyFamily(
        "granite4_h-moe",
        3381,
        granite_config(
            "mma",
            mamba_n_groups=2,
            num_local_experts=NUM_EXPERTS,
            num_experts_per_tok=3,
            position_embedding_type="rope",
        ),
        parts=decoder(granite_mixer, granite_feed),
        offs=(
            *MAMBA_OFFS,
            top(),
            Off("shared_expert", tensors={r"shared_mlp\.output_linear": 0.0}),
            Off("rotation", config={"position_embedding_type": "nope"}),
        ),
    ),
    TinyFamily(
        "qwen3_5",
        2600,
        qwen35_config("Qwen3_5ForCausalLM", "qwen3_5_text", "ddadda"),
        parts=decoder(qwen35_mixer, neutral=0.0),
        offs=(
            *DELTA_OFFS,
            QK_NORM,
            Off("qk_gain", tensors={r"self_attn\.[qk]_norm": 0.5}),
            Off("partial_rotary", config={"rope_parameters|partial_rotary_factor": 1.0}),
        ),
    ),
    TinyFamily(
        "qwen3_5-wide",
        2601,
        qwen35_config(
            "Qwen3_5ForCausalLM",
            "qwen3_5_text",
            "ddad",
            tie_word_embeddings=True,
            linear_key_head_dim=16,
            linear_value_head_dim=48,
            linear_num_key_heads=4,
            linear_num_value_heads=4,
            linear_conv_kernel_dim=3,
        ),
        parts=decoder(qwen35_mixer, neutral=0.0),
        offs=DELTA_OFFS,
        no_witness="llama.cpp wants values that are as wide as keys",
    ),
    TinyFamily(
        "qwen3_5_moe",
        3380,
        qwen35_config("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", "dda", **MOE_SIZES),
        parts=decoder(qwen35_mixer, stacked_experts, neutral=0.0),
        offs=(*DELTA_OFFS, *MOE_OFFS),
    ),
    TinyFamily(
        "qwen3_next",
        3040,
        qwen35_config(
            "Qwen3NextForCausalLM",
            "qwen3_next",
            "dda",
            **MOE_SIZES,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            norm_topk_prob=True,
        ),
        parts=decoder(next_mixer, next_experts, neutral=0.0),
        offs=(*(off for off in DELTA_OFFS if "in_proj" not in str(off.tensors)), *MOE_OFFS, QK_NORM),
    ),
    TinyFamily(
        "lfm2",
        2500,
        lfm2_config(
            "Lfm2ForCausalLM",
            "lfm2",
            "ccaca",
            rope_theta=1000000.0,
            block_auto_adjust_ff_dim=True,
            block_multiple_of=32,
            block_ffn_dim_multiplier=1.1,
        ),
        parts=lfm2(lfm2_mlp),
        offs=(LFM2_QK_NORM, LFM2_QK_GAIN, CONVOLUTION),
    ),
    TinyFamily(
        "lfm2-bias",
        2501,
        lfm2_config(
            "Lfm2ForCausalLM",
            "lfm2",
            "cac",
            rope_theta=1000000.0,
            conv_bias=True,
            conv_L_cache=5,
            tie_word_embeddings=False,
            block_auto_adjust_ff_dim=False,
        ),
        parts=lfm2(lfm2_mlp),
        offs=(
            CONVOLUTION,
            Off("matrix_bias", tensors={r"conv\.(in|out)_proj\.bias": 0.0}),
            Off("convolution_bias", tensors={r"conv\.conv\.bias": 0.0}),
        ),
        no_witness="llama.cpp reads no biases of convolutions",
    ),
    TinyFamily(
        "lfm2_moe",
        4022,
        lfm2_config(
            "Lfm2MoeForCausalLM",
            "lfm2_moe",
            "caac",
            rope_theta=1000000.0,
            moe_intermediate_size=64,
            num_dense_layers=1,
            num_experts=NUM_EXPERTS,
            num_experts_per_tok=3,
            norm_topk_prob=True,
            use_expert_bias=True,
            routed_scaling_factor=1.0,
        ),
        parts=lfm2(lfm2_feed),
        offs=(
            CONVOLUTION,
            LFM2_QK_NORM,
            Off("selection_bias", tensors={"expert_bias": 0.0}),
            top(),
            Off("renormalise", config={"norm_topk_prob": False}),
        ),
    ),
)
