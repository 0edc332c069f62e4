"""Measure how much of a prefix's stored order survives a restart and later questions, and the loss from the rest.

    python -m bench.partial.learned ARTIFACT [--joined 4] [--cases 6]

Engines answer nine questions about one prefix, and nine others; the ways differ in what happens in between. With
passages of NQ-open, `--joined` cases as one prefix, the questions are its own. With BBH's examples, `--cases` prefixes,
the questions are of other tasks than the prefix has examples of, and one more example of each of these is never asked:
its KL over a quarter of the rows, selected as they are served by the order on disk before and after, measures the
order. Nothing here is a time.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from radixlm.runtime import Engine, SamplingParams
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.extras.approximate.records.row_records import RowRecords
from radixlm.runtime.extras.approximate.row_selection import num_rows, with_probed
from radixlm.runtime.prefix.disk_index import DiskIndex
from radixlm.runtime.store import PageStore
from tokenizers import Tokenizer

from ..options import read_options
from ..report.page import publish
from ..store.disks import open_store
from .first_token import joined
from .policies import first_and_recent_of, stored_half
from .prefix import Prefix, PrefixModel
from .quality import divergence, fed, twice_error
from .texts import Query, Texts
from .ways import settle

NUM_QUESTIONS = 9  # before and after
BUDGET = 0.25
PARAMS = SamplingParams(max_tokens=1, temperature=0.0)
Between = Literal["nothing", "a restart", "a restart that forgets"]
WAYS: Sequence[Between] = ("nothing", "a restart", "a restart that forgets")
BEFORE: Mapping[str, str] = {"nothing": "before nothing", **dict.fromkeys(WAYS[1:], "before")}  # of the same engine
Json = dict[str, Any]


@dataclass(frozen=True)
class Stored:
    """The order of rows that a run on disk has: the tokens of its prefix with the first ranks."""

    order: NDArray[np.int64]  # [layers, kv_heads, ranks]
    num_tokens: int


@dataclass(frozen=True)
class Questions:
    """A prefix, prompts that begin with it, and questions that no prompt has."""

    prefix: list[int]
    first: list[list[int]]
    then: list[list[int]]
    unasked: Sequence[Query] = ()


def main() -> None:
    """Measure how stored orders survive later questions and a restart; print, and write `results/learned.json`."""
    options = read_options(__doc__, "artifact", joined=4, cases=6)
    artifact = Artifact.open(options.artifact)
    texts, model = Texts(Tokenizer.from_str(artifact.tokenizer_json)), PrefixModel(artifact)
    asked = {"nq": [of_passages(texts, options.joined)], "bbh": of_other_tasks(texts)[: options.cases]}
    figures: Json = {"model": artifact.manifest.name, "num_questions": NUM_QUESTIONS, "budget": BUDGET}
    for workload, some in asked.items():
        measured = [measure(artifact, model, one) for one in some]
        figures[workload] = {"num_tokens": [len(one.prefix) for one in some], "rows": list(summary(measured))}
    model.close()
    publish("learned", figures)


def of_passages(texts: Texts, num_joined: int) -> Questions:
    """Return passages of NQ-open as one prefix, and questions about them: those asked first, and the others."""
    cases = texts.cases("nq")
    some = joined([next(cases) for _ in range(num_joined)])
    prompts = [*some.history, *some.measured]
    assert len(prompts) >= 2 * NUM_QUESTIONS, "a question that is asked twice is no use of its rows: join more"
    return Questions(some.prefix, prompts[:NUM_QUESTIONS], prompts[NUM_QUESTIONS : 2 * NUM_QUESTIONS])


def of_other_tasks(texts: Texts) -> list[Questions]:
    """Return BBH's examples of three tasks, and the questions of the other nine; one prefix of each three first."""
    cases = list(texts.cases("bbh"))
    groups = [cases[start : start + 3] for start in range(0, len(cases), 3)]  # the same tasks
    found = []
    for number in range(3):
        for group in groups:
            own = {tuple(query.ids) for case in group for query in case.queries}
            others = [query for other in groups if other is not group for case in other for query in case.queries]
            ids = [one for one in dict.fromkeys(tuple(query.ids) for query in others) if one not in own]
            prompts = [[*group[number].prefix, *one] for one in ids]
            first, then = (prompts[start::2][:NUM_QUESTIONS] for start in (0, 1))
            assert len(then) == NUM_QUESTIONS, "the other tasks have too few questions"
            found.append(Questions(group[number].prefix, first, then, group[number].queries))
    return found


def measure(artifact: Artifact, model: PrefixModel, asked: Questions) -> Json:
    """Return the share of the stored order that stays, and the losses with each order, by what happens in between."""
    with tempfile.TemporaryDirectory() as temporary:
        orders = answer_in_engines(artifact, Path(temporary), asked)
    stays = {way: kept_share(orders[BEFORE[way]], orders[way]) for way in WAYS}
    print(len(asked.prefix), stays, flush=True)
    return {"stays": stays, "kl": measure_losses(model, asked, orders) if asked.unasked else {}}


