"""Record what real queries read of ordered runs and their pages when a quarter of a prefix is loaded; make traces.

Prefixes are passages of NQ-open, schemas of functions and few-shot examples of BBH, of the folder of real inputs
(`RADIXLM_DATA`). Each has its own questions and those of others. Some of them are its history, which its tokens are
ranked by. The reads of the others are kept: half of the rows by stored order, half in pages that probing the keys of
one KV head finds. Knows reads, no caches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from radixlm.runtime.artifact.manifest import PAGE_SIZE
from radixlm.runtime.extras.approximate.records.ordered_layout import OrderedLayout
from radixlm.runtime.extras.approximate.row_selection import num_rows, ranks_to_store, scores_to_store, with_probed

from .policies import Order, stored_half
from .prefix import MAX_PREFIX, Prefix, PrefixModel
from .texts import Case, Query, Texts

BUDGET = 0.25
NUM_PREFIXES = {"nq": 12, "tools": 6, "bbh": 6}
NUM_FOREIGN = 7  # questions of other prefixes that each prefix gets
NUM_HISTORY = 2  # of its own, and as many of others
Trace = list[tuple[int, int]]  # prefix and the number of its request


@dataclass(frozen=True)
class Asked:
    """A prefix as it is stored, and the pieces (chunks of the ordered run, parts of pages) that its requests read."""

    layout: OrderedLayout
    attention: NDArray[np.float64]  # [pieces], the share of its layer's (and head's) attention, by the history
    requests: list[tuple[NDArray[np.int64], NDArray[np.int64]]]  # [n] pieces, and then [m] others


def asked_prefixes(texts: Texts, model: PrefixModel) -> Iterator[Asked]:
    """Yield prefixes of all workloads, each with the pieces that its own queries and those of other prefixes read."""
    for workload, count in NUM_PREFIXES.items():
        cases = [case for case in texts.cases(workload) if len(case.prefix) <= MAX_PREFIX][:count]
        for number, case in enumerate(cases):
            others = [other.queries for other in (*cases[number + 1 :], *cases[:number])]
            foreign = [query for some in zip(*others, strict=False) for query in some][:NUM_FOREIGN]
            yield asked(case, foreign, model)


def asked(case: Case, foreign: Sequence[Query], model: PrefixModel) -> Asked:
    """Return a case stored by the attention of some queries, and the pieces that its other queries read.

    The queries are its own and `foreign` ones, of other prefixes.
    """
    num_tokens = len(case.prefix) // PAGE_SIZE * PAGE_SIZE  # whole pages are stored
    prefix, num_ranks = Prefix(model, case.prefix[:num_tokens]), ranks_to_store(num_tokens, is_start=True)
    layout = OrderedLayout(model.layout, num_tokens, num_ranks)
    known = (*case.queries[:NUM_HISTORY], *foreign[:NUM_HISTORY])
    history = np.asarray(sum(prefix.exact(query.ids, 0).learned for query in known), np.float64)
    order = np.argsort(-scores_to_store(history, is_start=True), axis=-1, kind="stable")
    queries = (*case.queries[NUM_HISTORY:], *foreign[NUM_HISTORY:])
    return Asked(
        layout,
        _attention_of_pieces(layout, history, order),
        [_pieces_read(prefix, one, order, layout) for one in queries],
    )


def _attention_of_pieces(layout: OrderedLayout, history: NDArray[np.float64], order: Order) -> NDArray[np.float64]:
    """Return the share of attention of each piece by the history: chunks of the run, then parts of pages."""
    share = history / history.sum(axis=-1, keepdims=True)
    by_rank = np.take_along_axis(share, order, axis=-1)[..., : layout.num_ranks]
    by_block = np.add.reduceat(by_rank, range(0, layout.num_ranks, layout.chunk_size), axis=-1)
    by_page = share.mean(axis=1).reshape(len(share), layout.num_pages, -1).sum(axis=-1)
    return np.concatenate([by_block.reshape(layout.num_groups, -1).T.reshape(-1), by_page.T.reshape(-1)])


def _pieces_read(
    prefix: Prefix, query: Query, order: Order, layout: OrderedLayout
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the pieces that a query reads: first the run's chunks, then parts of pages, which a probe selects."""
    count = num_rows(layout.num_tokens, BUDGET)
    half = stored_half(order, count)
    chosen = with_probed(half, prefix.probe(half, query.ids), count)
    return np.arange(-(-half.shape[-1] // layout.chunk_size) * layout.num_groups), parts_of(layout, chosen, half)


def parts_of(layout: OrderedLayout, chosen: Order, there: Order) -> NDArray[np.int64]:
    """Return which parts of pages must be read for the `chosen` rows, besides the rows `there`, which are read already.

    Rows are `[layers, kv_heads, n]`. A part is a layer's part of a page, and given by its index among the layout's
    pieces.
    """
    is_wanted = np.zeros((*chosen.shape[:2], layout.num_tokens), np.bool_)
    np.put_along_axis(is_wanted, chosen, True, axis=-1)
    np.put_along_axis(is_wanted, there, False, axis=-1)
    pages = is_wanted.reshape(*chosen.shape[:2], layout.num_pages, -1).any(axis=(1, 3))
    return np.asarray(layout.num_chunks + np.flatnonzero(pages.T))


def zipf_trace(prefixes: Sequence[Asked], num_requests: int, *, change_after: int | None, seed: int = 0) -> Trace:
    """Return requests for prefixes, of which the `n`th most popular is requested `1 / n` times as often as the first.

    Args:
        change_after: the number of requests after which the prefixes swap popularity; None for never.
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
