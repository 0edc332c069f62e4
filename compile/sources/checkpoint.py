"""Checkpoints held to the tensors that their model has, and configurations to their ranges. Knows no file format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from radixlm.runtime.artifact.manifest import ModelConfig
from radixlm.runtime.errors import CorruptSource, UnsupportedArchitecture

from ..models.registry import SUPPORTED, weight_shapes
from .source import TensorInfo

# Texts of tokens that end a reply, whatever the metadata declares (llama.cpp's end-of-generation list).
END_OF_REPLY = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<EOT>",
)

T = TypeVar("T")


def checked(label: str, values: Mapping[str, Any], type_: type[T]) -> T:
    """`values` as `type_`, every number in its range; raises CorruptSource that names one which is not."""
    try:
        return msgspec.convert(dict(values), type_)
    except msgspec.ValidationError as error:
        raise CorruptSource(f"{label}: {error}; the source's configuration cannot be right") from error


def check_heads(label: str, config: ModelConfig) -> None:
    """Raise CorruptSource where query heads do not divide among key-value heads, or a head's size is odd."""
    if config.num_attention_heads % config.num_key_value_heads:
        raise CorruptSource(
            f"{label}: {config.num_attention_heads} attention heads cannot share "
            f"{config.num_key_value_heads} key-value heads"
        )
    if config.head_dim % 2:
        raise CorruptSource(f"{label}: a head of {config.head_dim} values cannot be rotated in pairs")


def check_tensors(label: str, config: ModelConfig, tensors: Mapping[str, TensorInfo]) -> None:
    """Raise CorruptSource for a missing tensor or a wrong shape, UnsupportedArchitecture for one too many."""
    expected = weight_shapes(config)
    for name, shape in expected.items():
        if name not in tensors:
            raise CorruptSource(f"{label}: {name} is missing; the file is incomplete, fetch it again")
        if tensors[name].shape != shape:
            raise CorruptSource(
                f"{label}: {name} has shape {list(tensors[name].shape)}, the configuration asks for {list(shape)}"
            )
    for name in tensors:
        if name not in expected:
            raise UnsupportedArchitecture(
                f"{label}: {name} has no place in the {config.architecture} architecture; {SUPPORTED}"
            )


def one_line(error: Exception) -> str:
    """What a library's error says, in one line of at most 200 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."
