"""Gemma 2 and 3 (Google, 2024 and 2025): norms around each branch, windows, and gains that are stored minus one."""

from __future__ import annotations

from typing import ClassVar

from radixlm.runtime.artifact.model_config import LayerConfig, ModelConfig, QKNorm, Rope

from .family import Family
from .settings import Settings

_SIZES = {  # defaults of the classes, for keys that config.json lacks, as in multimodal models
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}

_EMBEDDING = "gemma-embedding"  # llama.cpp's name of EmbeddingGemma


class Gemma2(Family):
    """Gemma 2: every other layer has a sliding window; scores and logits are soft-capped."""

    title = "Gemma 2"
    huggingface = {"Gemma2ForCausalLM": "gemma2"}
    gguf: ClassVar[tuple[str, ...]] = ("gemma2",)
    defaults = {
        **_SIZES,
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    }
    names = {"ffn_norm": "pre_feedforward_layernorm.weight"}
    gains_minus_one = ("huggingface",)
    full_every, layers_of_27b = 2, 46
    may_be_bidirectional = False

    def layer(self, c: Settings, index: int) -> LayerConfig:
        """Return layer `index`, with norms before and after each branch."""
        c.refuse("attention_bias", *(() if self.may_be_bidirectional else ("use_bidirectional_attention",)))
        slides = c.slides(index, full_every=self.full_every)
        attention = c.attention(
            rope=self.rope(c, slides=slides),
            window=self._window(c) if slides else None,
            bidirectional=self._is_bidirectional(c),
            scale=self._score_divisor(c) ** -0.5,
            soft_cap=c("attn_logit_softcapping"),
            qk_norm=self.qk_norm,
        )
        return LayerConfig(mixer=attention, ffn=c.dense(function=c.function("gelu_pytorch_tanh")), norms="sandwich")

    qk_norm: QKNorm | None = None

    def rope(self, c: Settings, *, slides: bool) -> Rope:
        """Return the same rotary positions for all layers."""
        return c.rope()

    def config(self, c: Settings) -> ModelConfig:
        """Return the model, whose embeddings are multiplied by the root of their width."""
        return c.model(
            self.layer,
            embedding_factor=c.number("hidden_size") ** 0.5,
            logits_soft_cap=c("final_logit_softcapping"),
        )

    def _window(self, c: Settings) -> int | None:
        """Both sides of a window that reaches to both have half of it, as transformers counts them."""
        window: int | None = c("sliding_window")
        return window // 2 + 1 if window is not None and self._is_bidirectional(c) else window

    def _is_bidirectional(self, c: Settings) -> bool:
        """Return whether tokens see those after them; llama.cpp has a name of its own for such models."""
        return bool(c("use_bidirectional_attention", c.class_name == _EMBEDDING))

    def _score_divisor(self, c: Settings) -> float:
        """Return the number whose square root divides the scores: `query_pre_attn_scalar`.

        GGUF has no key for it; only that of 27B differs from the head size.
        """
        if c.format == "huggingface":
            return float(c.number("query_pre_attn_scalar"))
        is_27b = c.num_layers == self.layers_of_27b
        return float(c.number("hidden_size") / c.number("num_attention_heads")) if is_27b else float(c.head_dim)


class Gemma3(Gemma2):
    """Gemma 3: five layers of six have a window and their own rotary positions; heads are normalized, not capped.

    Tokens of EmbeddingGemma see those after them.
    """

    title = "Gemma 3"
    may_be_bidirectional = True
    huggingface = {"Gemma3ForCausalLM": "gemma3_text", "Gemma3ForConditionalGeneration": "gemma3"}
    gguf = ("gemma3", _EMBEDDING)
    defaults = {**_SIZES, "vocab_size": 262208, "max_position_embeddings": 131072, "rope_theta": 1e6}
    full_every, layers_of_27b = 6, 62
    qk_norm = QKNorm()

    def rope(self, c: Settings, *, slides: bool) -> Rope:
        """Return rotary positions: those of windows have a smaller base, and are never scaled."""
        if not slides:
            return c.rope()
        theta = c.rope_parameters("sliding_attention").get("rope_theta", c.number("rope_local_base_freq", 1e4))
        return c.rope("sliding_attention", theta=theta)
