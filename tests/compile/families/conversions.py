"""Tiny families as other tools convert checkpoints of the hub: the same numbers under their names, in their shapes.

mlc-llm: `python/mlc_llm/model/*/*_loader.py` and the configurations beside them. mlx-lm: `sanitize` of
`mlx_lm/models/*.py`; mlx-vlm keeps what sees.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from ...goldens.families import FAMILIES
from ...goldens.families.moe import NUM_EXPERTS
from ..quantized.checkpoints import UNQUANTIZED, write_tensor_cache
from ..quantized.checkpoints import mlc as quantize_mlc
from .harness import tiny_of

Tensors = dict[str, np.ndarray]

GATE_AND_UP = ("gate_proj", "up_proj")
QUERIES_KEYS_VALUES = ("q_proj", "k_proj", "v_proj")


def joined(tensors: Tensors, parts: Sequence[str], whole: str) -> Tensors:
    """Matrices, and biases, of `parts` one below the other as `whole`."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        part = next((part for part in parts if f".{part}." in name), None)
        if part is None:
            found[name] = tensor
        elif part == parts[0]:
            others = [tensors[name.replace(f".{part}.", f".{each}.")] for each in parts]
            found[name.replace(f".{part}.", f".{whole}.")] = np.concatenate(others)
    return found


def whole_gains(tensors: Tensors) -> Tensors:
    """Norms' gains as they multiply."""

    def is_less_one(name: str) -> bool:
        return name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")

    return {name: tensor + 1 if is_less_one(name) else tensor for name, tensor in tensors.items()}


def turned_taps(tensors: Tensors) -> Tensors:
    """Taps of convolutions `[C, K, 1]`."""
    is_tap = (".conv1d.weight", ".conv.conv.weight")
    return {name: tensor.swapaxes(1, 2) if name.endswith(is_tap) else tensor for name, tensor in tensors.items()}


def joined_all(tensors: Tensors, attention: str = "qkv_proj") -> Tensors:
    return joined(joined(tensors, GATE_AND_UP, "gate_up_proj"), QUERIES_KEYS_VALUES, attention)


def stacked(tensors: Tensors, parts: dict[str, str]) -> Tensors:
    """Experts of a layer as one array, by the names of their matrices and of the stacks."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        expert = _OF_EXPERT.fullmatch(name)
        if expert is None:
            found[name] = tensor
        elif expert["index"] == "0":
            all_of = (tensors[f"{expert['stem']}.experts.{i}.{expert['part']}.weight"] for i in range(NUM_EXPERTS))
            found[f"{expert['stem']}.{parts[expert['part']]}.weight"] = np.stack(list(all_of))
    return found


_OF_EXPERT = re.compile(r"(?P<stem>.*)\.experts\.(?P<index>\d+)\.(?P<part>\w+)\.weight")


def fused_gate_up(tensors: Tensors, gate: str, up: str, both: str) -> Tensors:
    """Two stacks of experts as one, each expert's rows of gates before those of `up`."""
    found = {name: tensor for name, tensor in tensors.items() if f".{gate}." not in name and f".{up}." not in name}
    for name in (name for name in tensors if f".{gate}." in name):
        others = tensors[name], tensors[name.replace(f".{gate}.", f".{up}.")]
        found[name.replace(f".{gate}.", f".{both}.")] = np.concatenate(others, axis=1)
    return found


def renamed(tensors: Tensors, *patterns: tuple[str, str]) -> Tensors:
    found = {}
    for name, tensor in tensors.items():
        for pattern, other in patterns:
            name = re.sub(pattern, other, name)
        found[name] = tensor
    return found


def two_stacks(tensors: Tensors) -> Tensors:
    """Experts as models have them in memory, gates before `up`."""
    parts = {"w1": "experts.gate_proj", "w2": "experts.down_proj", "w3": "experts.up_proj"}
    parts |= {part.removeprefix("experts."): part for part in parts.values()}
    both = fused_gate_up(stacked(tensors, parts), "experts.gate_proj", "experts.up_proj", "experts.gate_up_proj")
    return renamed(both, (r"\.experts\.(gate_up|down)_proj\.weight$", r".experts.\1_proj"))


def in_memory_of_mixtral(tensors: Tensors) -> Tensors:
    return renamed(two_stacks(tensors), (r"\.block_sparse_moe\.", ".mlp."))


def in_memory_of_ernie(tensors: Tensors) -> Tensors:
    return renamed(two_stacks(tensors), (r"\.moe_statics\.", ".gate.moe_statics."))


