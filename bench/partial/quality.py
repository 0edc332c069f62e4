"""Measure a model's loss when it reads a quarter of a prefix's KV rows, by how they are selected.

    python -m bench.partial.quality ARTIFACT text|needle|calibration|nq|nq_calibration|tools|bbh
        [--policies hybrid voting ...] [--prefixes 10]

Every query follows a prefix whose KV was computed once, over all of its rows and over 10, 25 and 50 % of them, as many
in each layer and KV head: KL and top-1 over the true continuation (teacher-forced), its perplexity, and the share of
the attention on the prefix that was dropped. `needle` asks for a fact that was not asked for before: the probability of
the answer, and whether it is the model's first choice throughout. `oracle` knows the results of an exact run, and
`voting`, IMPRESS's selection, this query's own attention, in each layer. `nq`, `tools` and `bbh` need the folder of
real inputs (`RADIXLM_DATA`). Minutes each on two cores.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from radixlm.runtime.artifact import Artifact
from tokenizers import Tokenizer

from ..report.page import publish
from .policies import POLICIES, Evidence, Order, Scores
from .prefix import Exact, Prefix, PrefixModel
from .texts import WORKLOADS, Case, Query, Texts
from .voting import seen_by_voters, select_by_vote

BUDGETS = (0.1, 0.25, 0.5)
COMPARED = "first+recent"  # the policy that needs to know nothing
VOTING = "voting"
CHOICES = (*POLICIES, VOTING)
Json = dict[str, object]


@dataclass(frozen=True)
class Measured:
    """One query over a share of the rows; means over the tokens of its continuation."""

    prefix: int  # its number
    policy: str
    budget: float
    kl: float  # KL(full || partial), nats per token
    agreement: float  # share of tokens with the same most likely one
    log_prob: float  # of the true token, nats
    full_log_prob: float
    dropped: float  # share of the attention on the prefix that the full run has on rows that were omitted
    answered: float  # probability of the whole continuation
    found: float  # 1 where each of its tokens is the most likely one
    full_answered: float
    full_found: float
    depth: float | None


def compare_policies(
    case: Case, number: int, model: PrefixModel, policies: Sequence[str] = CHOICES
) -> Iterator[Measured]:
    """Yield, by query, policy and budget, how the partly read prefix differs from the full one: KL, top-1 and more.

    Checks that all rows in separate pages give the same bits as the prefix itself.
    """
    prefix = Prefix(model, case.prefix)
    runs, seen = [], []
    for query in case.queries:
        runs.append(prefix.exact(fed(query), len(query.continuation)))
        seen.append(seen_by_voters(model, prefix, len(query.ids)))
    for i, query in enumerate(case.queries[: case.num_counted]):
        others = [j for j in range(len(runs)) if j != i]
        history = np.mean([runs[j].learned for j in others], axis=0)
        probe = functools.partial(prefix.probe, query=query.ids)
        evidence = Evidence(prefix.mass / prefix.num_tokens, prefix.passed, history, runs[i].mass, probe, number)
        whole = POLICIES["hybrid"](evidence, prefix.num_tokens)
        same = prefix.partial(whole, fed(query), len(query.continuation))
        assert np.array_equal(same, runs[i].logits), "all rows are not the prefix"
        full = _log_probs(runs[i].logits)
        for policy in policies:
            for budget in BUDGETS:
                count = round(budget * prefix.num_tokens)
                if policy == VOTING:
                    choice = select_by_vote(seen[i], model.layout.num_kv_heads, count).choice
                else:
                    choice = POLICIES[policy](evidence, count)
                partial = _log_probs(prefix.partial(choice, fed(query), len(query.continuation)))
                yield _compare(
                    number, policy, budget, query, full, partial, _dropped_share(runs[i], choice), case.depth
                )


def fed(query: Query) -> list[int]:
    """Return the tokens to compute for the logits of a query's continuation: all but its last one."""
    return [*query.ids, *query.continuation[:-1]]


def divergence(full: npt.NDArray[np.float32], partial: npt.NDArray[np.float32]) -> float:
    """Return KL(full || partial) of logits, `[tokens, vocab]`, in nats: the mean over tokens."""
    return _mean_kl(_log_probs(full), _log_probs(partial))


def _mean_kl(full: Scores, partial: Scores) -> float:
    """Return the mean KL of log probabilities, `[tokens, vocab]`, in nats per token."""
    return float((np.exp(full) * (full - partial)).sum(axis=-1).mean())


