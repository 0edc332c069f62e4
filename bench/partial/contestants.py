"""Measure the loss of each selection of rows on real queries, and which chunks of a stored prefix it reads for them.

Prefixes and their queries are those of `bench/partial/texts.py`. Two queries of each prefix, and two of others, are its
history; for the others every selection uses a quarter of the rows. KL is measured on a prefix's own queries. Knows no
caches.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from radixlm.runtime.artifact.manifest import PAGE_SIZE
from radixlm.runtime.extras.approximate.records.ordered_layout import OrderedLayout
from radixlm.runtime.extras.approximate.row_selection import num_rows, ranks_to_store
from radixlm.runtime.model.kv_rows import inverse_order

from .chunk_traces import BUDGET, NUM_FOREIGN, NUM_HISTORY, parts_of
from .policies import POLICIES, Evidence, Order, stored_half
from .prefix import MAX_PREFIX, Prefix, PrefixModel
from .quality import divergence, fed
from .rows_by_layer import RowsByLayer
from .texts import Case, Query, Texts
from .voting import Vote, seen_by_voters, select_by_vote

NUM_PREFIXES: Mapping[str, int] = {"nq": 12, "tools": 8, "bbh": 12}
SELECTIONS = ("heavy hitters", "first+recent", "known", "hybrid", "oracle")
FULL, VOTING, FALLING_BACK = "full", "voting", "voting, falls back"
TEXT, RANKED, SHIPPED = "text", "ranked", "shipped"
LAYOUTS = {
    FULL: (TEXT,),
    "heavy hitters": (TEXT,),
    "first+recent": (TEXT,),
    "known": (TEXT, RANKED),
    "hybrid": (SHIPPED,),
    "oracle": (TEXT, SHIPPED),
    VOTING: (RANKED,),
    FALLING_BACK: (RANKED,),
}
"""By selection, the orders of its chunks: as in the text; all ranked by what is known before a query; as shipped, a
quarter ranked, and others in pages, of which a layer's part is read."""
Chunks = NDArray[np.int32]


@dataclass(frozen=True)
class Request:
    """One query of a prefix."""

    chunks: Mapping[tuple[str, str], Chunks]  # by selection and order; the indices of pieces
    kl: Mapping[str, float]  # by selection, nats per token; empty for the queries of other prefixes
    falls_back: float  # share of layers


@dataclass(frozen=True)
class Contested:
    """A prefix and its requests."""

    layout: OrderedLayout
    attention: NDArray[np.float64]  # [pieces] in `RANKED` order, the share of its layer's and head's attention
    requests: Sequence[Request]


def cases(texts: Texts) -> Iterator[tuple[Case, list[Query]]]:
    """Yield each prefix of all workloads with its own queries, and queries of other prefixes that it also gets."""
    for workload, count in NUM_PREFIXES.items():
        some = [case for case in texts.cases(workload) if len(case.prefix) <= MAX_PREFIX][:count]
        for number, case in enumerate(some):
            others = [other.queries for other in (*some[number + 1 :], *some[:number])]
            yield case, [query for queries in zip(*others, strict=False) for query in queries][:NUM_FOREIGN]


def contested(
    case: Case, foreign: Sequence[Query], model: PrefixModel, rows_by_layer: RowsByLayer | None = None
) -> Contested:
    """Measure all queries of a prefix but those of its history; `rows_by_layer` also measures `FALLING_BACK`."""
    num_tokens = len(case.prefix) // PAGE_SIZE * PAGE_SIZE  # whole pages are stored
    # all ranks have places: those of other ways lie in chunks, too
    prefix, layout = Prefix(model, case.prefix[:num_tokens]), OrderedLayout(model.layout, num_tokens, num_tokens)
    known = (*case.queries[:NUM_HISTORY], *foreign[:NUM_HISTORY])
    history = np.mean([prefix.exact(query.ids, 0).learned for query in known], axis=0)
    evidence = functools.partial(Evidence, prefix.mass / num_tokens, prefix.passed, history)
    queries = [(query, True) for query in case.queries[NUM_HISTORY:]]
    queries += [(query, False) for query in foreign[NUM_HISTORY:]]
    requests = [_measure_query(prefix, layout, model, rows_by_layer, evidence, *one) for one in queries]
    scores = evidence(history, lambda choice: history[:, 0], 0).known
    by_rank = -np.sort(-scores, axis=-1).reshape(layout.num_groups, layout.num_blocks, -1).sum(axis=-1)
    attention = (by_rank / by_rank.sum(axis=-1, keepdims=True)).T.reshape(-1)
    return Contested(layout, np.pad(attention, (0, layout.num_pieces - layout.num_chunks)), requests)


