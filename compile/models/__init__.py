"""The architectures that can be compiled. A new one is a file here and a line in `MODELS`."""

from __future__ import annotations

from typing import Protocol

from radixlm.runtime.errors import UnsupportedArchitecture
from radixlm.runtime.manifest import ModelConfig

from ..ops import Ops
from .llama import LlamaForCausalLM
from .qwen2 import Qwen2ForCausalLM

__all__ = ["MODELS", "Model", "build_model"]


class Model(Protocol):
    """What a model file offers: its parts as attributes, and `forward`."""

    def forward(self, op: Ops) -> None:
        """Append the whole model's operations, from token ids to logits."""


MODELS: dict[str, type[LlamaForCausalLM]] = {"llama": LlamaForCausalLM, "qwen2": Qwen2ForCausalLM}


def build_model(config: ModelConfig) -> Model:
    """The model of `config.architecture`.

    Raises:
        UnsupportedArchitecture: the registry has no such architecture.
    """
    if config.architecture not in MODELS:
        raise UnsupportedArchitecture(
            f"architecture {config.architecture!r} is not supported; supported are {', '.join(sorted(MODELS))}"
        )
    return MODELS[config.architecture](config)
