"""Compute a digest of logits over a fixed sequence of token ids, to compare machines and targets bit by bit.

Knows artifacts and the compiled forward, not engines, caches or texts.
"""

from __future__ import annotations

import hashlib
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from ..artifact import WEIGHTS, Artifact
from ..artifact.manifest import PAGE_SIZE, KVDType, NumericClass
from ..errors import EngineError, InvalidParameter
from .batch import Batch, Float32Array, Int32Array
from .model_runner import ModelRunner

USUAL_TOKENS = 512
_GOLDEN_RATIO = 2654435769  # times 2**-32: multiples of it visit all of a vocabulary evenly (Knuth, volume 3, 6.4)


@dataclass(frozen=True)
class LogitsDigest:
    """The inputs of a computation, and the SHA-256 of its logits: float32, little-endian, row after row.

    Two digests are equal if weights, KV type, tokens and numeric class are.

    Attributes:
        weights: SHA-256 of the artifact's weights.
    """

    numeric_class: NumericClass
    target: str
    weights: str
    kv_dtype: KVDType
    num_tokens: int
    vocab_size: int
    sha256: str


def logits_digest(
    artifact: Artifact, *, num_tokens: int = USUAL_TOKENS, num_threads: int | None = None
) -> LogitsDigest:
    """Compute the logits after each of `num_tokens` tokens of one sequence, fewer if the context is shorter.

    Raises:
        UnsupportedCPU, CorruptArtifact: the module cannot be run.
        InvalidParameter: `num_tokens` is below 1.
        EngineError: a logit is not finite.
    """
    manifest = artifact.manifest
    if num_tokens < 1:
        raise InvalidParameter(f"num_tokens is {num_tokens}; it must be at least 1")
    num_tokens = min(num_tokens, manifest.context_length)
    vocab_size = manifest.model.vocab_size
    token_ids = np.array([usual_id(place, vocab_size) for place in range(num_tokens)], np.int32)
    num_pages = -(-num_tokens // PAGE_SIZE)
    runner = ModelRunner(artifact, num_pages=num_pages, num_threads=num_threads, num_state_slots=2)
    digest = hashlib.sha256()
    with closing(runner):
        step = min(manifest.module.max_num_tokens, manifest.module.max_num_logits)
        for start in range(0, num_tokens, step):
            logits = _logits(runner, token_ids, start, min(start + step, num_tokens), bool(manifest.model.state_bytes))
            if not np.isfinite(logits).all():
                raise EngineError(f"{manifest.name} has logits that are not finite; compile it again")
            digest.update(np.ascontiguousarray(logits, "<f4").data)
    return LogitsDigest(
        manifest.target.numeric_class,
        manifest.target.name,
        manifest.files[WEIGHTS].sha256,
        manifest.kv.dtype,
        num_tokens,
        vocab_size,
        digest.hexdigest(),
    )


def usual_id(place: int, vocab_size: int) -> int:
    """Return the token id at a place of the fixed sequence.

    >>> [usual_id(place, 320) for place in range(4)]
    [0, 197, 75, 273]
    """
    return (place * _GOLDEN_RATIO % 2**32) * vocab_size >> 32


def _logits(runner: ModelRunner, token_ids: Int32Array, start: int, stop: int, has_states: bool) -> Float32Array:
    """Return the logits after tokens `[start, stop)` of the only sequence, whose page n is page n of the pool."""
    count, positions = stop - start, np.arange(start, stop, dtype=np.int32)
    batch = Batch(
        token_ids[start:stop],
        positions,
        slots=positions,
        row_of_token=np.zeros(count, np.int32),
        page_table=np.arange(-(-stop // PAGE_SIZE), dtype=np.int32)[None],
        kv_lengths=positions + 1,
        logit_rows=np.arange(count, dtype=np.int32),
        state_in=np.array([min(start, 1)], np.int32) if has_states else None,
        state_out=np.ones(1, np.int32) if has_states else None,
    )
    return runner.forward(batch)
