"""OLMo 2, 3 and OLMoE (Ai2, 2024 and 2025): norms after the branches, and of all heads' queries and keys together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from radixlm.runtime.artifact.model_config import LayerConfig, QKNorm, Router

from .family import Family
from .settings import LayerType, Settings


class Olmo2(Family):
    """OLMo 2. llama.cpp's converter uses this name for OLMo 3, too: a file with a window is OLMo 3."""

    title = "OLMo 2"
    huggingface = {"Olmo2ForCausalLM": "olmo2"}
    gguf: ClassVar[tuple[str, ...]] = ("olmo2",)
    defaults = {"rms_norm_eps": 1e-5}

    def layer(self, c: Settings, index: int) -> LayerConfig:
        """Return layer `index`; in models with windows, only layers without scaled rotary positions have one."""
        c.refuse("attention_bias")
        window = c("sliding_window") if self.can_slide(c) and c.slides(index, full_every=4) else None
        kind: LayerType = "full_attention" if window is None else "sliding_attention"
        rope = c.rope(kind, theta=c.rope_parameters(kind).get("rope_theta") or _theta_of_all(c))
        attention = c.attention(qk_norm=QKNorm(over="width"), window=window, rope=rope)
        return LayerConfig(mixer=attention, ffn=c.dense(), norms="post")

    def can_slide(self, c: Settings) -> bool:
        """Return whether some layers have a window."""
        return c.format == "gguf" and c("sliding_window") is not None


class Olmo3(Olmo2):
    """OLMo 3: three layers of four have a window."""

    title = "OLMo 3"
    huggingface = {"Olmo3ForCausalLM": "olmo3"}
    gguf = ()
    gguf_of_others = ("olmo2",)
    defaults = {**Olmo2.defaults, "rope_theta": 500000.0, "sliding_window": 4096}

    def can_slide(self, c: Settings) -> bool:
        """Return True: every OLMo 3 has layers with a window."""
        return True


class Olmoe(Family):
    """OLMoE: OLMo with experts; its norms are before the branches."""

    title = "OLMoE"
    huggingface = {"OlmoeForCausalLM": "olmoe"}
    gguf = ("olmoe",)
    defaults = {"rms_norm_eps": 1e-5}

    def layer(self, c: Settings, index: int) -> LayerConfig:
        """Return layer `index`; expert weights come from a softmax over all experts, and are not normalized."""
        c.refuse("attention_bias", "clip_qkv")
        router = Router(renormalise=c("norm_topk_prob", False))
        experts = c.experts(intermediate_size=c.number("intermediate_size"), router=router)
        return LayerConfig(mixer=c.attention(qk_norm=QKNorm(over="width")), ffn=experts)


def _theta_of_all(c: Settings) -> float | None:
    """Return the base in `rope_parameters` that are not divided by type of layer; None if they have none."""
    declared = c("rope_parameters")
    return declared.get("rope_theta") if isinstance(declared, Mapping) else None
