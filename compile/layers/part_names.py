"""Names of a decoder's parts in a checkpoint and in a GGUF file, by their role in a layer.

A model's tensors have the checkpoint's names throughout the compiler. Tools that convert checkpoints of the hub use
other names. Such a name is accepted only if the model has a part for it. Knows names, not sizes.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

from ..ops.layers import bias_of

# Parts of a layer, by role; the names are those of most checkpoints of the hub.
HUGGINGFACE: Mapping[str, str] = {
    "attention_norm": "input_layernorm.weight",
    "attention_post_norm": "post_attention_layernorm.weight",
    "ffn_norm": "post_attention_layernorm.weight",
    "ffn_post_norm": "post_feedforward_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "v_norm": "self_attn.v_norm.weight",  # without gain
    "q_a": "self_attn.q_a_proj.weight",
    "q_a_norm": "self_attn.q_a_layernorm.weight",
    "q_b": "self_attn.q_b_proj.weight",
    "kv_a": "self_attn.kv_a_proj_with_mqa.weight",
    "kv_a_norm": "self_attn.kv_a_layernorm.weight",
    "k_b": "self_attn.k_b_proj.weight",
    "v_b": "self_attn.v_b_proj.weight",
    "attention_gate": "self_attn.gate_proj.weight",
    "sinks": "self_attn.sinks",
    "delta_qkv": "linear_attn.in_proj_qkv.weight",
    "delta_gate": "linear_attn.in_proj_z.weight",
    "delta_b": "linear_attn.in_proj_b.weight",
    "delta_a": "linear_attn.in_proj_a.weight",
    "delta_taps": "linear_attn.conv1d.weight",
    "delta_rate": "linear_attn.A_log",
    "delta_dt": "linear_attn.dt_bias",
    "delta_norm": "linear_attn.norm.weight",
    "delta_out": "linear_attn.out_proj.weight",
    "mamba_in": "mamba.in_proj.weight",
    "mamba_values": "mamba.values_proj.weight",
    "mamba_keys": "mamba.keys_proj.weight",
    "mamba_queries": "mamba.queries_proj.weight",
    "mamba_gate": "mamba.gate_proj.weight",
    "mamba_dt": "mamba.dt_proj.weight",
    "mamba_taps": "mamba.conv1d.weight",
    "mamba_rate": "mamba.A_log",
    "mamba_dt_bias": "mamba.dt_bias",
    "mamba_skip": "mamba.D",
    "mamba_norm": "mamba.norm.weight",
    "mamba_out": "mamba.out_proj.weight",
    "conv_in": "conv.in_proj.weight",
    "conv": "conv.conv.weight",
    "conv_out": "conv.out_proj.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "router": "mlp.gate.weight",
    "selection_bias": "mlp.gate.e_score_correction_bias",
    "expert_scale": "mlp.gate.per_expert_scale",
    "router_scale": "mlp.gate.scale",
    "expert_gate": "mlp.experts.gate_proj.weight",
    "expert_up": "mlp.experts.up_proj.weight",
    "expert_down": "mlp.experts.down_proj.weight",
    "shared_gate": "mlp.shared_expert.gate_proj.weight",
    "shared_up": "mlp.shared_expert.up_proj.weight",
    "shared_down": "mlp.shared_expert.down_proj.weight",
    "shared_weight": "mlp.shared_expert_gate.weight",
    "layer_scalar": "layer_scalar",
    "dense_post_norm": "post_feedforward_layernorm_1.weight",
    "experts_norm": "pre_feedforward_layernorm_2.weight",
    "experts_post_norm": "post_feedforward_layernorm_2.weight",
    "input_gate": "per_layer_input_gate.weight",
    "input_projection": "per_layer_projection.weight",
    "input_post_norm": "post_per_layer_input_norm.weight",
    "mtp_embedding_norm": "enorm.weight",
    "mtp_hidden_norm": "hnorm.weight",
    "mtp_projection": "eh_proj.weight",
    "mtp_norm": "shared_head.norm.weight",
}
GGUF: Mapping[str, str] = {
    "attention_norm": "attn_norm.weight",
    "attention_post_norm": "post_attention_norm.weight",
    "ffn_norm": "ffn_norm.weight",
    "ffn_post_norm": "post_ffw_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "v_norm": "attn_v_norm.weight",
    "q_a": "attn_q_a.weight",
    "q_a_norm": "attn_q_a_norm.weight",
    "q_b": "attn_q_b.weight",
    "kv_a": "attn_kv_a_mqa.weight",
    "kv_a_norm": "attn_kv_a_norm.weight",
    "k_b": "attn_k_b.weight",
    "v_b": "attn_v_b.weight",
    "attention_gate": "attn_gate.weight",
    "sinks": "attn_sinks.weight",
    "delta_qkv": "attn_qkv.weight",
    "delta_gate": "attn_gate.weight",
    "delta_b": "ssm_beta.weight",
    "delta_a": "ssm_alpha.weight",
    "delta_taps": "ssm_conv1d.weight",
    "delta_rate": "ssm_a",
    "delta_dt": "ssm_dt.bias",
    "delta_norm": "ssm_norm.weight",
    "delta_out": "ssm_out.weight",
    **{f"mamba_{part}": "ssm_in.weight" for part in ("in", "values", "keys", "queries", "gate", "dt")},
    "mamba_taps": "ssm_conv1d.weight",
    "mamba_rate": "ssm_a",
    "mamba_dt_bias": "ssm_dt.bias",
    "mamba_skip": "ssm_d",
    "mamba_norm": "ssm_norm.weight",
    "mamba_out": "ssm_out.weight",
    "conv_in": "shortconv.in_proj.weight",
    "conv": "shortconv.conv.weight",
    "conv_out": "shortconv.out_proj.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "router": "ffn_gate_inp.weight",
    "selection_bias": "exp_probs_b.bias",
    "router_scale": "ffn_gate_inp.scale",
    "expert_scale": "ffn_down_exps.scale",
    "expert_gate": "ffn_gate_exps.weight",
    "expert_up": "ffn_up_exps.weight",
    "expert_down": "ffn_down_exps.weight",
    "shared_gate": "ffn_gate_shexp.weight",
    "shared_up": "ffn_up_shexp.weight",
    "shared_down": "ffn_down_shexp.weight",
    "shared_weight": "ffn_gate_inp_shexp.weight",
    "layer_scalar": "layer_output_scale.weight",
    "dense_post_norm": "post_ffw_norm_1.weight",
    "experts_norm": "pre_ffw_norm_2.weight",
    "experts_post_norm": "post_ffw_norm_2.weight",
    "input_gate": "inp_gate.weight",
    "input_projection": "proj.weight",
    "input_post_norm": "post_norm.weight",
    "mtp_embedding_norm": "nextn.enorm.weight",
    "mtp_hidden_norm": "nextn.hnorm.weight",
    "mtp_projection": "nextn.eh_proj.weight",
    "mtp_norm": "nextn.shared_head_norm.weight",
}
# parts of an MTP head outside its layer
MTP_ROLES = ("mtp_embedding_norm", "mtp_hidden_norm", "mtp_projection", "mtp_norm")
# In layers with latent attention, a file may have one tensor in place of `k_b` and `v_b`, head by head.
KEYS_AND_VALUES: Mapping[str, str] = {
    "huggingface": "model.layers.{}.self_attn.kv_b_proj.weight",
    "gguf": "blk.{}.attn_kv_b.weight",  # name used by llama.cpp's converter before April 2025
}
# Parts of the whole model.
HUGGINGFACE_MODEL: Mapping[str, str] = {
    "embedding": "model.embed_tokens.weight",
    "token_type": "model.token_type_embeddings.weight",
    "positions": "model.position_embeddings.weight",
    "embedding_norm": "model.embedding_norm.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
    "score_dense": "model.pooler.dense.weight",
    "score_norm": "model.head.norm.weight",
    "score": "model.classifier.weight",
    "inputs_embedding": "model.embed_tokens_per_layer.weight",
    "inputs_projection": "model.per_layer_model_projection.weight",
    "inputs_norm": "model.per_layer_projection_norm.weight",
}
GGUF_MODEL: Mapping[str, str] = {
    "embedding": "token_embd.weight",
    "token_type": "token_types.weight",
    "positions": "position_embd.weight",
    "embedding_norm": "token_embd_norm.weight",
    "norm": "output_norm.weight",
    "head": "output.weight",
    "score_dense": "cls.weight",
    "score_norm": "cls.norm.weight",
    "score": "cls.output.weight",
    "inputs_embedding": "per_layer_token_embd.weight",
    "inputs_projection": "per_layer_model_proj.weight",
    "inputs_norm": "per_layer_proj_norm.weight",
}


@dataclass(frozen=True)
class PartNames:
    """Names of one family's parts: `huggingface` and `gguf` replace the usual ones of some roles.

    Attributes:
        gguf_of: the GGUF file's name of each tensor whose name was requested, and of its bias.
    """

    huggingface: Mapping[str, str] = field(default_factory=dict)
    gguf: Mapping[str, str] = field(default_factory=dict)
    gguf_of: dict[str, str] = field(default_factory=dict)

    def model(self, role: str) -> str:
        """Return the checkpoint's name of a part of the whole model."""
        name = self.huggingface.get(role, HUGGINGFACE_MODEL[role])
        return self._remember(name, self.gguf.get(role, GGUF_MODEL[role]))

    def dense(self, index: int) -> str:
        """The name of a linear layer behind the last norm; in a GGUF file they count from 2, as their folders do."""
        return self._remember(f"dense.{index}.weight", f"dense_{index + 2}.weight")

    def layer(self, index: int, role: str) -> str:
        """Return the checkpoint's name of a part of a layer."""
        name = f"model.layers.{index}.{self.huggingface.get(role, HUGGINGFACE[role])}"
        return self._remember(name, f"blk.{index}.{self.gguf.get(role, GGUF[role])}")

    def _remember(self, name: str, gguf: str) -> str:
        """Record the GGUF names of a tensor and its bias. Returns the tensor's name."""
        self.gguf_of[name], self.gguf_of[bias_of(name)] = gguf, bias_of(gguf)
        return name