def answer_in_engines(artifact: Artifact, directory: Path, asked: Questions) -> dict[str, Stored]:
    """Answer the first questions, then the others; return the stored orders before and after.

    They are by what happens between the questions. Two engines do not end with the same order: timing decides how a
    prompt is divided into steps, and so which of its tokens are scored.
    """
    found: dict[str, Stored] = {}
    with open_engine(artifact, directory / "nothing") as engine:
        found["before nothing"] = answer_prompts(engine, asked, asked.first)
        found["nothing"] = answer_prompts(engine, asked, asked.then)
    with open_engine(artifact, directory / "a restart") as engine:
        found["before"] = answer_prompts(engine, asked, asked.first)
    shutil.copytree(directory / "a restart", directory / "a restart that forgets")
    for way in WAYS[1:]:
        with open_engine(artifact, directory / way) as engine:
            if way == "a restart that forgets":
                engine._core.tier.extra.observer.keeper.look_up = lambda *_: None  # type: ignore[union-attr]
            found[way] = answer_prompts(engine, asked, asked.then)
    return found


def open_engine(artifact: Artifact, directory: Path) -> Engine:
    """Return an engine with a store in `directory` that learns orders, and does not prune by default."""
    directory.mkdir(exist_ok=True)
    return Engine(artifact, max_num_seqs=2, store=open_store(artifact, directory / "store"), kv_budget=1.0)


def answer_prompts(engine: Engine, asked: Questions, prompts: Sequence[list[int]]) -> Stored:
    """Answer prompts one after the other; return the order of the prefix's rows that is on disk then."""
    for prompt in prompts:
        engine.generate(prompt, PARAMS)
        settle(engine)
    tier = engine._core.tier
    assert tier is not None
    return read_order(tier.store, tier.index, asked.prefix)


def read_order(store: PageStore, index: DiskIndex, prefix: list[int]) -> Stored:
    """Read the stored order of the run of the prefix that all prompts share."""
    namespace = next(store.page_keys()).namespace
    heads = index.run(namespace, tuple(prefix), 0, len(index.keys(namespace, prefix)))
    run = None if heads is None else RowRecords.of(store).open_ordered(heads)
    assert run is not None, "the prefix has no run"
    order, num_tokens = run.order(), run.layout.num_tokens
    run.close()
    assert order is not None
    return Stored(order.astype(np.int64), num_tokens)


def kept_share(before: Stored, after: Stored) -> float:
    """Return the share of the first eighth of the tokens `before` that is in the first eighth `after`."""
    count = before.num_tokens // 8
    assert before.num_tokens == after.num_tokens and count <= before.order.shape[-1]
    pairs = zip(*(one.order[..., :count].reshape(-1, count) for one in (before, after)), strict=True)
    return float(np.mean([len(set(one.tolist()) & set(other.tolist())) / count for one, other in pairs]))


def measure_losses(model: PrefixModel, asked: Questions, orders: Mapping[str, Stored]) -> dict[str, list[float]]:
    """Return the losses of each order: for each unasked question, the KL of the partial prefix to the full one.

    In nats per token.

    `orders` decide which rows are read; `first+recent` reads the first and recent rows by no order.
    """
    [num_tokens] = {one.num_tokens for one in orders.values()}
    prefix, count = Prefix(model, asked.prefix[:num_tokens]), num_rows(num_tokens, BUDGET)
    halves = {way: stored_half(one.order, count, one.num_tokens) for way, one in orders.items()}
    found: dict[str, list[float]] = {way: [] for way in (*halves, "first+recent")}
    for query in asked.unasked:
        ids, num_logits = [*asked.prefix[num_tokens:], *query.ids], len(query.continuation)
        given = [*asked.prefix[num_tokens:], *fed(query)]
        full = prefix.exact(given, num_logits).logits
        for way, half in halves.items():
            choice = with_probed(half, prefix.probe(half, ids), count)
            found[way].append(divergence(full, prefix.partial(choice, given, num_logits)))
        simple = first_and_recent_of(prefix.mass.shape, count)
        found["first+recent"].append(divergence(full, prefix.partial(simple, given, num_logits)))
    return found


def summary(measured: Sequence[Json]) -> Iterator[Json]:
    """Yield a row for each order: the share that stays, and the loss, also as the difference to the order before, query
    by query."""
    names = ("before nothing", "nothing", "before", *WAYS[1:], "first+recent")
    kls = {way: np.array([kl for one in measured for kl in one["kl"].get(way, [])]) for way in names}
    for way, found in kls.items():
        row: Json = {"way": way, "num_queries": len(found)}
        if way in WAYS:
            row["stays"] = float(np.mean([one["stays"][way] for one in measured]))
            row["least"] = min(one["stays"][way] for one in measured)
        if found.size:
            more = found - kls[BEFORE.get(way, "before" if way == "first+recent" else way)]
            row |= {"kl": float(found.mean()), "kl_error": twice_error(found)}
            row |= {"more": float(more.mean()), "more_error": twice_error(more)}
        yield row


if __name__ == "__main__":
    main()