def in_memory_of_granite(tensors: Tensors) -> Tensors:
    return renamed(
        tensors,
        (r"\.router\.layer\.", ".router."),
        (r"\.block_sparse_moe\.input_linear\.weight", ".block_sparse_moe.experts.gate_up_proj"),
        (r"\.block_sparse_moe\.output_linear\.weight", ".block_sparse_moe.experts.down_proj"),
    )


def one_by_one(tensors: Tensors) -> Tensors:
    """Experts of two stacks as matrices of their own."""
    halves = apart(tensors, r"\.experts\.gate_up_proj", r"\.experts\.down_proj", ".experts.")
    found: Tensors = {}
    for name, tensor in halves.items():
        stem, _, part = name.partition(".experts.")
        found |= {f"{stem}.experts.{i}.{part}": one for i, one in enumerate(tensor)} if part else {name: tensor}
    return found


def one_by_one_of_llama4(tensors: Tensors) -> Tensors:
    return one_by_one({name: t.swapaxes(1, 2) if ".experts." in name else t for name, t in tensors.items()})


# Of those that the hub has in the other form.
EXPERTS = {
    **dict.fromkeys(("qwen3_moe", "glm4_moe", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "olmoe"), two_stacks),
    **dict.fromkeys(("hunyuan_v1_moe", "qwen3_next", "lfm2_moe"), two_stacks),
    **dict.fromkeys(("mixtral", "minimax_m2"), in_memory_of_mixtral),
    "ernie4_5_moe": in_memory_of_ernie,
    **dict.fromkeys(("granitemoe", "granite4_h-moe"), in_memory_of_granite),
    **dict.fromkeys(("gemma4-moe", "qwen3_5_moe", "mistral4"), one_by_one),
    "llama4": one_by_one_of_llama4,
}


def mlc_gemma2(tensors: Tensors) -> Tensors:
    return whole_gains(joined_all(tensors))


def mlc_gemma3(tensors: Tensors) -> Tensors:
    """Queries, keys and values stay apart; all is a part of a model that sees, whether it does or not."""
    inner = whole_gains(joined(tensors, GATE_AND_UP, "gate_up_proj"))
    return {f"language_model.{name}": tensor for name, tensor in inner.items()}


def mlc_qwen(tensors: Tensors) -> Tensors:
    return joined_all(tensors, "c_attn")


def mlc_qwen35(tensors: Tensors) -> Tensors:
    return renamed(whole_gains(mlc_qwen(tensors)), (r"\.conv1d\.weight$", ".conv1d_weight"))


def mlc_phi3(tensors: Tensors) -> Tensors:
    return renamed(
        tensors,
        (r"self_attn\.qkv_proj", "mixer.qkv_proj"),
        (r"self_attn\.o_proj", "mixer.out_proj"),
        ("input_layernorm", "ln"),
        (r"^model\.layers\.", "transformer.h."),
        (r"^model\.embed_tokens", "transformer.embd"),
        (r"^model\.norm", "transformer.norm"),
    )


def mlc_mixtral(tensors: Tensors) -> Tensors:
    stacks = stacked(tensors, {"w1": "experts.w1", "w2": "e2", "w3": "experts.w3"})
    both = fused_gate_up(joined_all(stacks), "experts.w1", "experts.w3", "e1_e3")
    return renamed(both, (r"\.block_sparse_moe\.", ".moe."))


def mlc_experts(tensors: Tensors) -> Tensors:
    parts = {"gate_proj": "experts.gate", "up_proj": "experts.up", "down_proj": "moe_down_proj"}
    return fused_gate_up(stacked(tensors, parts), "experts.gate", "experts.up", "moe_gate_up_proj")


def mlc_qwen3_moe(tensors: Tensors) -> Tensors:
    return mlc_qwen(mlc_experts(tensors))


def mlc_deepseek(tensors: Tensors) -> Tensors:
    """Keys and values of heads are stacks, those of keys turned."""
    found: Tensors = {}
    experts = joined(mlc_experts(tensors), GATE_AND_UP, "gate_up_proj")
    for name, tensor in renamed(experts, (r"\.gate\.e_score", ".e_score")).items():
        if not name.endswith(".kv_b_proj.weight"):
            found[name] = tensor
            continue
        stem = name.removesuffix("kv_b_proj.weight")
        heads = tensor.reshape(4, -1, tensor.shape[1])
        found |= {f"{stem}w_uk": heads[:, :32].swapaxes(1, 2), f"{stem}w_uv": heads[:, 32:]}
    return {name: np.ascontiguousarray(tensor) for name, tensor in found.items()}


