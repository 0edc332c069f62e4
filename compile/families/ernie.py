"""ERNIE 4.5 (Baidu, 2025), dense and with experts: Llama's structure, with rotation of neighbours."""

from __future__ import annotations

from radixlm.runtime.artifact.model_config import Dense, Experts, LayerConfig, Router, SharedExpert

from .family import Family
from .settings import Settings


class Ernie(Family):
    """ERNIE 4.5: with `use_bias`, all matrices but the output matrix have a bias."""

    title = "ERNIE 4.5"
    huggingface = {"Ernie4_5ForCausalLM": "ernie4_5"}
    gguf = ("ernie4_5",)
    defaults = {"head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True}
    neighbouring_pairs = ("huggingface", "gguf")

    def layer(self, c: Settings, index: int) -> LayerConfig:
        """Return Llama's layer."""
        bias = c.has_bias("attn_q", otherwise=bool(c("use_bias")))
        return LayerConfig(mixer=c.attention(bias=bias, output_bias=bias), ffn=self.ffn(c, index))

    def ffn(self, c: Settings, index: int) -> Dense | Experts:
        """Return Llama's feed-forward layer."""
        return c.dense(bias=c.has_bias("ffn_up", otherwise=bool(c("use_bias"))))


class ErnieMoE(Ernie):
    """ERNIE 4.5 with experts: the first layers are dense; a bias affects the selection of experts only."""

    title = "ERNIE 4.5 MoE"
    huggingface = {"Ernie4_5_MoeForCausalLM": "ernie4_5_moe"}
    gguf = ("ernie4_5-moe",)
    defaults = {
        **{key: value for key, value in Ernie.defaults.items() if key != "head_dim"},
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
    }
    names = {
        "selection_bias": "mlp.moe_statics.e_score_correction_bias",
        "shared_gate": "mlp.shared_experts.gate_proj.weight",
        "shared_up": "mlp.shared_experts.up_proj.weight",
        "shared_down": "mlp.shared_experts.down_proj.weight",
    }
    ignored = ("model.mtp_*",)

    def ffn(self, c: Settings, index: int) -> Dense | Experts:
        """Return experts in every `moe_layer_interval`th layer between two bounds, else Llama's feed-forward layer."""
        c.refuse("use_bias")
        first = c.number("moe_layer_start_index", c("first_k_dense_replace", 0))
        last = c("moe_layer_end_index", -1)
        interval = c("moe_layer_interval", c("interleave_moe_layer_step", 1)) or 1
        if index < first or index > (c.num_layers - 1 if last == -1 else last) or (index + 1) % interval:
            return c.dense()
        size = c.number("moe_intermediate_size")
        num_shared = c("moe_num_shared_experts", c("n_shared_experts", 0))
        return c.experts(
            num_experts=c.number("moe_num_experts", c("num_experts")),
            num_active=c.number("moe_k", c("num_experts_per_tok", 6)),
            router=Router(selection_bias=True, least_sum=c("moe_norm_min", 1e-12)),
            shared=SharedExpert(intermediate_size=size * num_shared) if num_shared else None,
        )