def _dropped_share(exact: Exact, choice: Order) -> float:
    """Return the share of the exact run's attention to the prefix that falls on rows outside `choice`."""
    kept = np.take_along_axis(exact.mass, choice, axis=-1).sum(axis=-1)
    return float((1 - kept / exact.mass.sum(axis=-1)).mean())


def _log_probs(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Return the log softmax of logits, in float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def _compare(
    number: int,
    policy: str,
    budget: float,
    query: Query,
    full: Scores,
    partial: Scores,
    dropped: float,
    depth: float | None,
) -> Measured:
    """Return the result of one query: the partial prefix compared with the full one.

    Args:
        number: the prefix's.
        full, partial: log probabilities, `[tokens of the continuation, vocab]`.
        dropped: share of the attention on rows that were left out.
        depth: depth of the fact in the prefix; None without one.
    """
    places, target = np.arange(len(query.continuation)), np.array(query.continuation)
    said, full_said = partial[places, target], full[places, target]
    first, full_first = partial.argmax(axis=-1), full.argmax(axis=-1)
    return Measured(
        number,
        policy,
        budget,
        kl=_mean_kl(full, partial),
        agreement=float((first == full_first).mean()),
        log_prob=float(said.mean()),
        full_log_prob=float(full_said.mean()),
        dropped=dropped,
        answered=math.exp(said.sum()),
        found=float((first == target).all()),
        full_answered=math.exp(full_said.sum()),
        full_found=float((full_first == target).all()),
        depth=depth,
    )


def summary(measured: Sequence[Measured]) -> list[Json]:
    """Return a row for each budget and policy: means over queries, of KL also twice the standard error, and its ratio
    to that of the first and recent rows with twice the standard error (the delta method, query by query)."""
    rows: list[Json] = []
    for budget in BUDGETS:
        compared = np.array([one.kl for one in measured if (one.policy, one.budget) == (COMPARED, budget)])
        for policy in dict.fromkeys(one.policy for one in measured):
            mine = [one for one in measured if (one.policy, one.budget) == (policy, budget)]
            kls = np.array([one.kl for one in mine])
            row: Json = {"policy": policy, "budget": budget, "num_queries": len(mine)}
            row["kl_error"] = twice_error(kls)
            row["kl_ratio"] = float(kls.mean() / compared.mean())
            row["kl_ratio_error"] = twice_error(kls - kls.mean() / compared.mean() * compared) / float(compared.mean())
            for name in ("kl", "agreement", "dropped", "answered", "found", "full_answered", "full_found"):
                row[name] = float(np.mean([getattr(one, name) for one in mine]))
            for name in ("log_prob", "full_log_prob"):
                row[name.replace("log_prob", "perplexity")] = math.exp(-np.mean([getattr(one, name) for one in mine]))
            depths = sorted({one.depth for one in mine if one.depth is not None})
            row["found_by_depth"] = {
                str(depth): float(np.mean([one.found for one in mine if one.depth == depth])) for depth in depths
            }
            rows.append(row)
    return rows


def twice_error(values: Scores) -> float:
    """Return twice the standard error of the mean of some values."""
    return 2 * float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def main() -> None:
    """Compare partly read prefixes with full ones on a workload; print, and write `results/partial_WORKLOAD.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--policies", nargs="+", choices=CHOICES, default=CHOICES, help=f"{COMPARED} is always one")
    parser.add_argument("--prefixes", type=int, help="so many at most")
    options = parser.parse_args()
    artifact = Artifact.open(options.artifact)
    name, model = artifact.manifest.name, PrefixModel(artifact)
    some = Texts(Tokenizer.from_str(artifact.tokenizer_json)).cases(options.workload)
    cases = list(itertools.islice(some, options.prefixes))
    policies = [policy for policy in CHOICES if policy in (COMPARED, *options.policies)]
    rows = summary(
        [one for number, case in enumerate(cases) for one in compare_policies(case, number, model, policies)]
    )
    model.close()
    lengths = [len(case.prefix) for case in cases]
    figures: Json = {"model": name, "workload": options.workload, "num_prefixes": len(cases), "rows": rows}
    figures |= {"shortest_prefix": min(lengths), "longest_prefix": max(lengths)}
    publish(f"partial_{options.workload}", figures, name)


if __name__ == "__main__":
    main()
