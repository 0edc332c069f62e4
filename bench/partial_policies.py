"""Which KV rows of a prefix are loaded when not all are: the policies, and what each of them may know.

Knows arrays of scores, not models or texts. A choice is `[layers, kv_heads, n]`, rows in ascending order. `hybrid` is
made of `runtime/row_selection.py`, with which prefixes are read from disk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from radixlm.runtime.row_selection import (
    NUM_FIRST,
    always,
    largest,
    scores_to_store,
    stored_rows,
    stored_shares,
    with_probed,
)

Scores = npt.NDArray[np.floating]  # [layers, kv_heads, tokens]
Order = npt.NDArray[np.int64]
NUM_LOOKS = 2


@dataclass(frozen=True)
class Evidence:
    """What can be known of a prefix when a query comes, and for `oracle` what only an exact run tells.

    `probe(choice)` is how much the query's rows would look at each other token, by the keys of one KV head of each
    layer, when the query has been run over the rows `choice`: `[layers, tokens]`.
    """

    prefix: Scores  # attention mass while the prefix was computed, for each of its tokens
    history: Scores  # of other queries, for each of theirs
    oracle: Scores  # of this query and its continuation, over the full prefix
    probe: Callable[[Order], Scores]
    seed: int

    @property
    def stored(self) -> Scores:
        """What rows are stored by: the pass knows less of what is asked again than other queries do, and more of what
        nobody asked."""
        return self.history + self.prefix

    @functools.cached_property
    def order(self) -> Order:
        """As rows are stored, what matters most first: `[layers, kv_heads, tokens]`."""
        return np.argsort(-scores_to_store(self.stored, is_start=True), axis=-1, kind="stable")

    @property
    def shape(self) -> tuple[int, int, int]:
        """Layers, KV heads, tokens."""
        layers, heads, tokens = self.prefix.shape
        return layers, heads, tokens


def random(evidence: Evidence, count: int) -> Order:
    """Any."""
    return largest(np.random.default_rng(evidence.seed).random(evidence.shape), count)


def first_and_recent(evidence: Evidence, count: int) -> Order:
    """The first few, and the last."""
    layers, heads, tokens = evidence.shape
    recent = np.arange(tokens, dtype=float)
    recent[:NUM_FIRST] = np.inf
    return largest(np.broadcast_to(recent, (layers, heads, tokens)), count)


def prefix_pass(evidence: Evidence, count: int) -> Order:
    """Those that got most attention while the prefix was computed."""
    return largest(evidence.prefix, count)


def history(evidence: Evidence, count: int) -> Order:
    """Those that other queries looked at."""
    return largest(evidence.history, count)


def stored(evidence: Evidence, count: int) -> Order:
    """Those by both: the stored order alone."""
    return largest(evidence.stored, count)


def probe(evidence: Evidence, count: int) -> Order:
    """The first and recent ones, and those that this query looks at from there by one head's keys."""
    layers, heads, tokens = evidence.shape
    start = always(tokens)[:count]
    return _with_probe(evidence, np.broadcast_to(start, (layers, heads, len(start))), count)


def hybrid(evidence: Evidence, count: int) -> Order:
    """Half by the stored order, the first and recent ones among them; then half by the probe."""
    return _with_probe(evidence, _stored_half(evidence, count), count)


def hybrid_in_looks(evidence: Evidence, count: int) -> Order:
    """The same, but that the probe's half comes in `NUM_LOOKS` parts, each after a look over all that is there."""
    chosen = _stored_half(evidence, count)
    stored = chosen.shape[-1]
    for look in range(1, NUM_LOOKS + 1):
        chosen = _with_probe(evidence, chosen, stored + (count - stored) * look // NUM_LOOKS)
    return chosen


def oracle(evidence: Evidence, count: int) -> Order:
    """Those that this query and its continuation do look at."""
    return largest(evidence.oracle, count)


POLICIES: dict[str, Callable[[Evidence, int], Order]] = {
    "random": random,
    "first+recent": first_and_recent,
    "prefix pass": prefix_pass,
    "history": history,
    "stored": stored,
    "probe": probe,
    "hybrid": hybrid,
    f"hybrid, {NUM_LOOKS} looks": hybrid_in_looks,
    "oracle": oracle,
}


def _stored_half(evidence: Evidence, count: int) -> Order:
    tokens = evidence.shape[-1]
    [share] = stored_shares([tokens], [len(always(tokens))], count)
    return stored_rows(evidence.order, always(tokens), share)


def _with_probe(evidence: Evidence, chosen: Order, count: int) -> Order:
    """`chosen` and what the probe sees from there."""
    return with_probed(chosen, evidence.probe(chosen), count, evidence.order)
