"""Evaluate a model in plain NumPy, so that compiled kernels have something slow and obvious to agree with.

The same model file is evaluated that calls the kernels; goldens of `transformers` are the witness of the model files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from radixlm.runtime.artifact.model_config import ModelConfig

from .families.registry import decoder_of
from .ops.functions import Array
from .ops.reference_ops import GetWeight, ReferenceOps


def reference_logits(
    config: ModelConfig,
    weight: GetWeight,
    token_ids: Sequence[int] | npt.NDArray[np.integer[Any]],
    *,
    layers: Sequence[int] | None = None,
    **options: Any,
) -> Array:
    """Logits after each token of one sequence, `[len(token_ids), vocab_size]`, positions counted from 0.

    `weight(name)` gives a dequantized tensor under its Hugging Face name, matrices as `[out, in]`; `options` are those
    of `ReferenceOps`. With `layers`, a token passes these layers only, as if the others added nothing.

    >>> weight = lambda name: source.read(name).dequantize()  # doctest: +SKIP
    >>> logits = reference_logits(source.config, weight, [1, 15043])  # doctest: +SKIP
    """
    return evaluate(config, ReferenceOps(weight, token_ids, **options), layers)


def evaluate(config: ModelConfig, op: ReferenceOps, layers: Sequence[int] | None = None) -> Array:
    """Logits of the tokens of `op`, after all layers or after `layers`."""
    decoder = decoder_of(config)
    if layers is not None:
        decoder.layers = [decoder.layers[index] for index in layers]
    return decoder.forward(op)[0]
