"""Measure whether questions are still answered when a part of their prefix is read, by how the rows are selected.

    python -m bench.partial.answers ARTIFACT nq|booleans|brackets|calls|needles [--seconds 480] [--again] [--ours]

At least 200 questions of a set (`judged/questions.py`), many after one prefix. Each is answered, with the most likely
tokens, over the whole prefix and over 10, 25 and 50 % of its rows, selected by `bench/partial/policies.py` or by
IMPRESS's voting; `hybrid`, the shipped method, also has 75 %. The hybrid knows the pass that computed a prefix and the
questions before, which were answered over the whole prefix; the first one has none. Voting has more than it could have:
its probed heads use the queries of a full run. Replies are kept in `.cache/answers`, and a call that ran out of
`--seconds` is continued by the next; the last one judges them. `--again` repeats the hybrid, and keeps the other
replies. `--ours` measures the whole prefix and the hybrid alone: the published results of the other ways stay, with
their commit.

The requirement: the 95 % interval of the ratio of two mean scores, by a bootstrap over questions, both scores of a
question together, has its lower end at 0.92 or above. It applies where the full prefix does better than chance.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.extras.approximate.attention_scores import DECAY
from radixlm.runtime.extras.approximate.row_selection import num_rows
from tokenizers import Tokenizer

from ..options import read_options
from ..report.page import publish
from ..results import read_results
from .judged.questions import SETS, Asked, QuestionSet
from .judged.replies import Parts
from .policies import POLICIES, Evidence, Scores
from .prefix import Prefix, PrefixModel
from .voting import seen_by_voters, select_by_vote

FULL, OURS, SIMPLE, VOTING = "full", "hybrid", "first+recent", "voting"
WAYS = [(way, budget) for way in (OURS, SIMPLE, VOTING) for budget in (0.1, 0.25, 0.5)] + [(OURS, 0.75)]
ONLY_OURS = [(way, budget) for way, budget in WAYS if way == OURS]
BAR, NUM_SAMPLES = 0.92, 10_000
WHEEL = "bfcl_eval-2026.3.23-py3-none-any.whl"
Json = dict[str, Any]


class Asker:
    """A model that answers a set's questions."""

    def __init__(self, artifact: Artifact, questions: QuestionSet) -> None:
        self._set = questions
        self._tokenizer = Tokenizer.from_str(artifact.tokenizer_json)
        self.model = PrefixModel(artifact, num_regions=2 + len(WAYS))

    def replies(
        self, asked: Asked, ways: Sequence[tuple[str, float]] = WAYS, *, asks_whole: bool = True
    ) -> Iterator[Json]:
        """Answer all questions about a prefix, with its full KV and with parts of it; yield a row for each question.

        A row has the `right` answer, the prefix's `num_tokens`, the reply of each way (`said`), and by budget the share
        of layers whose heads' votes differ (`falls_back`).

        Args:
            ways: ways to choose the part of the rows to read, each with its budget.
            asks_whole: also answer with the full prefix.
        """
        prefix = Prefix(self.model, self._ids(asked.prefix))
        parts = Parts(self.model, prefix)
        history, weight = np.zeros_like(prefix.mass), 0.0
        for number, question in enumerate(asked.questions):
            query = self._ids(question.text)
            exact = prefix.exact(query, 0)
            votes_too = any(way == VOTING for way, _ in ways)
            seen = seen_by_voters(self.model, prefix, len(query)) if votes_too else None  # before another run
            known = history / max(weight, 1.0)

            def probe(choice: Any, query: list[int] = query) -> Scores:
                return prefix.probe(choice, query)

            evidence = Evidence(prefix.mass / prefix.num_tokens, prefix.passed, known, exact.mass, probe, number)
            chosen, disagreeing = {FULL: parts.whole} if asks_whole else {}, {}
            for region, (way, budget) in enumerate(ways, start=2):
                count = num_rows(prefix.num_tokens, budget)
                if way == VOTING:
                    assert seen is not None
                    votes = select_by_vote(seen, self.model.layout.num_kv_heads, count)
                    choice, disagreeing[budget] = votes.choice, float(votes.falls_back.mean())
                else:
                    choice = POLICIES[way](evidence, count)
                chosen[name_of(way, budget)] = parts.write(region, choice)
            ids = parts.greedy(list(chosen.values()), query, self._set.max_tokens, self._is_done)
            said = {way: self._text(one) for way, one in zip(chosen, ids, strict=True)}
            yield {"right": question.right, "num_tokens": prefix.num_tokens, "falls_back": disagreeing, "said": said}
            history = DECAY * history + exact.learned
            weight = DECAY * weight + 1

    def _is_done(self, ids: list[int]) -> bool:
        """Return whether the generated tokens contain a whole line."""
        return "\n" in self._tokenizer.decode(ids).lstrip("\n ")

    def _text(self, ids: list[int]) -> str:
        """Return the first line of generated tokens."""
        return self._tokenizer.decode(ids).strip().partition("\n")[0]

    def _ids(self, text: str) -> list[int]:
        """Tokenize a text without special tokens."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


def name_of(way: str, budget: float) -> str:
    """Return the name of a way to select rows at a budget, such as `hybrid 25%`: a column of replies."""
    return f"{way} {budget:.0%}"


def summary(rows: Sequence[Json], questions: QuestionSet) -> list[Json]:
    """Return a row for each way to select rows and each budget, with mean scores.

    `ratio` is that of the mean main score (the first of a question's scores) to the mean over the full prefix, from
    `low` to `high` in its 95 % interval.
    """
    scores = {way: [questions.judge(row["said"][way], row["right"]) for row in rows] for way in rows[0]["said"]}
    main = next(iter(scores[FULL][0]))
    full = np.array([one[main] for one in scores[FULL]])
    found = []
    for way, mine in scores.items():
        values = np.array([one[main] for one in mine])
        low, high = interval(values, full)
        name, _, budget = way.partition(" ")
        row: Json = {"way": name, "budget": float(budget.rstrip("%")) / 100 if budget else 1.0}
        row |= {name: float(np.mean([one[name] for one in mine])) for name in mine[0]}
        row |= {"ratio": ratio(values.mean(), full.mean()), "low": low, "high": high}
        row["same"] = float(np.mean([one["said"][way] == one["said"][FULL] for one in rows]))
        if name == VOTING:
            row["falls_back"] = float(np.mean([one["falls_back"][str(row["budget"])] for one in rows]))
        found.append(row)
    return found


def verdict(rows: Sequence[Json], found: Sequence[Json], questions: QuestionSet) -> Json:
    """Return whether the full prefix does better than chance, and the smallest sufficient budget of each way (`least`).

    A budget suffices if the low end of the ratio to the full prefix's score is at least `BAR`, also at all larger
    budgets. `found` has the rows of `summary`.
    """
    main = next(name for name in found[0] if name not in ("way", "budget"))
    full = np.array([questions.judge(row["said"][FULL], row["right"])[main] for row in rows])
    low = float(np.quantile(resampled(full), 0.025))
    least = {}
    for way in dict.fromkeys(row["way"] for row in found if row["way"] != FULL):
        least[way] = 1.0
        for row in sorted((row for row in found if row["way"] == way), key=lambda row: -row["budget"]):
            if row["low"] < BAR:
                break
            least[way] = row["budget"]
    return {"score": main, "full_low": low, "is_above_chance": low > questions.chance, "least": least}


def interval(values: Scores, full: Scores) -> tuple[float, float]:
    """Return the 95 % interval of `values.mean() / full.mean()`; both are resampled together."""
    ratios = [ratio(mine, whole) for mine, whole in zip(resampled(values), resampled(full), strict=True)]
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(low), float(high)


def resampled(values: Scores) -> npt.NDArray[np.float64]:
    """Return means of `NUM_SAMPLES` draws of as many questions, the same draws for every set of as many values."""
    chance = np.random.default_rng(0)
    return np.array([values[chance.integers(0, len(values), len(values))].mean() for _ in range(NUM_SAMPLES)])


def ratio(mine: float, full: float) -> float:
    """Return `mine / full`, or 0 where nothing was right over the full prefix."""
    return float(mine / full) if full > 0 else 0.0


def gather(
    path: Path,
    artifact: Artifact,
    questions: QuestionSet,
    wheel: Path,
    seconds: float,
    ways: Sequence[tuple[str, float]] = WAYS,
) -> list[Json] | None:
    """Return all rows, after measuring those that are missing in `path`, prefix by prefix; None if no time is left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    done = [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.is_file() else []
    asked, begun, asker = list(questions.asked(wheel)), time.monotonic(), None
    for number, one in enumerate(asked[len(done) :], start=len(done)):
        if time.monotonic() - begun > seconds:
            print(f"{number} of {len(asked)} prefixes; the same command goes on", flush=True)
            return None
        asker = asker or Asker(artifact, questions)
        done.append(list(asker.replies(one, ways)))
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(done[-1]) + "\n")
    return [json.loads(json.dumps(row)) for rows in done for row in rows]


def ask_again(path: Path, artifact: Artifact, questions: QuestionSet, wheel: Path) -> None:
    """Replace the hybrid's replies in the file of kept rows, `path`, by new ones; the other replies stay."""
    asker, unfinished = Asker(artifact, questions), path.with_suffix(".again")
    kept = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    with unfinished.open("w", encoding="utf-8") as file:
        for rows, asked in zip(kept, questions.asked(wheel), strict=True):
            for row, new in zip(rows, asker.replies(asked, ONLY_OURS, asks_whole=False), strict=True):
                row["said"] |= new["said"]
            file.write(json.dumps(rows) + "\n")
    unfinished.replace(path)


def published(run: str) -> Iterator[Json]:
    """Yield the published results of a run's other ways, each with its commit."""
    before = (read_results("partial_answers") or {"runs": {}})["runs"].get(run)
    for row in () if before is None else before["rows"]:
        if row["way"] not in (FULL, OURS):
            yield {"commit": before["origin"]["commit"], **row}


def main() -> None:
    """Answer all questions, and when all are answered judge, print and write `results/partial_answers.json`."""
    flags = {"again": False, "ours": False}
    options = read_options(__doc__, "artifact", "set", seconds=480.0, wheel=f".cache/bfcl/{WHEEL}", **flags)
    name, questions = str(options.set), SETS[str(options.set)]
    artifact = Artifact.open(options.artifact)
    ways, run = ONLY_OURS if options.ours else WAYS, f"{artifact.manifest.name}, {name}"
    kept = Path(".cache/answers") / artifact.manifest.name / f"{name}{'.ours' if options.ours else ''}.jsonl"
    if options.again:
        ask_again(kept, artifact, questions, Path(options.wheel))
    rows = gather(kept, artifact, questions, Path(options.wheel), options.seconds, ways)
    if rows is None:
        return
    found = [*summary(rows, questions), *(published(run) if options.ours else ())]
    lengths = [row["num_tokens"] for row in rows]
    figures: Json = {"model": artifact.manifest.name, "set": name, "chance": questions.chance}
    figures |= {"num_questions": len(rows), "shortest_prefix": min(lengths), "longest_prefix": max(lengths)}
    figures |= {**verdict(rows, found, questions), "rows": found}
    publish("partial_answers", figures, run)


if __name__ == "__main__":
    main()
