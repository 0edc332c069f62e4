"""By how much rounding moves what a model's matrices give, on the inputs that a text gives them.

Knows weights and the NumPy reference. A steadier measure than perplexity: a small model at 4 bits is a different
model each time, and may be better or worse by luck.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from unittest.mock import patch

import gguf
import numpy as np
from numpy.typing import NDArray
from radixlm.compile import reference
from radixlm.compile.sources import Source
from radixlm.compile.weights.quantization import requantize

Float32 = NDArray[np.float32]


@dataclass(frozen=True)
class Errors:
    """Squared errors of our q4 over those of llama.cpp's Q4_0, for matrices of one kind."""

    matrices: str  # such as "k_proj"; "all"
    count: int
    weights: float  # geometric mean over the matrices
    outputs: float  # the same
    outputs_at_worst: float  # of one matrix


def inputs_of(source: Source, texts: Sequence[NDArray[np.int32]]) -> dict[str, Float32]:
    """By the name of a weight, what enters that matrix, `[tokens of all texts, inputs]`."""
    seen: dict[str, list[Float32]] = defaultdict(list)
    linear = reference._Model._linear

    def recording(self: reference._Model, name: str, x: Float32) -> reference.Array:
        seen[name].append(x)
        return linear(self, name, x)

    with patch.object(reference._Model, "_linear", recording):
        for token_ids in texts:
            reference.reference_logits(source.config, lambda name: source.read(name).dequantize(), token_ids)
    return {name: np.concatenate(parts) for name, parts in seen.items()}


def by_kind(source: Source, inputs: dict[str, Float32]) -> list[Errors]:
    """The errors of every kind of matrix in a layer, and of all of them."""
    ratios: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for name, x in inputs.items():
        if ".layers." in name:
            ratio = _ratios(source.read(name).dequantize(), x)
            ratios[name.split(".")[-2]].append(ratio)
            ratios["all"].append(ratio)
    everything = ratios.pop("all")
    return [_summary(kind, np.array(values)) for kind, values in [*ratios.items(), ("all", everything)]]


def _ratios(values: Float32, x: Float32) -> tuple[float, float]:
    """Of the weights, and of the outputs."""
    ours = requantize(values, "q4").dequantize() - values
    q4_0 = gguf.GGMLQuantizationType.Q4_0
    theirs = gguf.dequantize(gguf.quantize(values, q4_0), q4_0) - values
    return _squared(ours) / _squared(theirs), _squared(x @ ours.T) / _squared(x @ theirs.T)


def _squared(values: Float32) -> float:
    return float(np.square(values, dtype=np.float64).sum())


def _summary(kind: str, values: NDArray[np.float64]) -> Errors:
    weights, outputs = np.exp(np.log(values).mean(axis=0))
    return Errors(kind, len(values), float(weights), float(outputs), float(values[:, 1].max()))
