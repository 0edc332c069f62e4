"""Sequences in scattered pages and queries to them: what the attention kernels make of these, and what NumPy does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from radixlm.compile.codegen.targets import Target
from radixlm.compile.kernels.attention import attention, slots_floats
from radixlm.compile.kernels.attention_mass import attention_mass
from radixlm.compile.kernels.attention_shape import AttentionShape, ScoreSpec
from radixlm.compile.kernels.attention_units import AttentionLimits, find_starts, find_units, units_ints
from radixlm.compile.weights.layout import ROW_BLOCK, round_up
from radixlm.runtime.artifact.manifest import PAGE_SIZE, KVDType

from .harness import built
from .pool import KEYS, PARTS, VALUES, Part, Pool, layout_of

LAYER, NUM_LAYERS = 1, 2
LIMITS = AttentionLimits(num_tokens=320, context_length=700)


@dataclass(frozen=True)
class Features:
    """What a layer's attention does beside the softmax of scaled products."""

    scale: float | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    window: int | None = None
    chunk: int | None = None

    @property
    def has_starts(self) -> bool:
        return self.window is not None or self.chunk is not None

    @property
    def scores(self) -> ScoreSpec:
        return ScoreSpec(self.scale, self.soft_cap, self.has_sinks, self.has_starts)

    def start(self, length: int) -> int:
        """The first row that a token with `length` rows up to its own sees."""
        if self.chunk is not None:
            return int(length - 1) // self.chunk * self.chunk
        return max(0, int(length) - (self.window or int(length)))


@dataclass
class Tokens:
    """Queries with the row of the page table that each belongs to, and the KV rows it sees."""

    q: np.ndarray  # [M, heads, head_dim]
    rows: np.ndarray
    lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.q)

    def __getitem__(self, which: Sequence[int] | np.ndarray | slice) -> Tokens:
        return Tokens(self.q[which], self.rows[which], self.lengths[which])


