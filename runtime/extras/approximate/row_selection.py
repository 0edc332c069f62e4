"""Choose which KV rows of a prefix to read: half by their stored order, half by a probe.

The stored order ranks tokens by the attention of earlier queries, and fails completely on a new question. So
this query's own attention to the keys of one KV head, the probe, chooses the other half, in whole pages of a layer.
bench/LOG.md has what each rule finds and loses. A choice is `[layers, kv_heads, n]`, tokens in ascending order: the
same number in each layer and head, of different tokens. Knows arrays of scores and token numbers, not files or models.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from ...artifact.cpu import default_num_threads
from ...artifact.manifest import PAGE_SIZE
from ...model.batch import Float32Array

Scores = npt.NDArray[np.floating[Any]]
Tokens = npt.NDArray[np.int64]
NUM_FIRST: Final = 4  # tokens of a prompt: attention sinks
NUM_RECENT: Final = 16  # tokens of a prefix: the query continues them
WINDOW: Final = 15  # an answer is near the words that a query finds: on needles 15 and 7 found what 1 never did
PASSAGE: Final = 65  # and in a passage that gets attention as a whole: KL 0.44 instead of 0.58 on BBH's examples
MAX_PROBE_TOKENS: Final = 128  # only the last tokens of a longer query probe
STORED_BUDGET: Final = 0.5  # the largest share of rows for which a run has the half that is read by stored order
_MANY_WEIGHTS: Final = 1 << 20  # one thread computes 100 of these in a microsecond
_MAX_PRODUCTS: Final = 1 << 17  # OpenBLAS uses one thread below twice as many multiplications


def num_rows(num_tokens: int, budget: float) -> int:
    """Return the number of rows that `budget`, a share of `num_tokens`, allows: whole pages, at least two, at most all.

    >>> num_rows(1000, 0.25), num_rows(100, 0.1), num_rows(16, 0.5)
    (256, 32, 16)
    """
    num_pages = int(np.ceil(budget * num_tokens / PAGE_SIZE - 1e-9))
    return min(num_tokens, max(num_pages, 2) * PAGE_SIZE)


def always(num_tokens: int, num_before: int = 0) -> Tokens:
    """Return the tokens that are always read: the first of the prompt, and the last before the query.

    Args:
        num_before: tokens of the prompt before these `num_tokens`, which have all their rows.
    """
    first = range(min(max(NUM_FIRST - num_before, 0), num_tokens))
    recent = range(max(num_tokens - NUM_RECENT, len(first)), num_tokens)
    return np.array([*first, *recent], np.int64)


def stored_shares(
    run_lengths: Sequence[int], num_always: Sequence[int], count: int, most: Sequence[int] | None = None
) -> list[int]:
    """Return how many rows of each run are read by stored order, if `count` rows are read in total.

    About half of `count`, in proportion to the runs' lengths, and at least those that are always read; in multiples of
    16 if a run is long enough, because blocks are read whole.

    Args:
        most: the rows in each run's order; None: all.
    """
    most = run_lengths if most is None else [max(pair) for pair in zip(most, num_always, strict=True)]
    least = [min(length, _padded(some)) for length, some in zip(most, num_always, strict=True)]
    if count >= sum(run_lengths):
        return list(most)
    target = min(count, max(_padded(-(-count // 2)), sum(least)), sum(most))
    shares = list(least)
    while (left := target - sum(shares)) > 0:
        missing = [
            target * length / sum(run_lengths) - share for length, share in zip(run_lengths, shares, strict=True)
        ]
        open_runs = [run for run, share in enumerate(shares) if share < most[run]]
        best = max(open_runs, key=lambda run: missing[run])
        shares[best] += min(PAGE_SIZE, most[best] - shares[best], left)
    return shares


def stored_rows(order: npt.NDArray[np.integer[Any]], always: Tokens, count: int, num_tokens: int) -> Tokens:
    """Return `count` tokens of each layer and head: `always`, then the first in `order`, `[layers, heads, ranks]`."""
    scores = np.full((*order.shape[:2], num_tokens), -np.inf, np.float32)
    ranks = np.broadcast_to(-np.arange(order.shape[-1], dtype=np.float32), order.shape)
    np.put_along_axis(scores, order.astype(np.int64), ranks, axis=-1)
    scores[..., always] = np.inf
    return largest(scores, count)


def scores_to_store(scores: Scores, *, is_start: bool) -> npt.NDArray[np.float64]:
    """Change the attention scores of a run, `[layers, kv_heads, tokens]`, to scores for its stored order.

    Tokens that are always read come first.

    Args:
        is_start: the run begins a prompt, whose first tokens are always read.
    """
    changed = scores.astype(np.float64)
    changed[..., _always_of_run(scores.shape[-1], is_start)] = np.inf
    return changed


def ranks_to_store(num_tokens: int, *, is_start: bool) -> int:
    """Return the number of rows of each layer and head that a run of this many tokens has on disk: those that are read
    by stored order at `STORED_BUDGET`."""
    fixed = _always_of_run(num_tokens, is_start)
    [num_ranks] = stored_shares([num_tokens], [len(fixed)], num_rows(num_tokens, STORED_BUDGET))
    return num_ranks


def _always_of_run(num_tokens: int, is_start: bool) -> Tokens:
    """Return the tokens of a run that are always read; `is_start`: it begins a prompt."""
    return always(num_tokens, 0 if is_start else NUM_FIRST)


@dataclass(frozen=True)
class Probe:
    """A query's attention to a prefix by the keys of one KV head: softmax weights over the tokens of the prefix."""

    largest: Float32Array  # [layers, tokens], over the query's rows and the head's group, of tokens not read yet
    mean: Float32Array  # [layers, tokens]; sums to 1


