"""Nomic BERT (Nussbaum et al., 2024), of nomic-embed-text: BERT with rotary positions and gates, without biases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from radixlm.runtime.artifact.model_config import EncoderInput, LayerConfig, ModelConfig
from radixlm.runtime.errors import UnsupportedArchitecture

from ...layers.attention import SelfAttention
from ...layers.decoder import Decoder
from ..family import Format, Views, parts_of
from ..settings import Settings
from .bert import Encoder

# keys of Nomic's own class, by the usual ones
_KEYS = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "layer_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation_function",
    "rope_theta": "rotary_emb_base",
}
# what the released models of Nomic's own class have; with another value they are other models
_USUAL = {
    "prenorm": False,
    "parallel_block": False,
    "use_rms_norm": False,
    "causal": False,
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "num_experts": 0,
}


class NomicBert(Encoder):
    """Nomic BERT. Its own class and that of transformers have different keys and names of tensors."""

    title = "Nomic BERT"
    huggingface = {"NomicBertForMaskedLM": "nomic_bert", "NomicBertModel": "nomic_bert"}
    gguf = ("nomic-bert",)
    defaults = {"type_vocab_size": 2, "rope_theta": 1000.0}
    names = {
        **Encoder.names,
        "attention_post_norm": "post_attention_layernorm.weight",
        "ffn_post_norm": "post_mlp_layernorm.weight",
    }
    renamed = {
        **Encoder.renamed,
        r"\.emb_ln\.": ".embeddings.LayerNorm.",
        r"\.attn\.Wqkv\.": ".self_attn.qkv_proj.",
        r"\.attn\.out_proj\.": ".self_attn.o_proj.",
        r"\.fc11\.": ".up_proj.",
        r"\.fc12\.": ".gate_proj.",
        r"\.fc2\.": ".down_proj.",
        r"\.norm1\.": ".post_attention_layernorm.",
        r"\.norm2\.": ".post_mlp_layernorm.",
    }

    def layer(self, c: Settings, index: int) -> LayerConfig:
        """Return a layer whose feed-forward layer has a gate."""
        return LayerConfig(mixer=c.attention(bidirectional=True), ffn=c.dense(), norms="sum")

    def config(self, c: Settings) -> ModelConfig:
        """Return the model, whose last norm is that of the last layer."""
        own = {key: c(name) for key, name in _KEYS.items() if c(name) is not None}
        function = {"swiglu": "silu", "geglu": "gelu"}.get(str(own.get("hidden_act")))
        own |= {} if function is None else {"hidden_act": function}
        c = replace(c, values={**c.values, **own})
        for key, usual in _USUAL.items():
            if c(key, usual) != usual:
                raise UnsupportedArchitecture(f"{c.label}: {key} {c(key)!r} is not supported for {c.architecture}")
        return c.model(
            self.layer,
            norm="layer_bias",
            norm_eps=c.number("layer_norm_eps", 1e-12),
            encoder_input=EncoderInput(token_type=self.has_token_type(c)),
        )

    def fused(self, decoder: Decoder, format_: Format) -> Mapping[str, Views]:
        """Return the first row of the table of token types, and the rows of queries, keys and values.

        A GGUF file has the latter in one matrix.
        """
        found = dict(super().fused(decoder, format_))
        for index, layer in enumerate(decoder.layers if format_ == "gguf" else ()):
            assert isinstance(layer.self_attn, SelfAttention)
            found |= parts_of(f"blk.{index}.attn_qkv.weight", layer.self_attn.inputs)
        return found
