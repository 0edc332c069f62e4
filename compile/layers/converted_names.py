"""What tools that convert checkpoints of the hub call tensors, and what the hub calls them.

Knows names alone: a name is only taken for another if the model has a place for that.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping

# What names begin with that were saved of a model inside a wrapper of PyTorch.
_WRAPPERS = ("_orig_mod.", "module.")
# Beginnings of names in checkpoints that hold more than a language model, and what they are here.
_NESTED: Mapping[str, str] = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_USUAL: Mapping[str, str] = {**_NESTED, "backbone.": "model."}
_OUTPUT = "lm_head."
# Matrices that some checkpoints, and mlc-llm of all, keep as one, whose rows lie one below the other.
_QUERIES_KEYS_VALUES = ("q_proj", "k_proj", "v_proj")
_JOINED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": _QUERIES_KEYS_VALUES,
    "c_attn": _QUERIES_KEYS_VALUES,
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_RENAMED = [
    (re.compile(pattern), name)
    for pattern, name in (
        # mlc-llm's, by their order in python/mlc_llm/model
        (r"\.mlp\.e_score_correction_bias$", ".mlp.gate.e_score_correction_bias"),
        (r"\.w_u([kv])$", r".\1_b_proj.weight"),
        (r"\.router\.router\.", ".router."),
        (r"\.moe\.e1_e3\.", ".block_sparse_moe.experts.gate_up_proj."),
        (r"\.moe\.e2\.", ".block_sparse_moe.experts.w2."),
        (r"\.moe\.gate\.", ".block_sparse_moe.gate."),
        (r"^transformer\.embd\.", "model.embed_tokens."),
        (r"^transformer\.norm\.", "model.norm."),
        (r"^transformer\.h\.(\d+)\.ln\.", r"model.layers.\1.input_layernorm."),
        (r"^transformer\.h\.(\d+)\.mixer\.out_proj\.", r"model.layers.\1.self_attn.o_proj."),
        (r"^transformer\.h\.(\d+)\.mixer\.", r"model.layers.\1.self_attn."),
        (r"^transformer\.h\.", "model.layers."),
        (r"\.moe_(gate_up|down)_proj\.", r".experts.\1_proj."),
        (r"\.conv1d_weight$", ".conv1d.weight"),
        # those of models in memory, in transformers 5
        (r"\.experts\.(gate_up|down)_proj$", r".experts.\1_proj.weight"),
        (r"\.mlp\.", ".block_sparse_moe."),
        (r"\.mlp\.gate\.moe_statics\.", ".mlp.moe_statics."),
        (r"\.router\.weight$", ".router.layer.weight"),
        # mlx-lm's
        (r"\.switch_mlp\.", ".experts."),
        (r"\.switch_glu\.", "."),
        (r"\.embed_q\.", ".k_b_proj."),
        (r"\.unembed_out\.", ".v_b_proj."),
        (r"\.gate_proj\.", ".w1."),
        (r"\.down_proj\.", ".w2."),
        (r"\.up_proj\.", ".w3."),
        (r"\.mlp\.down_proj\.", ".shared_mlp.output_linear."),
        (r"\.mlp\.", ".shared_mlp."),
    )
]


def language_names(names: Iterable[str]) -> dict[str, str]:
    """The usual names of the language model's tensors, by those that a checkpoint has.

    Where some begin as in a class that holds more, all that do not are of what sees and hears.

    >>> language_names(["model.language_model.norm.weight", "lm_head.weight", "model.vision_adapter.fc1.weight"])
    {'model.language_model.norm.weight': 'model.norm.weight', 'lm_head.weight': 'lm_head.weight'}
    """
    bare = {name: _unwrapped(name) for name in names}
    is_nested = any(name.startswith(tuple(_NESTED)) for name in bare.values())
    kept = (*_NESTED, _OUTPUT) if is_nested else ("",)
    return {name: _with_usual_prefix(each) for name, each in bare.items() if each.startswith(kept)}


def _unwrapped(name: str) -> str:
    while wrapper := next((wrapper for wrapper in _WRAPPERS if name.startswith(wrapper)), ""):
        name = name.removeprefix(wrapper)
    return name


def _with_usual_prefix(name: str) -> str:
    prefix = next((prefix for prefix in _USUAL if name.startswith(prefix)), "")
    return _USUAL.get(prefix, "") + name.removeprefix(prefix)


def hub_name(name: str, known: Container[str]) -> str:
    """A tensor's name of those that are `known`, by one renaming after the other; its own where none leads there.

    >>> hub_name("transformer.h.0.mixer.qkv_proj.weight", {f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkv"})
    'model.layers.0.self_attn.qkv_proj.weight'
    """
    names = [name]
    for each in names:  # which grows
        if each in known or all(part in known for part in parts_of(each)):
            return each
        others = (pattern.sub(new, each) for pattern, new in _RENAMED)
        names += dict.fromkeys(other for other in others if other not in names)
    return name


def parts_of(name: str) -> list[str]:
    """The names of the matrices, or biases, that a tensor of this name is made of: of most its own alone."""
    whole = next((whole for whole in _JOINED if f".{whole}." in name), None)
    return [name] if whole is None else [name.replace(f".{whole}.", f".{part}.") for part in _JOINED[whole]]