class LayerKeys(Protocol):
    """Keys of one KV head, `[layers, tokens, head_dim]`, of which some numbers are kept; computed when requested."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the keys: `[layers, tokens, head_dim]`."""
        ...

    @property
    def dims(self) -> npt.NDArray[np.int64]:
        """The kept dimensions of each layer's keys, `[layers, n]`; the others count as zeros."""
        ...

    def kept(self, layer: int) -> Float32Array:
        """Return the kept dimensions, `[tokens, n]`."""
        ...


def probe(queries: Float32Array, keys: LayerKeys, there: Tokens | None = None) -> Probe:
    """Return the attention of `queries`, `[layers, rows, group, head_dim]`, to `keys`.

    Two threads do it if there is much to do and there are several CPUs.

    Args:
        there: tokens that were read already, `[layers, n]` of the keys' head. `largest` is of a softmax over the other
            tokens, so that rows which attend mostly to the first token count as much as the rest.
    """
    num_layers, num_tokens, head_dim = keys.shape
    queries = queries[:, -MAX_PROBE_TOKENS:].reshape(num_layers, -1, head_dim)
    seen = Probe(np.empty((num_layers, num_tokens), np.float32), np.empty((num_layers, num_tokens), np.float32))
    is_left = np.ones((num_layers, num_tokens), np.float32)
    if there is not None:
        np.put_along_axis(is_left, there, 0, axis=-1)
    scale = np.float32(head_dim**-0.5)

    def look(layer: int) -> None:  # the weights of a layer stay in the CPU's cache
        weights = _products(keys.kept(layer), queries[layer][:, keys.dims[layer]] * scale)  # [tokens, rows]
        weights -= weights.max(axis=0)
        np.exp(weights, out=weights)
        weights *= 1 / weights.sum(axis=0)
        weights.mean(axis=1, out=seen.mean[layer])
        if there is not None:
            weights *= is_left[layer, :, None]
            weights *= 1 / np.maximum(weights.sum(axis=0), np.finfo(np.float32).tiny)
        weights.max(axis=1, out=seen.largest[layer])

    num_weights = num_layers * num_tokens * queries.shape[1]
    if num_weights < _MANY_WEIGHTS or default_num_threads() == 1:
        deque(map(look, range(num_layers)), maxlen=0)
    else:
        with ThreadPoolExecutor(2) as pool:
            deque(pool.map(look, range(num_layers)), maxlen=0)
    return seen