def _measure_query(
    prefix: Prefix,
    layout: OrderedLayout,
    model: PrefixModel,
    rows_by_layer: RowsByLayer | None,
    evidence_of: functools.partial[Evidence],
    query: Query,
    is_own: bool,
) -> Request:
    """Select rows for a query in each way; return the pieces to read, by selection and order, and the KL.

    Args:
        rows_by_layer: evaluates the prefix with whole layers where votes disagree; None: leave that out.
        evidence_of: makes the evidence from attention of the exact run, a probe of this query, and 0.
        is_own: the query belongs to the prefix; only then KL is measured.
    """
    count, num_logits = num_rows(prefix.num_tokens, BUDGET), len(query.continuation)
    exact = prefix.exact(fed(query), num_logits)
    seen = seen_by_voters(model, prefix, len(query.ids))
    evidence = evidence_of(exact.mass, functools.partial(prefix.probe, query=query.ids), 0)
    choices: dict[str, Order] = {name: POLICIES[name](evidence, count) for name in SELECTIONS}
    votes = select_by_vote(seen, model.layout.num_kv_heads, count)
    choices[VOTING] = votes.choice
    kl = {}
    if is_own:
        kl = {
            name: divergence(exact.logits, prefix.partial(choice, fed(query), num_logits))
            for name, choice in choices.items()
        }
    if is_own and rows_by_layer is not None:
        kl[FALLING_BACK] = _kl_of_falling_back(prefix, rows_by_layer, votes, query)
    ranks = {
        TEXT: np.broadcast_to(np.arange(prefix.num_tokens), evidence.shape),
        RANKED: inverse_order(np.argsort(-evidence.known, axis=-1, kind="stable")).astype(np.int64),
    }
    places = {
        (name, order): _chunks_of(layout, np.take_along_axis(ranks[order], choice, axis=-1))
        for name, choice in choices.items()
        for order in LAYOUTS[name]
        if order != SHIPPED
    }
    num_half = stored_half(evidence.order, count).shape[-1]
    places["hybrid", SHIPPED] = _shipped_pieces(layout, choices["hybrid"], evidence.order, num_half)
    num_ranks = ranks_to_store(prefix.num_tokens, is_start=True)
    places["oracle", SHIPPED] = _shipped_pieces(layout, choices["oracle"], evidence.order, num_ranks)
    places[FULL, TEXT] = np.arange(layout.num_blocks * layout.num_groups, dtype=np.int32)
    whole = np.repeat(votes.falls_back, model.layout.num_kv_heads)[places[FULL, TEXT] % layout.num_groups]
    places[FALLING_BACK, RANKED] = np.union1d(places[VOTING, RANKED], places[FULL, TEXT][whole]).astype(np.int32)
    return Request(places, kl, float(votes.falls_back.mean()))


def _kl_of_falling_back(prefix: Prefix, rows_by_layer: RowsByLayer, votes: Vote, query: Query) -> float:
    """Return the KL if layers in which the probed heads disagree have all rows."""
    whole = np.broadcast_to(np.arange(prefix.num_tokens), (votes.choice.shape[1], prefix.num_tokens))
    choice = [whole if falls_back else mine for falls_back, mine in zip(votes.falls_back, votes.choice, strict=True)]
    some, everything = (
        rows_by_layer.logits(prefix.rows, rows, fed(query), len(query.continuation)) for rows in (choice, None)
    )
    return divergence(everything, some)


def _shipped_pieces(layout: OrderedLayout, choice: Order, order: Order, num_first: int) -> Chunks:
    """Return the pieces that a choice reads from the stored prefix as it is shipped.

    Tokens of the first ranks are read from the ordered run, and others from parts of pages.
    """
    ranks = np.take_along_axis(inverse_order(order).astype(np.int64), choice, axis=-1)
    chunks = _chunks_of(layout, ranks)
    num_chunks = num_first // layout.chunk_size * layout.num_groups
    return np.concatenate([chunks[chunks < num_chunks], parts_of(layout, choice, order[..., :num_first])]).astype(
        np.int32
    )


def _chunks_of(layout: OrderedLayout, ranks: Order) -> Chunks:
    """Return the chunks of a ranked prefix that contain some ranks, `[layers, kv_heads, n]`."""
    groups = np.arange(layout.num_groups)[:, None]
    blocks = ranks.reshape(layout.num_groups, -1) // layout.chunk_size
    return np.unique(blocks * layout.num_groups + groups).astype(np.int32)
