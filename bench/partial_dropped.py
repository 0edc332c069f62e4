"""Whether the estimate of dropped attention tells which queries a part of a prefix is too little for.

    python -m bench.partial_dropped ARTIFACT calibration nq_calibration text

For each query the hybrid's choice (`row_selection.py`), as it is read from disk: the attention that it drops,
as its probe estimates it (`estimate`) and in truth, and KL(full || partial) over what truly follows. For each workload
and share of rows: how the ranks of estimate and KL agree (Spearman), how many queries the bound of
`partial_prefix.py` sends back to a full load, and the mean KL of the others and of those. `nq_calibration`
needs the folder of real inputs (`RADIXLM_DATA`). A minute or two each on two cores.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.pruning.partial_prefix import MAX_DROPPED_MASS
from radixlm.runtime.pruning.row_selection import (
    always,
    dropped_mass,
    num_rows,
    scores_to_store,
    stored_rows,
    stored_shares,
    with_probed,
)
from tokenizers import Tokenizer

from .partial_prefix import Prefix, PrefixModel
from .partial_texts import WORKLOADS, Case, Texts

BUDGETS = (0.1, 0.25, 0.5)


@dataclass(frozen=True)
class Dropped:
    """One query at one share of the rows."""

    budget: float
    estimate: float
    true: float
    kl: float  # nats a token


def measure(case: Case, model: PrefixModel, *, max_queries: int) -> Iterator[Dropped]:
    """The first queries of a case; the others, and they for each other, are history."""
    prefix = Prefix(model, case.prefix)
    fed = [[*query.ids, *query.continuation[:-1]] for query in case.queries]
    runs = [prefix.exact(ids, len(query.continuation)) for ids, query in zip(fed, case.queries, strict=True)]
    fixed = always(prefix.num_tokens)
    for i, query in enumerate(case.queries[: min(case.num_counted, max_queries)]):
        history = np.asarray(sum(run.mass for j, run in enumerate(runs) if j != i))
        order = np.argsort(-scores_to_store(history, is_start=True), axis=-1, kind="stable")
        for budget in BUDGETS:
            count = num_rows(prefix.num_tokens, budget)
            [share] = stored_shares([prefix.num_tokens], [len(fixed)], count)
            stored = stored_rows(order, fixed, share)
            seen = prefix.look(stored, query.ids)
            chosen = with_probed(stored, seen.largest, count, order)
            partial = prefix.partial(chosen, fed[i], len(query.continuation))
            kept = np.take_along_axis(runs[i].mass, chosen, axis=-1).sum(axis=-1)
            yield Dropped(
                budget,
                dropped_mass(seen.mean, chosen[:, model.probe_head]),
                float((1 - kept / runs[i].mass.sum(axis=-1)).mean()),
                _kl(runs[i].logits, partial),
            )


def summary(measured: Sequence[Dropped], budget: float) -> str:
    """A line."""
    mine = [one for one in measured if one.budget == budget]
    estimates, kls = np.array([one.estimate for one in mine]), np.array([one.kl for one in mine])
    is_back = estimates > MAX_DROPPED_MASS
    return (
        f"{budget:.0%} of rows, {len(mine)} queries: estimate {estimates.min():.3f} to {estimates.max():.3f} "
        f"(mean {estimates.mean():.3f}, true {np.mean([one.true for one in mine]):.3f}), KL {kls.mean():.3f}; "
        f"Spearman {_spearman(estimates, kls):.2f}; {is_back.sum()} fall back, "
        f"KL kept {_mean(kls[~is_back])}, of those back {_mean(kls[is_back])}"
    )


def _kl(full: npt.NDArray[np.float32], partial: npt.NDArray[np.float32]) -> float:
    logs = [logits - logits.max(axis=-1, keepdims=True) for logits in (full.astype(float), partial.astype(float))]
    p, q = (one - np.log(np.exp(one).sum(axis=-1, keepdims=True)) for one in logs)
    return float((np.exp(p) * (p - q)).sum(axis=-1).mean())


def _spearman(left: npt.NDArray[np.float64], right: npt.NDArray[np.float64]) -> float:
    ranks = np.array([np.argsort(np.argsort(values)) for values in (left, right)])
    return float(np.corrcoef(ranks)[0, 1]) if len(left) > 1 else 0.0


def _mean(values: npt.NDArray[np.float64]) -> str:
    return f"{values.mean():.3f}" if len(values) else "-"


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("workloads", nargs="+", choices=WORKLOADS)
    parser.add_argument("--prefixes", type=int, default=12, help="of each workload, at most")
    parser.add_argument("--queries", type=int, default=7, help="of each prefix, at most")
    options = parser.parse_args()
    artifact = Artifact.open(options.artifact)
    model, texts = PrefixModel(artifact), Texts(Tokenizer.from_str(artifact.tokenizer_json))
    together: list[Dropped] = []
    for workload in options.workloads:
        cases = list(texts.cases(workload))[: options.prefixes]
        measured = [one for case in cases for one in measure(case, model, max_queries=options.queries)]
        together += measured
        for budget in BUDGETS:
            print(f"{workload}, {summary(measured, budget)}", flush=True)
    for budget in BUDGETS:
        print(f"all, {summary(together, budget)}")
    model.close()


if __name__ == "__main__":
    main()