def _products(left: Float32Array, right: Float32Array) -> Float32Array:
    """Return `left @ right.T`, computed in pieces so small that BLAS starts no threads.

    Its threads would spin afterwards, and the model's next step took ten times as long.
    """
    (num_rows, size), num_columns = left.shape, len(right)
    piece = max(1, _MAX_PRODUCTS // (size * num_columns))
    padded = np.zeros((-(-num_rows // piece), piece, size), np.float32)
    padded.reshape(-1, size)[:num_rows] = left
    return np.asarray(np.matmul(padded, right.T).reshape(-1, num_columns)[:num_rows])


def with_probed(chosen: Tokens, seen: Scores, count: int) -> Tokens:
    """Return `chosen` and the `probed` tokens: `count` tokens in total."""
    return np.asarray(np.sort(np.concatenate([chosen, probed(chosen, seen, count)], axis=-1), axis=-1))


def probed(chosen: Tokens, seen: Scores, count: int) -> Tokens:
    """Return tokens that are not `chosen`, from the pages of highest worth by `seen`, `[layers, tokens]`.

    As many as are needed for `count` of each layer and head. A page is read whole and for all heads of a layer anyway.
    It is a passage, of which a query loses less than of single tokens. From the last page a head takes only the rows
    that it still needs, from its beginning.
    """
    num_tokens = seen.shape[-1]
    starts = np.arange(0, num_tokens, PAGE_SIZE)
    of_page = np.add.reduceat(worth(seen), starts, axis=-1) / np.diff(starts, append=num_tokens)
    best = np.argsort(-of_page, axis=-1, kind="stable")[:, None]  # of each layer, all heads
    is_missing = np.zeros((*chosen.shape[:2], len(starts) * PAGE_SIZE), np.bool_)
    is_missing[..., :num_tokens] = True
    np.put_along_axis(is_missing, chosen, False, axis=-1)
    by_worth = np.take_along_axis(is_missing.reshape(*chosen.shape[:2], -1, PAGE_SIZE), best[..., None], axis=2)
    before = np.cumsum(by_worth.reshape(*chosen.shape[:2], -1), axis=-1).reshape(by_worth.shape)
    is_picked = np.empty_like(by_worth)
    np.put_along_axis(is_picked, best[..., None], by_worth & (before <= count - chosen.shape[-1]), axis=2)
    picked = np.nonzero(is_picked.reshape(*chosen.shape[:2], -1))[-1]
    return np.asarray(picked.reshape(*chosen.shape[:2], -1))


def dropped_attention(mean: Scores, chosen: Tokens) -> float:
    """Return the estimated share of a query's attention on a prefix that falls on none of `chosen`, `[layers, n]` of
    the probe's head, by `Probe.mean`: the mean over layers."""
    kept = np.take_along_axis(mean, chosen, axis=-1).sum(axis=-1, dtype=np.float64)
    return float(np.clip(1 - kept, 0, 1).mean())


def largest(scores: Scores, count: int) -> Tokens:
    """Return the `count` tokens with the largest scores, for each layer and head."""
    tokens = scores.shape[-1]
    if count >= tokens:
        return np.broadcast_to(np.arange(tokens), scores.shape).copy()
    if count == 0:
        return np.empty((*scores.shape[:-1], 0), np.int64)
    chosen = np.argpartition(scores, tokens - count, axis=-1)[..., tokens - count :]
    return np.asarray(np.sort(chosen, axis=-1))


def widened(scores: Scores) -> Scores:
    """Return for each token the largest of the `WINDOW` scores around it."""
    padded = np.pad(scores, [(0, 0)] * (scores.ndim - 1) + [(WINDOW // 2, WINDOW // 2)])
    return np.asarray(np.lib.stride_tricks.sliding_window_view(padded, WINDOW, axis=-1).max(axis=-1))


def worth(seen: Scores) -> Scores:
    """Return the worth of each token of a prefix by the attention `seen`, `[layers, tokens]`: the largest weight near
    it, times the mean weight of the `PASSAGE` around it."""
    sums = np.cumsum(np.pad(seen, [(0, 0), (PASSAGE // 2 + 1, PASSAGE // 2)]), axis=-1, dtype=np.float64)
    return np.asarray(widened(seen) * (sums[:, PASSAGE:] - sums[:, :-PASSAGE]) / PASSAGE)


def _padded(count: int) -> int:
    """Round up to whole pages."""
    return -(-count // PAGE_SIZE) * PAGE_SIZE
