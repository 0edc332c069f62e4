"""The fake model with attention: what a token looks at, and how much, follows from the two tokens alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from radixlm.runtime.artifact.manifest import PAGE_SIZE
from radixlm.runtime.model.batch import Batch, Float32Array, Int32Array

from ...fake_model import VOCAB_SIZE, FakeModel

NUM_LAYERS, NUM_HEADS = 2, 2
WEIGHTS = np.random.default_rng(7).random((NUM_LAYERS, NUM_HEADS, VOCAB_SIZE, VOCAB_SIZE)).astype(np.float32)
"""How much a token (the first) looks at another, by layer and KV head; no softmax, so that sums are easily told."""
NUM_NEAR = 16  # rows that do not count for a token of a sample: the last that it sees


class FakeScoredModel(FakeModel):
    """Adds to `attention_sums` when asked to, as `ModelRunner` does."""

    def __init__(self, num_pages: int, vocab_size: int = VOCAB_SIZE) -> None:
        super().__init__(num_pages, vocab_size)
        self.attention_sums: Float32Array | None = np.zeros((NUM_LAYERS, NUM_HEADS, num_pages, PAGE_SIZE), np.float32)
        self.attention_counts: Int32Array | None = np.zeros((num_pages, PAGE_SIZE), np.int32)
        self.queries: Float32Array | None = None
        self.tokens = np.zeros(num_pages * PAGE_SIZE, np.int64)  # by row, those that `forward` has written
        self.num_scored = 0

    def forward(self, batch: Batch) -> Float32Array:
        self.tokens[batch.arrays.slots] = batch.arrays.token_ids
        return super().forward(batch)

    def forward_scored(self, batch: Batch, *, stride: int) -> Float32Array:
        logits = self.forward(batch)
        self.num_scored += 1
        assert self.attention_sums is not None and self.attention_counts is not None
        sums, counts = self.attention_sums.reshape(NUM_LAYERS, NUM_HEADS, -1), self.attention_counts.reshape(-1)
        arrays = batch.arrays
        for i in scored_tokens(arrays.row_of_token.tolist(), stride):
            pages = arrays.page_table[arrays.row_of_token[i]]
            num_rows = max(0, int(arrays.kv_lengths[i]) - (0 if stride == 1 else NUM_NEAR))
            slots = (pages[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).reshape(-1)[:num_rows]
            sums[:, :, slots] += WEIGHTS[:, :, arrays.token_ids[i], self.tokens[slots]]
            counts[slots] += 1
        return logits

    def close(self) -> None:
        super().close()
        self.attention_sums = self.attention_counts = None


def scored_tokens(row_of_token: Sequence[int], stride: int) -> list[int]:
    """Of each sequence one of `stride` tokens, counted from its last; of a single one none, unless it is all."""
    found = []
    for row in dict.fromkeys(row_of_token):
        mine = [i for i, each in enumerate(row_of_token) if each == row]
        found += mine[::-1][::stride] if stride == 1 or len(mine) > 1 else []
    return found
