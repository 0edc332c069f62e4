"""Which KV rows of a prefix to read when not all are read: half by the order in which they are stored, half by a probe.

Knows arrays of scores and token numbers, not files, pages or models. The stored order is that of what other queries
looked at, and fails completely on a question that nobody asked before; so this query's own look at the keys of one KV
head (the probe) chooses the other half. What each part of this finds and loses is in bench/LOG.md. A choice is
`[layers, kv_heads, n]`, tokens in ascending order: the same number in each layer and head, different tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..artifact.manifest import PAGE_SIZE
from ..model.batch import Float32Array
from ..store.ordered_run import ranked_before_text

Scores = npt.NDArray[np.floating[Any]]
Tokens = npt.NDArray[np.int64]
NUM_FIRST: Final = 4  # of a prompt: attention rests there
NUM_RECENT: Final = 16  # of a prefix: the query goes on from there
WINDOW: Final = 15  # an answer lies beside the words that a query finds: on needles 15 and 7 found what 1 never did
PASSAGE: Final = 65  # and in a passage that the query looks at altogether: KL 0.44 instead of 0.58 on BBH's examples
_MAX_PRODUCTS: Final = 1 << 17  # OpenBLAS is alone below twice as many multiplications
MAX_LOOK_TOKENS: Final = 128  # rows of a query that look: of a longer one the last


def num_rows(num_tokens: int, budget: float) -> int:
    """How many rows of `num_tokens` a share of them is: whole pages, at least two, at most all.

    >>> num_rows(1000, 0.25), num_rows(100, 0.1), num_rows(16, 0.5)
    (256, 32, 16)
    """
    num_pages = int(np.ceil(budget * num_tokens / PAGE_SIZE - 1e-9))
    return min(num_tokens, max(num_pages, 2) * PAGE_SIZE)


def always(num_tokens: int, num_before: int = 0) -> Tokens:
    """The tokens of a prefix that are read whatever else is: the first of the prompt, and those before the query.

    Args:
        num_before: tokens of the prompt before these `num_tokens`, which are all there.
    """
    first = range(min(max(NUM_FIRST - num_before, 0), num_tokens))
    recent = range(max(num_tokens - NUM_RECENT, len(first)), num_tokens)
    return np.array([*first, *recent], np.int64)


def stored_shares(run_lengths: Sequence[int], num_always: Sequence[int], count: int) -> list[int]:
    """How many rows of each run are chosen by stored order, if `count` of all of them are chosen.

    About half, in proportion to the runs' lengths, and no fewer than those that are always read; multiples of 16 where
    a run has so many, since blocks are read whole.
    """
    least = [min(length, _padded(some)) for length, some in zip(run_lengths, num_always, strict=True)]
    if count >= sum(run_lengths):
        return list(run_lengths)
    target = min(count, max(_padded(-(-count // 2)), sum(least)))
    shares = list(least)
    while (left := target - sum(shares)) > 0:
        missing = [
            target * length / sum(run_lengths) - share for length, share in zip(run_lengths, shares, strict=True)
        ]
        open_runs = [run for run, share in enumerate(shares) if share < run_lengths[run]]
        best = max(open_runs, key=lambda run: missing[run])
        shares[best] += min(PAGE_SIZE, run_lengths[best] - shares[best], left)
    return shares


def stored_rows(order: npt.NDArray[np.integer[Any]], always: Tokens, count: int) -> Tokens:
    """Of each layer and head `always` and then the first in `order`, `[layers, kv_heads, tokens]`: `count` tokens."""
    scores = np.empty(order.shape, np.float32)
    ranks = np.broadcast_to(-np.arange(order.shape[-1], dtype=np.float32), order.shape)
    np.put_along_axis(scores, order.astype(np.int64), ranks, axis=-1)
    scores[..., always] = np.inf
    return largest(scores, count)


def scores_to_store(scores: Scores, *, is_start: bool, budget: float = 0.25) -> npt.NDArray[np.float64]:
    """Scores of a run, `[layers, kv_heads, tokens]`, to store it by, so that reading a share of it asks for few bytes.

    What is always read is first, and then as many as are chosen by stored order; behind them the others are as in the
    text, for what a query picks there is mostly a passage.

    Args:
        is_start: the run begins a prompt, whose first tokens are always read.
        budget: the share that is mostly asked for.
    """
    num_tokens = scores.shape[-1]
    fixed = always(num_tokens, 0 if is_start else NUM_FIRST)
    scores = scores.astype(np.float64)
    scores[..., fixed] = np.inf
    [num_ranked] = stored_shares([num_tokens], [len(fixed)], num_rows(num_tokens, budget))
    return ranked_before_text(scores, num_ranked)


@dataclass(frozen=True)
class Look:
    """What a query sees of a prefix by the keys of one KV head: softmax weights over the tokens of the prefix."""

    largest: Float32Array  # [layers, tokens], over the query's rows and the head's group; of tokens not there yet
    mean: Float32Array  # [layers, tokens]; sums to 1


def look(queries: Float32Array, keys: npt.NDArray[np.floating[Any]], there: Tokens | None = None) -> Look:
    """Look for `queries`, `[layers, rows, group, head_dim]`, among `keys`, `[layers, tokens, head_dim]`.

    Args:
        there: tokens that are there already, `[layers, n]` of the keys' head: `largest` is of a softmax over the
            others, in which rows that mostly look at the first token have as much of a say as those that look around.
    """
    num_layers, num_tokens, head_dim = keys.shape
    queries = queries[:, -MAX_LOOK_TOKENS:].reshape(num_layers, -1, head_dim)
    seen = Look(np.empty((num_layers, num_tokens), np.float32), np.empty((num_layers, num_tokens), np.float32))
    is_left = np.ones((num_layers, num_tokens), np.float32)
    if there is not None:
        np.put_along_axis(is_left, there, 0, axis=-1)
    scale = np.float32(head_dim**-0.5)
    for layer in range(num_layers):  # the weights of a layer stay in the processor's cache
        weights = _products(keys[layer].astype(np.float32), queries[layer] * scale)  # [tokens, rows]
        weights -= weights.max(axis=0)
        np.exp(weights, out=weights)
        weights *= 1 / weights.sum(axis=0)
        weights.mean(axis=1, out=seen.mean[layer])
        if there is not None:
            weights *= is_left[layer, :, None]
            weights *= 1 / np.maximum(weights.sum(axis=0), np.finfo(np.float32).tiny)
        weights.max(axis=1, out=seen.largest[layer])
    return seen


def _products(left: Float32Array, right: Float32Array) -> Float32Array:
    """`left @ right.T`, in parts so small that BLAS starts no threads of its own: these spin on when it is done, and
    the model's next step took ten times as long beside them."""
    (num_rows, size), num_columns = left.shape, len(right)
    part = max(1, _MAX_PRODUCTS // (size * num_columns))
    num_parts = -(-num_rows // part)
    padded = np.zeros((num_parts, part, size), np.float32)
    padded.reshape(-1, size)[:num_rows] = left
    return np.asarray(np.matmul(padded, right.T).reshape(-1, num_columns)[:num_rows])


def with_probed(chosen: Tokens, seen: Scores, count: int, order: npt.NDArray[np.integer[Any]]) -> Tokens:
    """`chosen` and, up to `count`, what is worth most by what was `seen`, `[layers, tokens]`, in whole chunks.

    A chunk is `PAGE_SIZE` tokens that lie together in `order`, `[layers, kv_heads, tokens]`: behind those that are
    ranked it is a passage, which a query loses less by than by single tokens, and it is read whole in any case.
    """
    tokens = order.astype(np.int64)
    starts = np.arange(0, tokens.shape[-1], PAGE_SIZE)
    sizes = np.diff(starts, append=tokens.shape[-1])
    by_rank = np.take_along_axis(np.broadcast_to(worth(seen)[:, None], tokens.shape), tokens, axis=-1)
    of_chunk = np.add.reduceat(by_rank, starts, axis=-1) / sizes
    # of two that are worth the same all of the first come before the second
    place = np.argsort(np.argsort(-of_chunk, axis=-1, kind="stable"), axis=-1)
    scores = np.empty(order.shape)
    np.put_along_axis(scores, tokens, -np.repeat(place, sizes, axis=-1).astype(float), axis=-1)
    np.put_along_axis(scores, chosen, np.inf, axis=-1)
    return largest(scores, count)


def dropped_mass(mean: Scores, chosen: Tokens) -> float:
    """An estimate of the share of a query's attention on a prefix that falls on none of `chosen`, `[layers, n]` of the
    probe's head: by its keys, `Look.mean`, the mean over layers."""
    kept = np.take_along_axis(mean, chosen, axis=-1).sum(axis=-1, dtype=np.float64)
    return float(np.clip(1 - kept, 0, 1).mean())


def largest(scores: Scores, count: int) -> Tokens:
    """The `count` tokens with the largest scores, of each layer and head."""
    tokens = scores.shape[-1]
    if count >= tokens:
        return np.broadcast_to(np.arange(tokens), scores.shape).copy()
    if count == 0:
        return np.empty((*scores.shape[:-1], 0), np.int64)
    chosen = np.argpartition(scores, tokens - count, axis=-1)[..., tokens - count :]
    return np.asarray(np.sort(chosen, axis=-1))


def widened(scores: Scores) -> Scores:
    """Along the tokens, the largest of the `WINDOW` scores around each."""
    padded = np.pad(scores, [(0, 0)] * (scores.ndim - 1) + [(WINDOW // 2, WINDOW // 2)])
    return np.asarray(np.lib.stride_tricks.sliding_window_view(padded, WINDOW, axis=-1).max(axis=-1))


def worth(seen: Scores) -> Scores:
    """How much each token of a prefix promises by what was `seen` of it, `[layers, tokens]`: the largest weight beside
    it, times the mean of the `PASSAGE` around it."""
    sums = np.cumsum(np.pad(seen, [(0, 0), (PASSAGE // 2 + 1, PASSAGE // 2)]), axis=-1, dtype=np.float64)
    return np.asarray(widened(seen) * (sums[:, PASSAGE:] - sums[:, :-PASSAGE]) / PASSAGE)


def _padded(count: int) -> int:
    return -(-count // PAGE_SIZE) * PAGE_SIZE
