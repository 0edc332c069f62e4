"""Select the KV rows of a prefix that are loaded when not all are: the policies, and what each of them may know.

Knows arrays of scores, not models or texts. A choice is `[layers, kv_heads, n]`, rows in ascending order. `hybrid`
uses `runtime/extras/approximate/row_selection.py`, with which prefixes are read from disk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from radixlm.runtime.extras.approximate.row_selection import (
    NUM_FIRST,
    always,
    largest,
    ranks_to_store,
    scores_to_store,
    stored_rows,
    stored_shares,
    with_probed,
)

Scores = npt.NDArray[np.floating]  # [layers, kv_heads, tokens]
Order = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Evidence:
    """The facts that can be known of a prefix when a query arrives, and for `oracle` the results of an exact run.

    `probe(choice)` is the attention of the query's rows to each other token, by the keys of one KV head of each layer,
    when the query has been run over the rows `choice`: `[layers, tokens]`.
    """

    prefix: Scores  # attention mass while the prefix was computed, for each of its tokens
    passed: Scores  # the part of that which is known of a served prefix, where later tokens count
    history: Scores  # of other queries, for each of theirs
    oracle: Scores  # of this query and its continuation, over the full prefix
    probe: Callable[[Order], Scores]
    seed: int

    @functools.cached_property
    def known(self) -> Scores:
        """The scores that rank a served prefix's rows, by `attention_scores.py`."""
        return np.asarray(self.history + self.passed)

    @functools.cached_property
    def order(self) -> Order:
        """The ranked rows, most important first: `[layers, kv_heads, tokens]`; a run has the first of them."""
        return stored_order(self.known)

    @functools.cached_property
    def order_of_queries(self) -> Order:
        """The rows ranked by other queries alone, without the prefix pass."""
        return stored_order(self.history)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Layers, KV heads, tokens."""
        layers, heads, tokens = self.prefix.shape
        return layers, heads, tokens


def random(evidence: Evidence, count: int) -> Order:
    """Select at random."""
    return largest(np.random.default_rng(evidence.seed).random(evidence.shape), count)


def first_and_recent(evidence: Evidence, count: int) -> Order:
    """Select the first few rows, and the last."""
    return first_and_recent_of(evidence.shape, count)


def first_and_recent_of(shape: tuple[int, ...], count: int) -> Order:
    """Select the first few rows, and the last, for a shape of layers, KV heads and tokens."""
    recent = np.arange(shape[-1], dtype=float)
    recent[:NUM_FIRST] = np.inf
    return largest(np.broadcast_to(recent, shape), count)


def prefix_pass(evidence: Evidence, count: int) -> Order:
    """Select the rows that got most attention while the prefix was computed."""
    return largest(evidence.prefix, count)


def heavy_hitters(evidence: Evidence, count: int) -> Order:
    """Select as H2O does, once the prefix is computed: half the most recent, half those with most attention."""
    scores = evidence.prefix.astype(np.float64)
    scores[..., evidence.shape[-1] - count // 2 :] = np.inf
    return largest(scores, count)


def known(evidence: Evidence, count: int) -> Order:
    """Select by the scores that rank a served prefix's rows, and nothing of the query."""
    return largest(evidence.known, count)


def history(evidence: Evidence, count: int) -> Order:
    """Select the rows that other queries attended to."""
    return largest(evidence.history, count)


def probe(evidence: Evidence, count: int) -> Order:
    """Select the first and recent rows, and those that this query attends to from there by one head's keys."""
    layers, heads, tokens = evidence.shape
    start = always(tokens)[:count]
    chosen = np.broadcast_to(start, (layers, heads, len(start)))
    return with_probed(chosen, evidence.probe(chosen), count)


def hybrid(evidence: Evidence, count: int) -> Order:
    """Select half by the stored order, including the first and recent ones; then half by the probe."""
    return _hybrid(evidence, evidence.order, count)


def hybrid_of_queries(evidence: Evidence, count: int) -> Order:
    """Select like `hybrid`, with the stored order by other queries alone, without the prefix pass."""
    return _hybrid(evidence, evidence.order_of_queries, count)


def oracle(evidence: Evidence, count: int) -> Order:
    """Select the rows that this query and its continuation do attend to."""
    return largest(evidence.oracle, count)


POLICIES: dict[str, Callable[[Evidence, int], Order]] = {
    "random": random,
    "first+recent": first_and_recent,
    "prefix pass": prefix_pass,
    "heavy hitters": heavy_hitters,
    "history": history,
    "known": known,
    "probe": probe,
    "hybrid": hybrid,
    "hybrid, no pass": hybrid_of_queries,
    "oracle": oracle,
}


def stored_half(order: Order, count: int, num_tokens: int | None = None) -> Order:
    """Return those of `count` rows of each layer and head that are read by the stored order.

    The order is of a prefix that begins a prompt. `num_tokens` is the prefix's, if `order` has only the ranks that a
    run stores.
    """
    num_tokens = num_tokens or order.shape[-1]
    fixed, num_ranks = always(num_tokens), ranks_to_store(num_tokens, is_start=True)
    [share] = stored_shares([num_tokens], [len(fixed)], count, [num_ranks])
    return stored_rows(order[..., :num_ranks], fixed, share, num_tokens)


def stored_order(scores: Scores) -> Order:
    """Return the order of a run with these scores, which begins a prompt, most important first."""
    return np.argsort(-scores_to_store(scores, is_start=True), axis=-1, kind="stable")


def _hybrid(evidence: Evidence, order: Order, count: int) -> Order:
    """Select half by a stored order, then half by the probe."""
    chosen = stored_half(order, count)
    return with_probed(chosen, evidence.probe(chosen), count)
