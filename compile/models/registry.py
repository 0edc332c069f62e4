"""The model families that can be compiled. A new one is a file here and a line in `MODELS`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from radixlm.runtime.artifact.manifest import ModelConfig

from ..ops.layers import Embedding, Linear, RMSNorm
from .llama import LlamaForCausalLM
from .qwen2 import Qwen2ForCausalLM

if TYPE_CHECKING:
    from ..ops.ops import Ops


class Model(Protocol):
    """What a model file offers: its names, its weights as attributes (`ops/layers.py`), and `forward`."""

    title: ClassVar[str]  # what people call these models
    huggingface_types: ClassVar[dict[str, str]]  # `architectures` of config.json, with their `model_type`
    gguf_permutes_rotary: ClassVar[bool]  # whether llama.cpp's converter reorders the rows of q and k
    gguf_layer_names: ClassVar[Mapping[str, str]]  # llama.cpp's names of a layer's parts -> the checkpoint's

    def __init__(self, config: ModelConfig) -> None: ...

    @staticmethod
    def settings(class_name: str, config: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of ModelConfig whose keys in config.json differ between families.

        `class_name` is one of `huggingface_types`.
        """

    def forward(self, op: Ops) -> None:
        """Append the whole model's operations, from token ids to logits."""


MODELS: dict[str, type[Model]] = {"llama": LlamaForCausalLM, "qwen2": Qwen2ForCausalLM}

SUPPORTED = "supported are " + " and ".join(model.title for model in MODELS.values())


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The checkpoint's names of all weights of a model of these dimensions; matrices are `[out, in]`."""
    return dict(_shapes(MODELS[config.architecture](config)))


def _shapes(module: object) -> Iterator[tuple[str, tuple[int, ...]]]:
    for value in vars(module).values():
        for part in value if isinstance(value, list) else [value]:
            match part:
                case Linear():
                    yield part.name, (part.num_outputs, part.num_inputs)
                    if part.has_bias:
                        yield part.bias_name, (part.num_outputs,)
                case Embedding():
                    yield part.name, (part.num_rows, part.size)
                case RMSNorm():
                    yield part.name, (part.size,)
                case _:
                    yield from _shapes(part)
