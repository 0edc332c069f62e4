"""Which chunks of ordered runs real queries read when a quarter of a prefix is loaded, and traces of many requests.

Prefixes are passages of NQ-open, schemas of functions and few-shot examples of BBH, of the folder of real inputs
(`RADIXLM_DATA`). Each is asked its own questions and those of others. Some of them are its history, which its tokens
are stored by: a quarter ranked, the others behind as in the text. What the others read is kept: half of the rows by
stored order, half where a look through the keys of one KV head points to. Knows reads, no caches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from radixlm.runtime.artifact.manifest import PAGE_SIZE
from radixlm.runtime.model.kv_rows import inverse_order
from radixlm.runtime.pruning.row_selection import (
    always,
    num_rows,
    scores_to_store,
    stored_rows,
    stored_shares,
    with_probed,
)
from radixlm.runtime.store.ordered.ordered_run import OrderedLayout

from .policies import Order
from .prefix import MAX_PREFIX, Prefix, PrefixModel
from .texts import Case, Query, Texts

BUDGET = 0.25
NUM_PREFIXES = {"nq": 12, "tools": 6, "bbh": 6}
NUM_FOREIGN = 7  # questions of other prefixes that each is asked
NUM_HISTORY = 2  # of its own, and as many of others
Trace = list[tuple[int, int]]  # prefix and which of its requests


@dataclass(frozen=True)
class Asked:
    """A prefix as it is stored, and what its requests read; chunks are known by their place in the file."""

    layout: OrderedLayout
    attention: NDArray[np.float64]  # [chunks], the share of its layer's and head's attention, by the history
    requests: list[tuple[NDArray[np.int64], NDArray[np.int64]]]  # [n] chunks, and then [m] others


def asked_prefixes(texts: Texts, model: PrefixModel) -> Iterator[Asked]:
    """Those of all workloads."""
    for workload, count in NUM_PREFIXES.items():
        cases = [case for case in texts.cases(workload) if len(case.prefix) <= MAX_PREFIX][:count]
        for number, case in enumerate(cases):
            others = [other.queries for other in (*cases[number + 1 :], *cases[:number])]
            foreign = [query for some in zip(*others, strict=False) for query in some][:NUM_FOREIGN]
            yield asked(case, foreign, model)


def asked(case: Case, foreign: Sequence[Query], model: PrefixModel) -> Asked:
    """A case stored by the history of some of its queries and of `foreign` ones, and what the others read."""
    num_tokens = len(case.prefix) // PAGE_SIZE * PAGE_SIZE  # whole pages are stored
    prefix, layout = Prefix(model, case.prefix[:num_tokens]), OrderedLayout(model.layout, num_tokens)
    known = (*case.queries[:NUM_HISTORY], *foreign[:NUM_HISTORY])
    history = np.asarray(sum(prefix.exact(query.ids, 0).learned for query in known), np.float64)
    order = np.argsort(-scores_to_store(history, is_start=True), axis=-1, kind="stable")
    by_rank = np.take_along_axis(history, order, axis=-1).reshape(layout.num_groups, layout.num_blocks, -1).sum(axis=-1)
    attention = (by_rank / by_rank.sum(axis=-1, keepdims=True)).T.reshape(-1)
    queries = (*case.queries[NUM_HISTORY:], *foreign[NUM_HISTORY:])
    return Asked(layout, attention, [_reads(prefix, query, order, layout) for query in queries])


def _reads(
    prefix: Prefix, query: Query, order: Order, layout: OrderedLayout
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    count = num_rows(layout.num_tokens, BUDGET)
    kept = always(layout.num_tokens)
    (num_stored,) = stored_shares([layout.num_tokens], [len(kept)], count)
    half = stored_rows(order, kept, num_stored)
    tokens = with_probed(half, prefix.probe(half, query.ids), count, order)
    ranks = np.take_along_axis(inverse_order(order), tokens, axis=-1).reshape(layout.num_groups, -1)
    chunks = np.unique(ranks // layout.chunk_size * layout.num_groups + np.arange(layout.num_groups)[:, None])
    num_first = num_stored // layout.chunk_size * layout.num_groups
    return np.arange(num_first), chunks[chunks >= num_first]


def zipf_trace(prefixes: Sequence[Asked], num_requests: int, *, change_after: int | None, seed: int = 0) -> Trace:
    """Requests for prefixes of which the `n`th most popular is wanted `1 / n` times as often as the first.

    Args:
        change_after: so many requests the prefixes change places; None: never.
    """
    chance = np.random.default_rng(seed)
    shares = 1 / np.arange(1, len(prefixes) + 1)
    shares /= shares.sum()
    trace: Trace = []
    while len(trace) < num_requests:
        by_popularity = chance.permutation(len(prefixes))
        count = min(change_after or num_requests, num_requests - len(trace))
        for prefix in by_popularity[chance.choice(len(prefixes), count, p=shares)].tolist():
            trace.append((prefix, int(chance.integers(len(prefixes[prefix].requests)))))
    return trace