class AttentionCase:
    """A sequence of random keys and values for each of `lengths`, in pages that are in no order; all else is NaN."""

    def __init__(
        self,
        dtype: KVDType,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        lengths: Sequence[int],
        features: Features | None = None,
        value_dim: int | None = None,
    ) -> None:
        """With a `value_dim`, values are so many numbers of the keys."""
        self.rng = np.random.default_rng(head_dim)
        self.num_heads, self.lengths, self.features = num_heads, lengths, features or Features()
        self.sinks = np.random.default_rng(1).uniform(-2, 4, num_heads).astype(np.float32)
        self.layout = layout_of(dtype, NUM_LAYERS, num_kv_heads, head_dim, value_dim)
        self.key_dim, self.value_dim = head_dim, value_dim or head_dim
        counts = [-(-length // PAGE_SIZE) for length in lengths]
        self.pool = Pool(self.layout, sum(counts) + 3)
        pages = list(self.rng.permutation(self.pool.num_pages))
        self.pages = [[int(pages.pop()) for _ in range(count)] for count in counts]
        for length, owned in zip(lengths, self.pages, strict=True):
            for i, page in enumerate(owned):
                count = min(PAGE_SIZE, length - i * PAGE_SIZE)
                for part in PARTS if value_dim is None else (KEYS,):
                    rows = self.rng.standard_normal((num_kv_heads, count, head_dim))
                    self.pool.write(part, page, LAYER, slice(count), rows)

    def tokens(self, rows: Sequence[int], lengths: Sequence[int]) -> Tokens:
        """Random queries of sequences `rows` that see `lengths` of them."""
        q = 3 * self.rng.standard_normal((len(rows), self.num_heads, self.key_dim))
        return Tokens(q.astype(np.float32), np.array(rows, np.int32), np.array(lengths, np.int32))

    def share_pages(self, count: int) -> None:
        """Give all sequences the first `count` pages of sequence 0."""
        for owned in self.pages[1:]:
            owned[:count] = self.pages[0][:count]

    def run(
        self,
        target: Target,
        tokens: Tokens,
        extra_pages: int = 0,
        pool: np.ndarray | None = None,
        mass: np.ndarray | None = None,
        counts: np.ndarray | None = None,
        *,
        stride: int = 1,
    ) -> np.ndarray:
        """Outputs `[M, heads, value_dim]`; the page table is `extra_pages` wider than it must be.

        To `mass` `[layers, kv_heads, num_pages, PAGE_SIZE]` is added what each KV row weighs, to `counts` `[num_pages,
        PAGE_SIZE]` for how many tokens; of one of `stride` tokens of a sequence.
        """
        width = max(len(self.pages[row]) for row in tokens.rows) + extra_pages
        table = np.zeros((len(self.pages), width), np.int32)
        for row, owned in enumerate(self.pages):
            table[row, : min(width, len(owned))] = owned[:width]
        num_outputs = self.num_heads * self.value_dim
        y_stride = round_up(num_outputs, ROW_BLOCK)
        scores = self.features.scores
        shape = AttentionShape.of(self.layout.of_layer(LAYER), self.num_heads, target, scores)
        seen = tokens.lengths, *self._starts(target, tokens)
        units = np.full(units_ints(LIMITS), -1, np.int32)
        finder = built(target, find_units, LIMITS, shape.tokens, has_starts=scores.has_starts)
        finder(tokens.rows, *seen, units, len(tokens))
        y = np.full((len(tokens), y_stride), np.nan, np.float32)
        normalizers = np.full((len(tokens), self.num_heads, 2), np.nan, np.float32)
        before = tokens.q, self.pool.array if pool is None else pool, table, tokens.rows, *seen
        sizes = self.pool.num_pages, width
        slots = np.full(slots_floats(shape, LIMITS), np.nan, np.float32)
        sinks = (self.sinks,) if scores.has_sinks else ()
        first_item = self.layout.items_before(LAYER)
        attend = built(target, attention, shape, y_stride, LIMITS)
        attend(*before, units, slots, *sinks, y, normalizers, first_item, *sizes)
        assert np.isnan(y[:, num_outputs:]).all()
        if mass is not None:
            score = built(target, attention_mass, shape)
            score_sizes = len(tokens), *sizes, stride
            none = np.zeros((self.pool.num_pages, PAGE_SIZE), np.int32)
            score(*before, normalizers, mass, none, LAYER, *score_sizes)
            assert not none.any(), "it is not the first layer"
            if counts is not None:
                score(*before, normalizers, np.zeros_like(mass), counts, 0, *score_sizes)
        return y[:, :num_outputs].reshape(len(tokens), self.num_heads, self.value_dim)

    def expected(self, tokens: Tokens) -> np.ndarray:
        """Softmax in float64."""
        outputs, stored = [], {row: self._rows(VALUES, row) for row in set(tokens.rows.tolist())}
        for row, length, weights in zip(tokens.rows, tokens.lengths, self._weights(tokens), strict=True):
            values = np.repeat(stored[row][:, self.features.start(length) : length], self._group, axis=0)
            outputs.append(np.einsum("ht,htd->hd", weights, values))
        return np.array(outputs)

    def expected_mass(self, tokens: Tokens, num_near: int = 0) -> np.ndarray:
        """The weights of all tokens and query heads on each KV row, float64 `[layers, kv_heads, num_pages,
        PAGE_SIZE]`; none on the last `num_near` that a token sees."""
        heads = self.layout.num_kv_heads
        mass = np.zeros((NUM_LAYERS, heads, self.pool.num_pages, PAGE_SIZE))
        for row, length, weights in zip(tokens.rows, tokens.lengths, self._weights(tokens), strict=True):
            start = self.features.start(length)
            weights = weights.reshape(heads, self._group, length - start).sum(axis=1)
            for t in range(start, length - num_near):
                mass[LAYER, :, self.pages[row][t // PAGE_SIZE], t % PAGE_SIZE] += weights[:, t - start]
        return mass

    def expected_counts(self, tokens: Tokens, num_near: int = 0) -> np.ndarray:
        """How many tokens these are of each KV row, `[num_pages, PAGE_SIZE]`."""
        counts = np.zeros((self.pool.num_pages, PAGE_SIZE), np.int32)
        for row, length in zip(tokens.rows, tokens.lengths, strict=True):
            for t in range(self.features.start(length), length - num_near):
                counts[self.pages[row][t // PAGE_SIZE], t % PAGE_SIZE] += 1
        return counts

    def _starts(self, target: Target, tokens: Tokens) -> tuple[np.ndarray, ...]:
        """The first row that each token sees, as a kernel finds it, if the features have any."""
        window, chunk = self.features.window, self.features.chunk
        if window is None and chunk is None:
            return ()
        starts = np.full(len(tokens), -1, np.int32)
        built(target, find_starts, window=window, chunk=chunk)(tokens.lengths, starts, len(tokens))
        assert starts.tolist() == [self.features.start(length) for length in tokens.lengths]
        return (starts,)

    @property
    def _group(self) -> int:
        return self.num_heads // self.layout.of_layer(LAYER).num_kv_heads

    def _weights(self, tokens: Tokens) -> Iterator[np.ndarray]:
        """Of each token, `[heads, rows that it sees]`."""
        stored = {row: self._rows(KEYS, row) for row in set(tokens.rows.tolist())}
        for q, row, length in zip(tokens.q, tokens.rows, tokens.lengths, strict=True):
            yield self._weights_of(q, stored[row][:, self.features.start(length) : length])

    def _weights_of(self, q: np.ndarray, seen: np.ndarray) -> np.ndarray:
        features, keys = self.features, np.repeat(seen, self._group, axis=0)
        scale = self.key_dim**-0.5 if features.scale is None else features.scale
        scores = np.einsum("hd,htd->ht", q.astype(np.float64), keys) * scale
        if features.soft_cap is not None:
            scores = features.soft_cap * np.tanh(scores / features.soft_cap)
        if features.has_sinks:
            scores = np.concatenate([scores, self.sinks[:, None]], axis=1)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        return np.asarray(weights[:, :-1] if features.has_sinks else weights)

    def _rows(self, part: Part, row: int) -> np.ndarray:
        """All keys or values of a sequence, `[kv_heads, tokens, head_dim]`."""
        return np.concatenate([self.pool.rows(part, page, LAYER) for page in self.pages[row]], axis=1)
