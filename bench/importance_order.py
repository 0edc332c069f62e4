"""How well the order that a store would give a prefix's rows foretells where later queries look.

    python -m bench.importance_order ARTIFACT

The queries of each prefix (`bench/partial_texts.py`) come one after the other. Before each but the first the rows of
every layer and KV head are ranked by a history of the prefix pass and of the queries so far: a use weighs `decay` times
as much as the one after it. `seen` is the share of the attention on the prefix that the query and what truly follows
put on the best quarter, `overlap` the share of that quarter which is among the quarter that they look at most.

What a use counts: the `sum` of its tokens' attention, the mean over those that came after the row (`looked`), or over
all of them (`use`). The prefix pass `alone` is the order of a prefix that nobody asked yet, `kept` it is a use like
any, `replaced` it counts until the first query only. `oracle`: by the attention that is to be foretold.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.pruning.row_selection import largest
from tokenizers import Tokenizer

from .partial_policies import Scores
from .partial_prefix import Prefix, PrefixModel
from .partial_texts import Case, Texts

WORKLOADS = ("text", "nq", "tools", "bbh")
BUDGET = 0.25


@dataclass(frozen=True)
class History:
    """One way to remember."""

    prefix: str
    use: str
    decay: float = 1.0


ORACLE = History("oracle", "sum")
HISTORIES = (
    *(History("alone", use) for use in ("sum", "looked")),
    *(History("kept", use) for use in ("sum", "looked", "use")),
    *(History("kept", use, decay) for use in ("looked", "use") for decay in (0.5, 0.8)),
    History("replaced", "sum"),
    *(History("replaced", "looked", decay) for decay in (0.0, 0.5, 0.8, 0.9, 1.0)),
)


def measure(case: Case, model: PrefixModel) -> Iterator[tuple[History, tuple[float, float]]]:
    """`seen` and `overlap` of each query but the first."""
    prefix = Prefix(model, case.prefix)
    fed = [[*query.ids, *query.continuation[:-1]] for query in case.queries]
    masses = [prefix.exact(ids, 1).mass for ids in fed]
    uses = {
        "sum": [prefix.mass, *masses],
        "looked": [prefix.mass / (prefix.num_tokens - np.arange(prefix.num_tokens)), *_means(masses, fed)],
        "use": [prefix.mass / prefix.num_tokens, *_means(masses, fed)],
    }
    count = round(BUDGET * prefix.num_tokens)
    for how in HISTORIES:
        history, *queries = uses[how.use]
        for i, (query, mass) in enumerate(zip(queries, masses, strict=True)):
            if i > 0:
                yield how, _found(history, mass, count)
            if how.prefix != "alone":
                history = query if i == 0 and how.prefix == "replaced" else how.decay * history + query
    for mass in masses[1:]:
        yield ORACLE, _found(mass, mass, count)


def _means(masses: list[Scores], fed: list[list[int]]) -> list[Scores]:
    return [mass / len(ids) for mass, ids in zip(masses, fed, strict=True)]


def _found(history: Scores, mass: Scores, count: int) -> tuple[float, float]:
    ours, theirs = largest(history, count), largest(mass, count)
    seen = np.take_along_axis(mass, ours, axis=-1).sum(axis=-1) / mass.sum(axis=-1)
    is_theirs = np.zeros(mass.shape, bool)
    np.put_along_axis(is_theirs, theirs, True, axis=-1)
    return float(seen.mean()), float(np.take_along_axis(is_theirs, ours, axis=-1).mean())


def main() -> None:
    """Measure the workloads and print a line for each way to remember."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    options = parser.parse_args()
    artifact = Artifact.open(options.artifact)
    model, texts = PrefixModel(artifact), Texts(Tokenizer.from_str(artifact.tokenizer_json))
    for workload in options.workloads:
        found: dict[History, list[tuple[float, float]]] = defaultdict(list)
        for case in texts.cases(workload):
            for how, figures in measure(case, model):
                found[how].append(figures)
        for how, some in found.items():
            seen, overlap = np.mean(some, axis=0)
            name = f"{workload:5} {how.prefix:8} {how.use:6} {how.decay:.1f}"
            print(f"{name}  seen {seen:.3f}  overlap {overlap:.3f}  of {len(some)} queries", flush=True)
    model.close()


if __name__ == "__main__":
    main()
