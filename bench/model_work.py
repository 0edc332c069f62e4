"""The bytes of weights and KV, and the operations, that a forward pass needs, from an artifact's manifest.

A lower bound: norms, softmax, rotary positions and activations are not counted, nor that some activations have 16 bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from radixlm.runtime.artifact import Artifact
from radixlm.runtime.artifact.manifest import Manifest

from .kernels.case import Work


def decode_bytes_per_token(artifact: Artifact) -> int:
    """Return the bytes of weights that a token reads: of the active experts only, and not of a separate embedding."""
    return artifact.manifest.quantization.token_bytes or artifact.manifest.module.weights_bytes


def prefill_work(artifact: Artifact, num_tokens: int, num_cached: int = 0) -> Work:
    """Return the work of the prompt's uncached tokens, until the first logits, in steps of the module's maximum."""
    most = artifact.manifest.module.max_num_tokens
    starts = range(num_cached, num_tokens, most)
    chunks = [range(start, min(start + most, num_tokens)) for start in starts]
    steps = [_work(artifact, [position + 1 for position in chunk], chunk[-1] + 1, 0) for chunk in chunks]
    head = 2.0 * artifact.manifest.model.vocab_size * artifact.manifest.model.hidden_size
    return Work(
        sum(step.num_bytes for step in steps),
        sum(step.integer_operations for step in steps) + head,
        sum(step.float_operations for step in steps),
    )


def decode_work(artifact: Artifact, context: int, num_streams: int = 1) -> Work:
    """Return the work of a step in which each stream generates a token; `context` is the mean tokens of a stream."""
    return _work(artifact, [context] * num_streams, context * num_streams, num_streams)


def _work(artifact: Artifact, lengths: Sequence[int], num_kv_rows: int, num_logits: int) -> Work:
    """Return the work of tokens that attend to `lengths` rows of KV; weights and `num_kv_rows` are read once.

    With codes, attention multiplies integers, and products with keys of 16 bits count twice.
    """
    manifest = artifact.manifest
    model, kv = manifest.model, manifest.kv
    width = model.num_attention_heads * model.head_dim
    head = 2.0 * num_logits * model.vocab_size * model.hidden_size
    products = 2.0 * width * sum(lengths) * model.num_hidden_layers  # of queries and keys, and as many of values
    matrices = 2.0 * len(lengths) * _layer_weights(manifest) * model.num_hidden_layers
    return Work(
        num_bytes=decode_bytes_per_token(artifact) + num_kv_rows * kv.page_bytes / kv.page_size,
        integer_operations=matrices + head + (3 * products if kv.has_codes else 0),
        float_operations=0 if kv.has_codes else 2 * products,
    )


def _layer_weights(manifest: Manifest) -> int:
    """Return the number of weights of a layer's matrices."""
    model = manifest.model
    queries, keys = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    return model.hidden_size * (2 * queries + 2 * keys) + 3 * model.hidden_size * model.intermediate_size
