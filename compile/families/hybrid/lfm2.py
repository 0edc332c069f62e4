"""LFM2 (Liquid AI, 2025), dense and with experts: short convolutions, and attention in some layers."""

from __future__ import annotations

from radixlm.runtime.artifact.model_config import (
    Dense,
    Experts,
    LayerConfig,
    Mixer,
    ModelConfig,
    QKNorm,
    Router,
    ShortConvolution,
)

from ..family import Family
from ..settings import Settings


class Lfm2(Family):
    """LFM2: queries and keys of each head have norms.

    The last norm has the name that other families use for a norm of embeddings.
    """

    title = "LFM2 and 2.5"
    huggingface = {"Lfm2ForCausalLM": "lfm2"}
    gguf = ("lfm2",)
    defaults = {
        "norm_eps": 1e-5,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "conv_L_cache": 3,
        "max_position_embeddings": 128000,
    }
    names = {
        "attention_norm": "operator_norm.weight",
        "ffn_norm": "ffn_norm.weight",
        "q_norm": "self_attn.q_layernorm.weight",
        "k_norm": "self_attn.k_layernorm.weight",
        "o": "self_attn.out_proj.weight",
        "gate": "feed_forward.w1.weight",
        "up": "feed_forward.w3.weight",
        "down": "feed_forward.w2.weight",
        "norm": "model.embedding_norm.weight",
    }
    gguf_names = {"norm": "token_embd_norm.weight"}

    def layer(self, c: Settings, index: int) -> LayerConfig:
        """Return layer `index`: a convolution or attention, and a feed-forward layer."""
        return LayerConfig(mixer=self.mixer(c, index), ffn=self.ffn(c, index))

    def config(self, c: Settings) -> ModelConfig:
        """Return Llama's model; one setting has an older name."""
        tied = bool(c("tie_embedding", c("tie_word_embeddings")))
        return c.model(self.layer, tie_word_embeddings=tied)

    def mixer(self, c: Settings, index: int) -> Mixer:
        """Return the mixer of layer `index`; a GGUF file says 0 KV heads for layers without attention."""
        kv_heads = c.of_layer("num_key_value_heads", index)
        if c("layer_types"):
            has_attention = c.layer_is("layer_types", index, {"full_attention": True, "conv": False})
        elif c("full_attn_idxs") is not None:
            has_attention = index in c("full_attn_idxs")
        else:
            has_attention = bool(kv_heads)
        if has_attention:
            return c.attention(num_kv_heads=kv_heads, qk_norm=QKNorm())
        bias = c.has_bias("shortconv.in_proj", otherwise=bool(c("conv_bias")))
        return ShortConvolution(kernel_size=c.number("conv_L_cache"), bias=bias)

    def ffn(self, c: Settings, index: int) -> Dense | Experts:
        """Return the dense layer; its size is 2/3 of the declared one, times a factor, rounded up to blocks."""
        size = c("block_ff_dim", c("intermediate_size"))
        if c.format == "huggingface" and c("block_auto_adjust_ff_dim", True):
            block = c.number("block_multiple_of", 256)
            size = int(c.number("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
            size = -(-size // block) * block
        return c.dense(intermediate_size=size)


class Lfm2MoE(Lfm2):
    """LFM2 with experts: the first layers are dense; a bias affects the selection of experts only."""

    title = "LFM2 MoE (LFM2-8B-A1B)"
    huggingface = {"Lfm2MoeForCausalLM": "lfm2_moe"}
    gguf = ("lfm2moe",)
    defaults = {**Lfm2.defaults, "num_dense_layers": 2, "use_expert_bias": True}
    names = {
        **Lfm2.names,
        "router": "feed_forward.gate.weight",
        "selection_bias": "feed_forward.expert_bias",
        "expert_gate": "feed_forward.experts.w1.weight",
        "expert_up": "feed_forward.experts.w3.weight",
        "expert_down": "feed_forward.experts.w2.weight",
    }

    def ffn(self, c: Settings, index: int) -> Dense | Experts:
        """Return experts: weights are sigmoids of logits, divided by the sum over the selected experts."""
        if index < c.number("num_dense_layers", c("first_k_dense_replace", 0)):
            return c.dense()
        has_bias = any(".exp_probs_b." in name for name in c.stored) if c.format == "gguf" else c("use_expert_bias")
        router = Router(
            scores="sigmoid",
            selection_bias=bool(has_bias),
            renormalise=c("norm_topk_prob", True),
            scale=c("routed_scaling_factor", 1.0) or 1.0,
        )
        return c.experts(router=router)
