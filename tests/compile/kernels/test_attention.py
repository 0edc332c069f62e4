"""Attention over scattered pages, against softmax in float64; rows beyond a token's length are NaN throughout."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from radixlm.compile.kernels.attention import SPAN, SPLIT_TOKENS, attention, span_scratch_floats
from radixlm.compile.kernels.layout import ROW_BLOCK, round_up
from radixlm.compile.targets import Target
from radixlm.runtime.manifest import PAGE_SIZE, KVDType

from .harness import built, every_target
from .pool import Pool, layout_of

LAYER, NUM_LAYERS = 1, 2
SHAPES: list[tuple[KVDType, int, int, int]] = [  # query heads, KV heads, head_dim: 1, 3, 4, 7 and 8 queries share a key
    ("f32", 1, 1, 8),
    ("f16", 6, 2, 64),
    ("f16", 4, 1, 128),
    ("f16", 7, 1, 80),
    ("f32", 16, 2, 16),
    ("f32", 2, 2, 6),
    ("f16", 3, 1, 2),
]
LENGTHS = (1, 15, 16, 17, 255, 256, 257, 300, 531)  # of sequences; spans end at 256 and 512


@dataclass
class Tokens:
    """Queries with the row of the page table that each belongs to, and the KV rows it sees."""

    q: np.ndarray  # [M, heads, head_dim]
    rows: np.ndarray
    lengths: np.ndarray

    def __getitem__(self, which: Sequence[int] | np.ndarray | slice) -> Tokens:
        return Tokens(self.q[which], self.rows[which], self.lengths[which])


class Case:
    """Sequences of `LENGTHS` tokens in pages that are in no order."""

    def __init__(self, dtype: KVDType, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        rng = np.random.default_rng(head_dim)
        self.num_heads = num_heads
        self.layout = layout_of(dtype, NUM_LAYERS, num_kv_heads, head_dim)
        counts = [-(-length // PAGE_SIZE) for length in LENGTHS]
        self.pool = Pool(self.layout, sum(counts) + 3)
        pages = list(rng.permutation(self.pool.num_pages))
        self.pages = [[int(pages.pop()) for _ in range(count)] for count in counts]
        for length, owned in zip(LENGTHS, self.pages, strict=True):
            for i, page in enumerate(owned):
                count = min(PAGE_SIZE, length - i * PAGE_SIZE)
                for view in (self.pool.keys, self.pool.values):
                    view(page, LAYER)[:, :count] = rng.standard_normal((num_kv_heads, count, head_dim))
        self.tokens = self._tokens(rng)

    def _tokens(self, rng: np.random.Generator) -> Tokens:
        """The last token of each sequence, and some earlier ones of it."""
        rows = np.repeat(np.arange(len(LENGTHS)), 2)
        lengths = np.array([n for length in LENGTHS for n in (length, int(rng.integers(1, length + 1)))])
        q = 3 * rng.standard_normal((len(rows), self.num_heads, self.layout.head_dim))
        return Tokens(q.astype(np.float32), rows.astype(np.int32), lengths.astype(np.int32))

    def run(self, target: Target, tokens: Tokens, extra_pages: int = 0, pool: np.ndarray | None = None) -> np.ndarray:
        """Outputs `[M, heads, head_dim]`; the page table is `extra_pages` wider than it must be."""
        width = max(len(self.pages[row]) for row in tokens.rows) + extra_pages
        table = np.zeros((len(LENGTHS), width), np.int32)
        for row, owned in enumerate(self.pages):
            table[row, : min(width, len(owned))] = owned[:width]
        scratch = span_scratch_floats(self.num_heads, self.layout.head_dim, width * PAGE_SIZE)
        num_rows, num_outputs = len(tokens.q), self.num_heads * self.layout.head_dim
        stride = round_up(num_outputs, ROW_BLOCK)
        spans, y = np.full(scratch, np.nan, np.float32), np.full((num_rows, stride), np.nan, np.float32)
        kernel = built(target, attention, self.layout, self.num_heads, stride, target)
        kernel(
            tokens.q,
            self.pool.array if pool is None else pool,
            table,
            tokens.rows,
            tokens.lengths,
            spans,
            y,
            LAYER,
            self.pool.num_pages,
            width,
            -(-width * PAGE_SIZE // SPAN),
            num_rows,
        )
        assert np.isnan(y[:, num_outputs:]).all()
        return y[:, :num_outputs].reshape(tokens.q.shape)

    def expected(self, tokens: Tokens) -> np.ndarray:
        group = self.num_heads // self.layout.num_kv_heads
        outputs = []
        for q, row, length in zip(tokens.q.astype(np.float64), tokens.rows, tokens.lengths, strict=True):
            keys, values = (
                np.concatenate([view(page, LAYER) for page in self.pages[row]], axis=1)[:, :length].astype(np.float64)
                for view in (self.pool.keys, self.pool.values)
            )
            keys, values = np.repeat(keys, group, axis=0), np.repeat(values, group, axis=0)
            scores = np.einsum("hd,htd->ht", q, keys) / np.sqrt(self.layout.head_dim)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            outputs.append(np.einsum("ht,htd->hd", weights / weights.sum(axis=1, keepdims=True), values))
        return np.array(outputs)


@functools.cache
def case_of(dtype: KVDType, num_heads: int, num_kv_heads: int, head_dim: int) -> tuple[Case, np.ndarray]:
    """A case that several targets share, and what is expected of all its tokens."""
    case = Case(dtype, num_heads, num_kv_heads, head_dim)
    return case, case.expected(case.tokens)


@every_target
@pytest.mark.parametrize(("dtype", "num_heads", "num_kv_heads", "head_dim"), SHAPES)
def test_outputs_are_those_of_softmax_in_every_batch(
    target: Target, dtype: KVDType, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    case, expected = case_of(dtype, num_heads, num_kv_heads, head_dim)
    tokens = case.tokens
    together = case.run(target, tokens)  # more than SPLIT_TOKENS: one thread walks a token's spans
    assert len(together) > SPLIT_TOKENS
    np.testing.assert_allclose(together, expected, 0, 1e-5)
    for i in (0, 7, len(together) - 2, len(together) - 1):
        assert (case.run(target, tokens[i : i + 1]) == together[i]).all()
    some = np.random.default_rng(0).permutation(len(together))[:SPLIT_TOKENS]
    assert (case.run(target, tokens[some]) == together[some]).all()
    assert (case.run(target, tokens, extra_pages=40) == together).all()
    assert (case.run(target, tokens[some], extra_pages=40) == together[some]).all()


@every_target
@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_what_lies_beyond_a_length_does_not_count(target: Target, dtype: KVDType) -> None:
    case = Case(dtype, 6, 2, 64) if dtype == "f16" else Case(dtype, 1, 1, 8)  # built for the test above
    clean = case.run(target, case.tokens)
    for garbage in (np.inf, 0.0, 60000.0):
        pool = np.where(np.isnan(case.pool.array), case.pool.array.dtype.type(garbage), case.pool.array)
        assert (case.run(target, case.tokens, pool=pool) == clean).all()
        assert (case.run(target, case.tokens[:3], pool=pool) == clean[:3]).all()


@every_target
def test_huge_and_equal_scores_stay_finite(target: Target) -> None:
    case = Case("f32", 1, 1, 8)
    case.tokens.q[:] *= 1e4
    y = case.run(target, case.tokens)
    np.testing.assert_allclose(y, case.expected(case.tokens), 0, 1e-2)
    case.tokens.q[:] = 0
    np.testing.assert_allclose(case.run(target, case.tokens), case.expected(case.tokens), 0, 1e-5)
