"""A pruned prefix is an ordinary row: fewer KV rows than positions, any tokens in each layer and head, in any order."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from radixlm.compile.ops.operations import AttentionSpec
from radixlm.compile.ops.reference_ops import ReferenceOps
from radixlm.compile.reference import evaluate
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.artifact.manifest import PAGE_SIZE, KVDType, KVLayout
from radixlm.runtime.artifact.model_config import ModelConfig
from radixlm.runtime.model.batch import Batch
from radixlm.runtime.model.kv_rows import KVRows
from radixlm.runtime.model.model_runner import ModelRunner

from ..goldens.tiny_models import TINY_MODELS

NUM_PREFIX, NUM_KEPT, NUM_NEW = 75, 27, 30
TOKEN_IDS = np.random.default_rng(2).integers(0, 320, NUM_PREFIX + NUM_NEW)
FULL_PAGES = np.array([7, 0, 3, 8, 1, 9, 2], np.int32)
PRUNED_PAGES = np.array([5, 11, 4, 10], np.int32)


def batch(start: int, stop: int, pages: np.ndarray, num_missing: int = 0) -> Batch:
    """Tokens `[start, stop)` and their logits, in pages whose KV rows are `num_missing` fewer than the positions."""
    positions = np.arange(start, stop, dtype=np.int32)
    kv_rows = positions - np.int32(num_missing)
    slots = pages[kv_rows // PAGE_SIZE] * np.int32(PAGE_SIZE) + kv_rows % np.int32(PAGE_SIZE)
    ids = TOKEN_IDS[start:stop].astype(np.int32)
    rows = np.arange(stop - start, dtype=np.int32)
    return Batch(ids, positions, slots.astype(np.int32), np.zeros_like(rows), pages[None], kv_rows + np.int32(1), rows)


@pytest.fixture(params=["f32", "k12v8"])
def runner(
    tiny_in_floats: Callable[[KVDType], Artifact], request: pytest.FixtureRequest
) -> Iterator[tuple[ModelRunner, Artifact]]:
    artifact = tiny_in_floats(request.param)
    runner = ModelRunner(artifact, num_pages=12, num_threads=2)
    yield runner, artifact
    runner.close()


def prefix_of(runner: ModelRunner, layout: KVLayout) -> KVRows:
    """The prefix's rows, computed here."""
    for start in range(0, NUM_PREFIX, 60):  # a step has up to 64 logits
        runner.forward(batch(start, min(start + 60, NUM_PREFIX), FULL_PAGES))
    pages = np.zeros((-(-NUM_PREFIX // PAGE_SIZE), layout.page_bytes), np.uint8)
    runner.read_pages(FULL_PAGES[: len(pages)].tolist(), pages)
    return KVRows.of_pages(layout, pages, NUM_PREFIX)


def random_order(config: ModelConfig) -> np.ndarray:
    shape = (config.num_hidden_layers, config.num_key_value_heads, NUM_PREFIX)
    return np.random.default_rng(3).random(shape).argsort(axis=-1)


class AfterPrefix(ReferenceOps):
    """Tokens that come after a prefix, and attend to its rows and to the new tokens before."""

    prefix: KVRows

    def positions(self) -> np.ndarray:
        return NUM_PREFIX + super().positions()

    def attend(
        self, query: np.ndarray, key: np.ndarray, value: np.ndarray, spec: AttentionSpec, head: int, sinks: None
    ) -> np.ndarray:
        kv_head = head // (spec.attention.num_heads // spec.attention.num_kv_heads)
        before = self.prefix.items[:, spec.kv_layer, kv_head].astype(np.float64)
        if self.prefix.scales is not None:
            before = before * self.prefix.scales[:, spec.kv_layer, kv_head, :, None]
        scores = query @ np.concatenate([before[0], key]).T * query.shape[-1] ** -0.5
        seen = np.tri(len(query), scores.shape[1], self.prefix.num_tokens, dtype=bool)
        weights = np.exp(np.where(seen, scores, -np.inf) - scores.max(axis=-1, keepdims=True))
        return np.asarray(weights / weights.sum(axis=-1, keepdims=True) @ np.concatenate([before[1], value]))


def expected(config: ModelConfig, kv_dtype: KVDType, prefix: KVRows) -> np.ndarray:
    """Logits of the new tokens by NumPy, which attends to the prefix's rows and to the new tokens before."""
    weight = TINY_MODELS["llama3"].tensors.__getitem__
    op = AfterPrefix(weight, TOKEN_IDS[NUM_PREFIX:], kv_dtype=kv_dtype, dtype=np.float64)
    op.prefix = prefix
    return evaluate(config, op)


def test_other_rows_in_each_head_give_what_numpy_gives(runner: tuple[ModelRunner, Artifact]) -> None:
    model, manifest = runner[0], runner[1].manifest
    prefix = prefix_of(model, manifest.kv)
    kept = prefix.take(random_order(manifest.model)[:, :, :NUM_KEPT])
    model.write_pages(PRUNED_PAGES[:2].tolist(), kept.to_pages())
    missing, half = NUM_PREFIX - NUM_KEPT, NUM_PREFIX + NUM_NEW // 2
    whole = model.forward(batch(NUM_PREFIX, NUM_PREFIX + NUM_NEW, PRUNED_PAGES, missing)).copy()
    wanted = expected(manifest.model, manifest.kv.dtype, kept)
    np.testing.assert_allclose(whole, wanted, 0, (5e-2 if manifest.kv.has_codes else 1e-3) * wanted.std())
    first = model.forward(batch(NUM_PREFIX, half, PRUNED_PAGES, missing)).copy()
    second = model.forward(batch(half, NUM_PREFIX + NUM_NEW, PRUNED_PAGES, missing)).copy()
    assert np.array_equal(np.concatenate([first, second]), whole)


def test_all_rows_in_their_order_are_the_full_prefix_and_in_another_nearly(
    runner: tuple[ModelRunner, Artifact],
) -> None:
    model, manifest = runner[0], runner[1].manifest
    prefix = prefix_of(model, manifest.kv)
    exact = model.forward(batch(NUM_PREFIX, NUM_PREFIX + NUM_NEW, FULL_PAGES)).copy()
    order = random_order(manifest.model)
    moved = KVRows.of_pages(manifest.kv, prefix.take(order).to_pages(), NUM_PREFIX)
    model.write_pages(FULL_PAGES[:5].tolist(), moved.to_pages())
    other = model.forward(batch(NUM_PREFIX, NUM_PREFIX + NUM_NEW, FULL_PAGES)).copy()
    np.testing.assert_allclose(other, exact, 0, (5e-2 if manifest.kv.has_codes else 1e-3) * exact.std())
    model.write_pages(FULL_PAGES[:5].tolist(), moved.take(np.argsort(order, axis=-1)).to_pages())
    assert np.array_equal(model.forward(batch(NUM_PREFIX, NUM_PREFIX + NUM_NEW, FULL_PAGES)), exact)