# Prefixes of names that were saved from a model inside a wrapper of PyTorch.
_WRAPPERS = ("_orig_mod.", "module.")
# Prefixes of names in checkpoints that hold more than a language model, and their replacements.
_NESTED: Mapping[str, str] = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "language_model.": "model.",  # of a class without an output matrix
}
_USUAL: Mapping[str, str] = {**_NESTED, "backbone.": "model."}
_OUTPUT = "lm_head."
_HEAD = "mtp."  # prefix of a head that drafts, in a multimodal model
_BARE = "layers.0."  # begins names that were saved of a model without its output matrix, as embedding models are
# Matrices that some checkpoints (and mlc-llm always) store as one, concatenated by rows.
_QUERIES_KEYS_VALUES = ("q_proj", "k_proj", "v_proj")
_JOINED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": _QUERIES_KEYS_VALUES,
    "c_attn": _QUERIES_KEYS_VALUES,
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_RENAMED = [
    (re.compile(pattern), name)
    for pattern, name in (
        # of mlc-llm, in the order of python/mlc_llm/model
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
        # of models in memory, in transformers 5
        (r"\.experts\.(gate_up|down)_proj$", r".experts.\1_proj.weight"),
        (r"\.mlp\.", ".block_sparse_moe."),
        (r"\.mlp\.gate\.moe_statics\.", ".mlp.moe_statics."),
        (r"\.router\.weight$", ".router.layer.weight"),
        # of mlx-lm
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
    """Return the usual names of the language model's tensors, by the names that a checkpoint has.

    If some have a multimodal model's prefix, all others belong to its encoders and are left out.

    >>> language_names(["model.language_model.norm.weight", "lm_head.weight", "model.vision_adapter.fc1.weight"])
    {'model.language_model.norm.weight': 'model.norm.weight', 'lm_head.weight': 'lm_head.weight'}
    >>> language_names(["layers.0.mlp.up_proj.weight", "norm.weight"])
    {'layers.0.mlp.up_proj.weight': 'model.layers.0.mlp.up_proj.weight', 'norm.weight': 'model.norm.weight'}
    """
    bare = {name: _unwrapped(name) for name in names}
    if any(name.startswith(_BARE) for name in bare.values()):
        return {name: each if each.startswith((_OUTPUT, _HEAD)) else f"model.{each}" for name, each in bare.items()}
    is_nested = any(name.startswith(tuple(_NESTED)) for name in bare.values())
    kept = (*_NESTED, _OUTPUT, _HEAD) if is_nested else ("",)
    return {name: _with_usual_prefix(each) for name, each in bare.items() if each.startswith(kept)}


def _unwrapped(name: str) -> str:
    """Return a name without the prefixes of PyTorch's wrappers."""
    while wrapper := next((wrapper for wrapper in _WRAPPERS if name.startswith(wrapper)), ""):
        name = name.removeprefix(wrapper)
    return name


def _with_usual_prefix(name: str) -> str:
    """Return a name with the usual prefix of language models."""
    prefix = next((prefix for prefix in _USUAL if name.startswith(prefix)), "")
    return _USUAL.get(prefix, "") + name.removeprefix(prefix)


def hub_name(name: str, known: Container[str]) -> str:
    """Return the `known` name of a tensor, found by one renaming after the other; its own name if none is found.

    >>> hub_name("transformer.h.0.mixer.qkv_proj.weight", {f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkv"})
    'model.layers.0.self_attn.qkv_proj.weight'
    """
    names = [name]
    for each in names:  # `names` grows during the loop
        if each in known or all(part in known for part in parts_of(each)):
            return each
        others = (pattern.sub(new, each) for pattern, new in _RENAMED)
        names += dict.fromkeys(other for other in others if other not in names)
    return name


def parts_of(name: str) -> list[str]:
    """Return the names of the matrices, or biases, that a tensor joins; for most tensors only its own name."""
    whole = next((whole for whole in _JOINED if f".{whole}." in name), None)
    return [name] if whole is None else [name.replace(f".{whole}.", f".{part}.") for part in _JOINED[whole]]
