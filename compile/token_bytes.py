"""Bytes of weights that a decoded token reads, of a source and of its artifact. Knows sizes, not numbers."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import gguf
from radixlm.runtime.artifact.model_config import ModelConfig

from .families.registry import decoder_of
from .ops.layers import Embedding, ExpertLinear, Part
from .sources import Source
from .stored_weights import StoredWeights
from .weights.layout import ALIGNMENT, ROW_BLOCK, round_up
from .weights.plan import Matrix

_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # of a number in safetensors


def source_token_bytes(source: Source) -> int | None:
    """What a decoded token reads of the source; None where scales are stored beside their tensors."""
    sizes = {name: _stored_bytes(info.shape, info.type) for name, info in source.tensors().items()}
    known = {name: size for name, size in sizes.items() if size is not None}
    return _of_a_token(known, source.config) if len(known) == len(sizes) else None


def artifact_token_bytes(weights: StoredWeights) -> int:
    """What a decoded token reads of the artifact."""
    return _of_a_token(_artifact_sizes(weights), weights.source.config)


def artifact_bytes(weights: StoredWeights) -> int:
    """All of the artifact's weights."""
    return sum(_artifact_sizes(weights).values())


def _shares_of_a_token(config: ModelConfig) -> dict[str, float]:
    """How much of each tensor a decoded token reads."""
    active = {each.num_experts: each.num_active for layer in config.layers if (each := layer.experts) is not None}
    decoder = decoder_of(config)
    tied = decoder.embed_tokens if config.tie_word_embeddings else None

    def share(part: Part) -> float:
        if isinstance(part, ExpertLinear):
            return active[part.num_experts] / part.num_experts
        # a tied embedding is the output matrix, too, which is read as a whole
        return 1 / part.num_rows if isinstance(part, Embedding) and part != tied else 1.0

    return {name: share(part) for part in decoder.parts() for name in part.tensors}


def _of_a_token(sizes: Mapping[str, int], config: ModelConfig) -> int:
    shares = _shares_of_a_token(config)
    return round(sum(size * shares[name] for name, size in sizes.items()))


def _stored_bytes(shape: tuple[int, ...], type_: str) -> int | None:
    """Bytes of a tensor in its file; None for types whose scales are stored beside it."""
    if type_ in _BYTES:
        return prod(shape) * _BYTES[type_]
    if type_ not in gguf.GGMLQuantizationType.__members__:
        return None
    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_]]
    return prod(shape) // values * size


def _artifact_sizes(weights: StoredWeights) -> dict[str, int]:
    return {name: _artifact_bytes(name, info.shape, weights) for name, info in weights.source.tensors().items()}


def _artifact_bytes(name: str, shape: tuple[int, ...], weights: StoredWeights) -> int:
    """Bytes of a tensor in kernel layout, as `WeightPlan` places it."""
    kind = weights.kinds.get(name)
    if kind is None:
        return round_up(round_up(prod(shape), ROW_BLOCK) * 4, ALIGNMENT)
    matrix = Matrix(((name, prod(shape[:-1])),), kind, shape[-1], name in weights.sorted_inputs)
    return sum(round_up(size, ALIGNMENT) for size in matrix.array_bytes().values())
