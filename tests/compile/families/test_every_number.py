"""Each number of each tiny family's configuration shows in its golden: without it, logits are others.

Whatever a family reads of a configuration ends as a field of `ModelConfig`. One that is not what it is by default is
set back, and one that has no default is changed, in all layers that have it. What a golden cannot see is listed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import FieldInfo, fields, replace
from radixlm.compile.kv_layout import resolved
from radixlm.compile.ops.reference_ops import ReferenceOps
from radixlm.compile.reference import evaluate
from radixlm.compile.sources.source import Source
from radixlm.runtime.artifact.model_config import ModelConfig

from ...goldens.families import FAMILIES
from ...goldens.tiny_outputs import TinyOutputs
from .harness import NAMES, SEEN

Struct = msgspec.Struct
# What tensors' shapes say, too: another number fits no file.
SHAPES = {"vocab_size", "hidden_size", "max_position_embeddings", "num_heads", "num_kv_heads", "head_dim", "latent_dim"}
SHAPES |= {"plain_dim", "value_dim", "num_experts", "intermediate_size", "kernel_size", "num_key_heads", "key_dim"}
SHAPES |= {"num_value_heads", "num_groups", "state_dim", "size", "architecture", "rotary_dim"}
# What goldens cannot see, and why.
SAME_WEIGHTS = "the softmax of those that were chosen is that of all, made to add up to one"
BEYOND = "as released models have it, which is beyond the context"
OTHER_TABLE = "the context that it is compiled for takes the other table"
BLIND: dict[tuple[str, str], str] = {
    ("phi3", "layers.mixer.window"): BEYOND,
    ("phi3-short", "layers.mixer.window"): BEYOND,
    ("phi3", "layers.mixer.rope.scaling.short_factors"): OTHER_TABLE,
    ("phi3-short", "layers.mixer.rope.scaling.long_factors"): OTHER_TABLE,
    ("phi3", "layers.mixer.rope.scaling.original_max_position_embeddings"): "half of it chooses the same table",
    ("llama4-short", "layers.mixer.chunk"): BEYOND,
    ("llama4-short", "layers.mixer.temperature"): BEYOND,
    ("llama4-short", "layers.mixer.temperature.beta"): BEYOND,
    ("llama4-short", "layers.mixer.temperature.original_length"): BEYOND,
    ("llama4-short", "layers.mixer.temperature.shift"): BEYOND,
    ("llama4", "layers.mixer.qk_norm.after_rope"): "a norm without gain is the same before a rotation",
    ("llama4-short", "layers.mixer.qk_norm.after_rope"): "a norm without gain is the same before a rotation",
    ("granitemoe", "layers.ffn.router.scores"): SAME_WEIGHTS,
    ("granite4_h-moe", "layers.ffn.router.scores"): SAME_WEIGHTS,
    ("gpt_oss", "layers.ffn.router.scores"): SAME_WEIGHTS,
    ("gpt_oss-truncated", "layers.ffn.router.scores"): SAME_WEIGHTS,
    ("gpt_oss-mxfp4", "layers.ffn.router.scores"): SAME_WEIGHTS,
    ("ernie4_5_moe", "layers.ffn.router.least_sum"): "1e-12, which no sum of weights is near",
    ("deepseek_v2", "layers.ffn.router.group_score"): "there is one group",
    ("deepseek_v2-lite", "layers.ffn.router.group_score"): "there is one group",
    ("exaone4-64", "norm_eps"): "what 64 layers add up to is so large that no epsilon shows; exaone4's does",
    ("olmo3", "layers.mixer.rope.scaling.attention_factor"): "YaRN's own, as released models have it",
    ("muse_glimmer", "layers.post_norm_eps"): "1e-8 beside 1e-5 moves logits by half of what is seen",
}


@pytest.mark.parametrize("name", NAMES)
def test_every_number_of_a_configuration_shows(name: str, source_of: Callable[..., Source]) -> None:
    source = source_of(name)
    weights = cache(source.read_float32)
    unseen = {label for label, config in changed_models(source.config) if not shows(config, name, weights)}
    assert unseen == {label for of, label in BLIND if of == name}


def shows(config: ModelConfig, name: str, weights: Callable[[str], np.ndarray]) -> bool:
    """Whether a prompt's logits are others, or the model cannot be computed with its tensors."""
    for prompt in TinyOutputs.load(name).prompts:  # the shortest first
        try:
            with np.errstate(all="ignore"):
                logits = evaluate(resolved(config, FAMILIES[name].context_length), ReferenceOps(weights, prompt.ids))
        except (ValueError, KeyError, AttributeError, AssertionError, TypeError):  # whatever shapes lead to
            return True
        if not prompt.distance(logits[prompt.rows]) <= SEEN:
            return True
    return False


def changed_models(config: ModelConfig) -> Iterator[tuple[str, ModelConfig]]:
    """The model with one field changed, by the field's name; of a layer's, in all layers that have it."""
    of_layers: dict[str, dict[int, Any]] = {}
    for index, layer in enumerate(config.layers):
        for label, changed in changes(layer, "layers."):
            of_layers.setdefault(label, {})[index] = changed
    for label, found in of_layers.items():
        yield label, replace(config, layers=tuple(found.get(i, layer) for i, layer in enumerate(config.layers)))
    yield from ((label, changed) for label, changed in changes(config, "") if label != "layers")


def changes(part: Struct, path: str) -> Iterator[tuple[str, Any]]:
    """`part` with one field changed, of its own or of a part of it."""
    for field in fields(part):
        value, label = getattr(part, field.name), path + field.name
        if field.name in SHAPES or field.name == "layers":
            continue
        if isinstance(value, Struct):
            if field.default is None:
                yield label, replace(part, **{field.name: None})
            yield from (
                (inner, replace(part, **{field.name: changed})) for inner, changed in changes(value, f"{label}.")
            )
        elif (other := _other(field, value)) != value:
            yield label, replace(part, **{field.name: other})


def _other(field: FieldInfo, value: Any) -> Any:
    if field.default is not msgspec.NODEFAULT:
        return field.default
    if field.name == "norm_eps":
        return 1e3 * value  # so small that less of it does not show
    if isinstance(value, tuple):
        return tuple(1.5 * each for each in value)
    if isinstance(value, float):
        return 1.5 * value
    return value // 2 if isinstance(value, int) and value > 1 else 2
