"""`forward_scored` is `forward` to the last bit; its mass is what NumPy's softmax puts on each KV row, and its queries
are NumPy's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from radixlm.compile.ops.operations import AttentionSpec
from radixlm.compile.ops.reference_ops import ReferenceOps
from radixlm.compile.reference import evaluate
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.artifact.manifest import PAGE_SIZE, KVDType
from radixlm.runtime.artifact.model_config import ModelConfig
from radixlm.runtime.errors import EngineError
from radixlm.runtime.model.batch import Batch
from radixlm.runtime.model.model_runner import ModelRunner

from ..goldens.tiny_models import TINY_MODELS

NUM_TOKENS, NUM_PAGES = 70, 6
PAGES = np.array([4, 0, 5, 1, 2], np.int32)  # of the sequence


def batch(token_ids: np.ndarray, start: int, stop: int) -> Batch:
    """Tokens `[start, stop)`, with all their logits."""
    positions = np.arange(start, stop, dtype=np.int32)
    rows = positions - np.int32(start)
    slots = PAGES[positions // PAGE_SIZE] * np.int32(PAGE_SIZE) + positions % np.int32(PAGE_SIZE)
    ids = token_ids[start:stop].astype(np.int32)
    return Batch(ids, positions, slots, np.zeros_like(rows), PAGES[None], positions + np.int32(1), rows)


class Listening(ReferenceOps):
    """Remembers the weights of KV rows and the queries, head by head, layer by layer."""

    found: list[np.ndarray]
    queries: list[np.ndarray]

    def attend(
        self, query: np.ndarray, key: np.ndarray, value: np.ndarray, spec: AttentionSpec, head: int, sinks: None
    ) -> np.ndarray:
        scores = np.where(np.tri(len(query), dtype=bool), query @ key.T * query.shape[-1] ** -0.5, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        self.found.append(weights.sum(axis=0))
        self.queries.append(query)
        return np.asarray(weights @ value)


def expected_scores(config: ModelConfig, token_ids: np.ndarray, kv_dtype: KVDType) -> tuple[np.ndarray, np.ndarray]:
    """float64 `[layers, kv_heads, NUM_PAGES, PAGE_SIZE]`, the reference's weights, and `[layers, tokens, heads,
    head_dim]`, its queries."""
    weight = TINY_MODELS["llama3"].tensors.__getitem__
    op = Listening(weight, token_ids, kv_dtype=kv_dtype, dtype=np.float64)
    op.found, op.queries = [], []
    evaluate(config, op)
    heads = np.array(op.found).reshape(config.num_hidden_layers, config.num_key_value_heads, -1, len(token_ids))
    mass = np.zeros((*heads.shape[:2], NUM_PAGES, PAGE_SIZE))
    positions = np.arange(len(token_ids))
    mass[:, :, PAGES[positions // PAGE_SIZE], positions % PAGE_SIZE] = heads.sum(axis=2)
    shape = (config.num_hidden_layers, config.num_attention_heads, len(token_ids), config.head_dim)
    return mass, np.array(op.queries).reshape(shape).swapaxes(1, 2)


@pytest.mark.parametrize("kv_dtype", ["f32", "k12v8"])
def test_scored_forward_is_forward_and_its_mass_is_the_softmax(
    tiny_in_floats: Callable[[KVDType], Artifact], kv_dtype: KVDType
) -> None:
    artifact = tiny_in_floats(kv_dtype)
    config = artifact.manifest.model
    token_ids = np.random.default_rng(1).integers(0, config.vocab_size, NUM_TOKENS)
    plain = ModelRunner(artifact, num_pages=NUM_PAGES, num_threads=2)
    scored = ModelRunner(artifact, num_pages=NUM_PAGES, num_threads=2, keep_scores=True)
    assert scored.attention_sums is not None and scored.attention_counts is not None and scored.queries is not None
    for start, stop in ((0, 40), (40, 41), (41, 69), (69, 70)):
        step = batch(token_ids, start, stop)
        assert np.array_equal(plain.forward(step), scored.forward_scored(step, stride=1))
    # of codes, numbers near ties are rounded either way, and weights to 1/255 of the largest
    tolerance = {"f32": 1e-3, "k12v8": 5e-2}[kv_dtype]
    mass, queries = expected_scores(config, token_ids, kv_dtype)
    np.testing.assert_allclose(scored.attention_sums, mass, 0, tolerance)
    np.testing.assert_allclose(scored.queries[:, :1], queries[:, -1:], 0, tolerance)  # of the last step, one token
    np.testing.assert_allclose(scored.queries[:, 1:28], queries[:, 42:69], 0, tolerance)  # what is left of one before
    assert scored.attention_counts.sum() == NUM_TOKENS * (NUM_TOKENS + 1) // 2
    before = scored.attention_sums.copy()
    assert np.array_equal(scored.forward(step), plain.forward(step))
    assert np.array_equal(scored.attention_sums, before)
    scored.attention_counts[...] = 0
    scored.forward_scored(batch(token_ids, 40, 68), stride=8)
    assert scored.attention_counts.sum() == sum(length - 16 for length in (68, 60, 52, 44))
    plain.close()
    scored.close()


def test_mass_is_only_kept_when_asked_for(tiny_artifact: Path) -> None:
    runner = ModelRunner(Artifact.open(tiny_artifact), num_pages=NUM_PAGES, num_threads=1)
    assert runner.attention_sums is None and runner.queries is None
    with pytest.raises(EngineError, match="keep_scores=True"):
        runner.forward_scored(batch(np.arange(20), 0, 20), stride=1)
    runner.close()
