"""What the parts of a decoder are called in a checkpoint and in a GGUF file, by their role in a layer.

A model's tensors have the checkpoint's names throughout the compiler. Knows names, not sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..ops.layers import bias_of

# Of a layer, by role; what most checkpoints of the hub call them.
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
}
# Of a layer with latent attention, what a file may have in place of `k_b` and `v_b`: both, head by head.
KEYS_AND_VALUES: Mapping[str, str] = {
    "huggingface": "model.layers.{}.self_attn.kv_b_proj.weight",
    "gguf": "blk.{}.attn_kv_b.weight",  # as llama.cpp's converter wrote it before April 2025
}
# Of the whole model.
HUGGINGFACE_MODEL: Mapping[str, str] = {
    "embedding": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
    "inputs_embedding": "model.embed_tokens_per_layer.weight",
    "inputs_projection": "model.per_layer_model_projection.weight",
    "inputs_norm": "model.per_layer_projection_norm.weight",
}
GGUF_MODEL: Mapping[str, str] = {
    "embedding": "token_embd.weight",
    "norm": "output_norm.weight",
    "head": "output.weight",
    "inputs_embedding": "per_layer_token_embd.weight",
    "inputs_projection": "per_layer_model_proj.weight",
    "inputs_norm": "per_layer_proj_norm.weight",
}


@dataclass(frozen=True)
class PartNames:
    """Names of one family's parts: `huggingface` and `gguf` replace the usual ones of some roles.

    Attributes:
        gguf_of: the GGUF file's name of each tensor whose name was asked for, and of its bias.
    """

    huggingface: Mapping[str, str] = field(default_factory=dict)
    gguf: Mapping[str, str] = field(default_factory=dict)
    gguf_of: dict[str, str] = field(default_factory=dict)

    def model(self, role: str) -> str:
        """The checkpoint's name of a part of the whole model."""
        name = self.huggingface.get(role, HUGGINGFACE_MODEL[role])
        return self._remember(name, self.gguf.get(role, GGUF_MODEL[role]))

    def layer(self, index: int, role: str) -> str:
        """The checkpoint's name of a part of a layer."""
        name = f"model.layers.{index}.{self.huggingface.get(role, HUGGINGFACE[role])}"
        return self._remember(name, f"blk.{index}.{self.gguf.get(role, GGUF[role])}")

    def _remember(self, name: str, gguf: str) -> str:
        self.gguf_of[name], self.gguf_of[bias_of(name)] = gguf, bias_of(gguf)
        return name
