"""ModernBERT (Warner et al., 2024): norms before branches, gates, and windows in two layers of three."""

from __future__ import annotations

from radixlm.runtime.artifact.model_config import EncoderInput, LayerConfig, ModelConfig, Rope, ScoreHead

from ..settings import LayerType, Settings
from .bert import Encoder


class ModernBert(Encoder):
    """ModernBERT: layers with windows have rotary positions of their own, and the first layer's input is normalized."""

    title = "ModernBERT"
    huggingface = {
        "ModernBertForSequenceClassification": "modernbert",
        "ModernBertForMaskedLM": "modernbert",
        "ModernBertModel": "modernbert",
    }
    gguf_names = {}
    defaults = {"norm_eps": 1e-5, "hidden_activation": "gelu", "local_attention": 128}
    names = {
        "embedding": "model.embeddings.tok_embeddings.weight",
        "embedding_norm": "model.embeddings.norm.weight",
        "norm": "model.final_norm.weight",
        "attention_norm": "attn_norm.weight",
        "ffn_norm": "mlp_norm.weight",
        "o": "attn.Wo.weight",
        "down": "mlp.Wo.weight",
        "score_dense": "model.head.dense.weight",
    }
    renamed = {**Encoder.renamed, r"\.attn\.Wqkv\.": ".self_attn.qkv_proj.", r"\.mlp\.Wi\.": ".mlp.gate_up_proj."}
    ignored = ("model.head.*", "model.decoder.*", "model.classifier.*")

    def layer(self, c: Settings, index: int) -> LayerConfig:
        """Return a layer; tokens of one with a window see half of it on each side."""
        slides = self._slides(c, index)
        bias = bool(c("attention_bias"))
        attention = c.attention(
            rope=self._rope(c, "sliding_attention" if slides else "full_attention"),
            window=c.number("local_attention") // 2 + 1 if slides else None,
            bias=bias,
            output_bias=bias,
            bidirectional=True,
        )
        ffn = c.dense(bias=bool(c("mlp_bias")))
        return LayerConfig(mixer=attention, ffn=ffn, norms="pre" if index else "pre_ffn")

    def config(self, c: Settings) -> ModelConfig:
        """Return the model, whose token embeddings pass a layer norm."""
        return c.model(
            self.layer,
            norm="layer_bias" if c("norm_bias") else "layer",
            norm_eps=c.number("norm_eps"),
            encoder_input=EncoderInput(),
            score=self.head(c),
        )

    def head(self, c: Settings) -> ScoreHead | None:
        """Return the head of a reranker, which normalizes between its two layers. None for other models."""
        if not self.scores(c):
            return None
        function = c.named_function("classifier_activation", c("classifier_activation", "gelu")).removesuffix("_mul")
        return ScoreHead(
            pooling=c("classifier_pooling", "cls"),
            function=function,  # type: ignore[arg-type]  # checked with the model
            dense_bias=bool(c("classifier_bias")),
            norm=True,
        )

    def _slides(self, c: Settings, index: int) -> bool:
        """Return whether a layer has a window: as declared, else all but each third from the first on."""
        if c("layer_types"):
            return c.slides(index, full_every=1)
        return bool(index % c.number("global_attn_every_n_layers", 3))

    def _rope(self, c: Settings, kind: LayerType) -> Rope:
        """Return the rotary positions of a kind of layers, whose bases older files have as keys of their own."""
        key, usual = ("local_rope_theta", 1e4) if kind == "sliding_attention" else ("global_rope_theta", 160000.0)
        return c.rope(kind, theta=c.rope_parameters(kind).get("rope_theta") or c.number(key, usual))
