"""Llama (Touvron et al., 2023) and what follows its shape: Llama 2 and 3, Mistral, TinyLlama, SmolLM2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from radixlm.runtime.artifact.manifest import ModelConfig

from ..ops.layers import Embedding, Linear, RMSNorm

if TYPE_CHECKING:
    from ..ops.ops import Ops
    from ..ops.rows import Activation, Rows


class LlamaAttention:
    """Grouped-query attention with rotary positions."""

    def __init__(self, config: ModelConfig, name: str) -> None:
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        hidden, bias = config.hidden_size, config.attention_bias
        # With 8 bits, rounding what enters these and the output matrix makes half of all the error (bench/LOG.md).
        self.q_proj = Linear(f"{name}.q_proj.weight", queries, hidden, bias, sensitive=True)
        self.k_proj = Linear(f"{name}.k_proj.weight", keys, hidden, bias, sensitive=True)
        self.v_proj = Linear(f"{name}.v_proj.weight", keys, hidden, bias, sensitive=True)
        self.o_proj = Linear(f"{name}.o_proj.weight", hidden, queries, sensitive=True)

    def forward(self, op: Ops, x: Activation) -> Activation:
        """What attention gathers, before `o_proj`."""
        return op.attention(op.linear(x, self.q_proj, self.k_proj, self.v_proj))


class LlamaMLP:
    """A gated feed-forward layer."""

    def __init__(self, config: ModelConfig, name: str) -> None:
        hidden, intermediate = config.hidden_size, config.intermediate_size
        self.gate_proj = Linear(f"{name}.gate_proj.weight", intermediate, hidden)
        self.up_proj = Linear(f"{name}.up_proj.weight", intermediate, hidden)
        self.down_proj = Linear(f"{name}.down_proj.weight", hidden, intermediate)

    def forward(self, op: Ops, x: Activation) -> Activation:
        """What the gate lets through, before `down_proj`."""
        return op.silu_mul(op.linear(x, self.gate_proj, self.up_proj))


class LlamaDecoderLayer:
    """Attention and feed-forward, each behind a norm and beside a residual."""

    def __init__(self, config: ModelConfig, name: str) -> None:
        self.input_layernorm = RMSNorm(f"{name}.input_layernorm.weight", config.hidden_size)
        self.self_attn = LlamaAttention(config, f"{name}.self_attn")
        self.post_attention_layernorm = RMSNorm(f"{name}.post_attention_layernorm.weight", config.hidden_size)
        self.mlp = LlamaMLP(config, f"{name}.mlp")

    def forward(self, op: Ops, x: Rows) -> Rows:
        """x after this layer."""
        attended = self.self_attn.forward(op, op.rms_norm(x, self.input_layernorm))
        x = op.add_linear(x, attended, self.self_attn.o_proj)
        gated = self.mlp.forward(op, op.rms_norm(x, self.post_attention_layernorm))
        return op.add_linear(x, gated, self.mlp.down_proj)


class LlamaForCausalLM:
    """Tokens to logits."""

    title: ClassVar[str] = "Llama 1, 2 and 3 (also SmolLM2, TinyLlama, Mistral)"
    huggingface_types: ClassVar[dict[str, str]] = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral"}
    gguf_permutes_rotary: ClassVar[bool] = True
    gguf_layer_names: ClassVar[Mapping[str, str]] = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }

    @staticmethod
    def settings(class_name: str, config: Mapping[str, Any]) -> dict[str, Any]:
        """Only Mistral's `sliding_window` is used."""
        return {"sliding_window": config.get("sliding_window") if class_name == "MistralForCausalLM" else None}

    def __init__(self, config: ModelConfig) -> None:
        self.embed_tokens = Embedding("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self.layers = [LlamaDecoderLayer(config, f"model.layers.{i}") for i in range(config.num_hidden_layers)]
        self.norm = RMSNorm("model.norm.weight", config.hidden_size)
        head = self.embed_tokens.name if config.tie_word_embeddings else "lm_head.weight"
        self.lm_head = Linear(head, config.vocab_size, config.hidden_size, sensitive=True)

    def forward(self, op: Ops) -> None:
        """Append the whole model."""
        x = op.embed(self.embed_tokens)
        for layer in self.layers:
            x = layer.forward(op, x)
        op.logits(x, self.norm, self.lm_head)
