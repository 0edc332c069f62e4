"""Qwen2 and Qwen2.5 (Yang et al., 2024): Llama's shape with a bias on queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    """The bias comes with `config.attention_bias`, which a Qwen2 source always sets."""

    title: ClassVar[str] = "Qwen2"
    huggingface_types: ClassVar[dict[str, str]] = {"Qwen2ForCausalLM": "qwen2"}
    gguf_permutes_rotary: ClassVar[bool] = False

    @staticmethod
    def settings(class_name: str, config: Mapping[str, Any]) -> dict[str, Any]:
        """The bias is part of the class and no key of its configuration; `use_sliding_window` switches the window."""
        window = config.get("sliding_window") if config.get("use_sliding_window") else None
        return {"sliding_window": window, "attention_bias": True}