def mlc_llama4(tensors: Tensors) -> Tensors:
    return renamed(joined(tensors, GATE_AND_UP, "gate_up_proj"), (r"\.router\.", ".router.router."))


MLC = {
    "gemma2": mlc_gemma2,
    "gemma3": mlc_gemma3,
    "qwen2": mlc_qwen,
    "qwen2-untied": mlc_qwen,
    "qwen3": mlc_qwen,
    "qwen3_5": mlc_qwen35,
    "phi3": mlc_phi3,
    "mixtral": mlc_mixtral,
    "qwen3_moe": mlc_qwen3_moe,
    "deepseek_v3": mlc_deepseek,
    "llama4": mlc_llama4,
}
_OF_MLC = {
    "rope_theta": "position_embedding_base",
    "max_position_embeddings": "context_window_size",
    "sliding_window": "sliding_window_size",
}


def quantized_of_mlc(tensors: Tensors) -> Tensors:
    """Matrices, and stacks of them, in random numbers of q4f16_1; what mlc-llm leaves in floats as it is."""
    draw, found = np.random.default_rng(4), {}
    for name, tensor in tensors.items():
        if tensor.ndim == 1 or any(part in name for part in (*UNQUANTIZED, "mlp.gate.")):
            found[name] = tensor
            continue
        parts, _ = quantize_mlc(draw, (tensor.size // tensor.shape[-1], tensor.shape[-1]))
        stem = name.removesuffix(".weight")
        found |= {stem + ending: part.reshape(*tensor.shape[:-1], -1) for ending, part in parts.items()}
    return found


def write_mlc(name: str, folder: Path, quantization: str = "q0f32") -> Path:
    """A tiny family in float32 as `mlc_llm convert_weight` and `gen_config` write it, or in q4f16_1."""
    tiny = tiny_of(name)
    tiny.write(folder)
    (folder / "config.json").unlink()
    (folder / "model.safetensors").unlink()
    tensors = MLC[name](tiny.tensors)
    write_tensor_cache(folder, tensors if quantization == "q0f32" else quantized_of_mlc(tensors))
    given = {key: value for key, value in tiny.config.items() if key not in ("architectures", "model_type")}
    model = {_OF_MLC.get(key, key): value for key, value in given.items()}
    if name == "gemma3":  # what the class of its language model does not name is in `kwargs`
        extra = {key: model.pop(key) for key in ("rope_local_base_freq", "layer_types", "sliding_window_pattern")}
        text = {**model, "kwargs": extra}
        model = {"text_config": text, "vocab_size": text.pop("vocab_size"), "context_window_size": 512}
    chat: dict[str, Any] = {
        "model_type": tiny.config["model_type"],
        "quantization": quantization,
        "model_config": model | {"tensor_parallel_shards": 1, "max_batch_size": 128},
        "conv_template": {"name": "chatml"},
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
    (folder / "mlc-chat-config.json").write_text(json.dumps(chat))
    return folder


def mlx_qwen35(tensors: Tensors) -> Tensors:
    """As mlx-vlm has it, which keeps what sees."""
    inner = turned_taps(whole_gains(tensors))
    seeing = {"vision_tower.patch_embed.proj.weight": np.zeros((2, 2), np.float32)}
    return {f"language_model.{name}": tensor for name, tensor in inner.items()} | seeing


def mlx_experts(tensors: Tensors) -> Tensors:
    """Three stacks a layer, whatever their matrices are called."""
    parts = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    parts |= {part: part for part in parts.values()}
    return stacked(tensors, {part: f"switch_mlp.{name}" for part, name in parts.items()})


def mlx_next(tensors: Tensors) -> Tensors:
    return turned_taps(whole_gains(mlx_experts(tensors)))


def mlx_qwen35_moe(tensors: Tensors) -> Tensors:
    return mlx_qwen35(apart(tensors, r"\.experts\.gate_up_proj", r"\.experts\.down_proj", ".switch_mlp."))


def mlx_gemma4(tensors: Tensors) -> Tensors:
    inner = apart(tensors, r"\.experts\.gate_up_proj", r"\.experts\.down_proj", ".experts.switch_glu.")
    return renamed(inner, (r"^model\.language_model\.", "language_model.model."))


def mlx_granite(tensors: Tensors) -> Tensors:
    stem = r"\.block_sparse_moe\."
    return apart(
        tensors, stem + r"input_linear\.weight", stem + r"output_linear\.weight", ".block_sparse_moe.switch_mlp."
    )


def mlx_granite_hybrid(tensors: Tensors) -> Tensors:
    """Without experts, what every token passes is a usual layer."""
    if any("block_sparse_moe" in name for name in tensors):
        return turned_taps(mlx_granite(tensors))
    stem = r"\.shared_mlp\."
    return turned_taps(apart(tensors, stem + r"input_linear\.weight", stem + r"output_linear\.weight", ".mlp."))


def mlx_lfm2_moe(tensors: Tensors) -> Tensors:
    names = (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj"))
    return renamed(turned_taps(mlx_experts(tensors)), *((rf"\.{one}\.", f".{other}.") for one, other in names))


def mlx_deepseek(tensors: Tensors) -> Tensors:
    heads = mlc_deepseek(tensors)  # has the stacks of heads under other names
    found = {name: tensor for name, tensor in mlx_experts(tensors).items() if "kv_b_proj" not in name}
    renames = {"w_uk": "embed_q.weight", "w_uv": "unembed_out.weight"}
    for name, tensor in heads.items():
        end = name.rpartition(".")[2]
        if end in renames:
            found[name.removesuffix(end) + renames[end]] = tensor
    return found


def mlx_llama4(tensors: Tensors) -> Tensors:
    turned = {name: t.swapaxes(1, 2) if ".experts." in name else t for name, t in tensors.items()}
    inner = apart(turned, r"\.experts\.gate_up_proj", r"\.experts\.down_proj", ".experts.")
    return {f"language_model.{name}": tensor for name, tensor in inner.items()}


def mlx_gpt_oss(tensors: Tensors) -> Tensors:
    """Gates and `up` apart, which take turns on the hub."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        stem, _, end = name.partition(".experts.")
        if end == "gate_up_proj":
            turned = tensor.swapaxes(1, 2)
            found |= {f"{stem}.experts.{p}_proj.weight": turned[:, i::2] for i, p in enumerate(("gate", "up"))}
        elif end == "gate_up_proj_bias":
            found |= {f"{stem}.experts.{p}_proj.bias": tensor[:, i::2] for i, p in enumerate(("gate", "up"))}
        elif end:
            is_bias = end == "down_proj_bias"
            found[f"{stem}.experts.down_proj.{'bias' if is_bias else 'weight'}"] = (
                tensor if is_bias else tensor.swapaxes(1, 2)
            )
        else:
            found[name] = tensor
    return found


def apart(tensors: Tensors, gate_up: str, down: str, stem: str) -> Tensors:
    """What has gates before `up` as two, and `down` beside them, under names that begin with `stem`."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        if re.search(f"{gate_up}$", name):
            at, half = re.sub(f"{gate_up}$", stem, name), tensor.shape[-2] // 2
            found |= {f"{at}gate_proj.weight": tensor[..., :half, :], f"{at}up_proj.weight": tensor[..., half:, :]}
        else:
            found[re.sub(f"{down}$", f"{stem}down_proj.weight", name)] = tensor
    return found


MLX = {
    "qwen3_5": mlx_qwen35,
    "lfm2": turned_taps,
    "nemotron_h": turned_taps,
    "qwen3_moe": mlx_experts,
    "mixtral": mlx_experts,
    "olmoe": mlx_experts,
    "minimax_m2": mlx_experts,
    "glm4_moe": mlx_experts,
    "deepseek_v2": mlx_experts,
    "deepseek_v3": mlx_deepseek,
    "qwen3_next": mlx_next,
    "qwen3_5_moe": mlx_qwen35_moe,
    "gemma4-moe": mlx_gemma4,
    "granitemoe": mlx_granite,
    "granite4_h": mlx_granite_hybrid,
    "granite4_h-moe": mlx_granite_hybrid,
    "lfm2_moe": mlx_lfm2_moe,
    "llama4": mlx_llama4,
    "gpt_oss": mlx_gpt_oss,
}


def write_converted(name: str, convert: Callable[[Tensors], Tensors], folder: Path) -> Path:
    """A tiny family in float32 whose tensors are stored as `convert` makes them."""
    tiny = FAMILIES[name]
    tiny.write(folder)
    arrays = {name: np.ascontiguousarray(array) for name, array in convert(tiny.tensors).items()}
    save_file(arrays, folder / "model.safetensors")
    return folder
