"""Hunyuan (Tencent, 2025), dense and with experts: heads are normalized after they are rotated."""

from __future__ import annotations

from radixlm.runtime.artifact.model_config import (
    Attention,
    Dense,
    Experts,
    LayerConfig,
    QKNorm,
    SharedExpert,
)

from .family import Family
from .settings import Settings


class HunyuanDense(Family):
    """Hunyuan: `alpha` scales the base of rotary positions; llama.cpp's converter stores the scaled base."""

    title = "Hunyuan (dense)"
    huggingface = {"HunYuanDenseV1ForCausalLM": "hunyuan_v1_dense"}
    gguf = ("hunyuan-dense",)
    defaults = {"rms_norm_eps": 1e-5}
    names = {"q_norm": "self_attn.query_layernorm.weight", "k_norm": "self_attn.key_layernorm.weight"}

    def layer(self, c: Settings, index: int) -> LayerConfig:
        """Return Llama's layer, with norms of heads after the rotation."""
        c.refuse("attention_bias", "use_cla")
        return LayerConfig(mixer=self.attention(c), ffn=self.ffn(c, index))

    def attention(self, c: Settings) -> Attention:
        """Return the attention, which is the same in all layers."""
        return c.attention(qk_norm=QKNorm(after_rope=True))

    def ffn(self, c: Settings, index: int) -> Dense | Experts:
        """Return Llama's feed-forward layer."""
        return c.dense()


class HunyuanMoE(HunyuanDense):
    """Hunyuan with experts: each layer has some, and one that every token passes, all of the same size."""

    title = "Hunyuan MoE"
    huggingface = {"HunYuanMoEV1ForCausalLM": "hunyuan_v1_moe"}
    gguf = ("hunyuan-moe",)
    names = {
        **HunyuanDense.names,
        "router": "mlp.gate.wg.weight",
        "shared_gate": "mlp.shared_mlp.gate_proj.weight",
        "shared_up": "mlp.shared_mlp.up_proj.weight",
        "shared_down": "mlp.shared_mlp.down_proj.weight",
    }

    def ffn(self, c: Settings, index: int) -> Dense | Experts:
        """Return the experts of layer `index`; checkpoints may list each layer's number of experts per token."""
        size = c.of_layer("moe_intermediate_size", index, c("intermediate_size"))
        shared = c.of_layer("shared_expert_intermediate_size", index)
        shared = shared or size * c.of_layer("num_shared_expert", index, 1)
        return c.experts(
            num_active=c.of_layer("moe_topk", index, c("num_experts_per_tok")),
            intermediate_size=size,
            shared=SharedExpert(intermediate_size=shared),
        )
