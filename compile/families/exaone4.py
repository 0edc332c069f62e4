"""EXAONE 4 (LG AI Research, 2025): norms after the branches, and of each head's query and key."""

from __future__ import annotations

from radixlm.runtime.artifact.model_config import LayerConfig, QKNorm

from .family import Family
from .settings import Settings


class Exaone4(Family):
    """EXAONE 4: in models with a window, every fourth layer has full attention and no rotary positions."""

    title = "EXAONE 4"
    huggingface = {"Exaone4ForCausalLM": "exaone4"}
    gguf = ("exaone4",)
    defaults = {"rms_norm_eps": 1e-5}

    def layer(self, c: Settings, index: int) -> LayerConfig:
        """Return layer `index`; if no layer has a window, all have rotary positions."""
        window = c("sliding_window")
        is_full = window is not None and not c.slides(index, full_every=4)
        attention = c.attention(
            qk_norm=QKNorm(), window=None if is_full else window, rope=None if is_full else c.rope()
        )
        return LayerConfig(mixer=attention, ffn=c.dense(), norms="post")
