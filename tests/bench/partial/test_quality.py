"""Policies choose what they say they do, and what is measured of all rows is the prefix itself, bit for bit."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.errors import InvalidParameter
from radixlm.runtime.extras.approximate.calibration.calibration import NAME, Calibration
from radixlm.runtime.extras.approximate.row_selection import NUM_FIRST, NUM_RECENT
from tokenizers import Tokenizer

from bench.partial import quality as partial_quality
from bench.partial import texts
from bench.partial.policies import POLICIES, Evidence
from bench.partial.prefix import Prefix, PrefixModel
from bench.partial.quality import CHOICES, VOTING, compare_policies, summary
from bench.partial.texts import Case, Query, Texts
from bench.report import partial as report

LAYERS, HEADS, TOKENS = 2, 3, 200


@pytest.fixture
def evidence() -> Evidence:
    rng = np.random.default_rng(0)
    prefix, passed, history, oracle = rng.random((4, LAYERS, HEADS, TOKENS))
    seen = np.zeros((LAYERS, TOKENS))
    seen[:, 77] = 1
    return Evidence(prefix, passed, history, oracle, lambda choice: seen, seed=1)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_choice_is_as_many_different_rows_in_each_layer_and_head(evidence: Evidence, policy: str) -> None:
    choice = POLICIES[policy](evidence, 60)
    assert choice.shape == (LAYERS, HEADS, 60)
    assert (np.diff(choice, axis=-1) > 0).all()
    assert (POLICIES[policy](evidence, TOKENS) == np.arange(TOKENS)).all()


def test_first_recent_half_by_stored_order_and_what_the_probe_sees_are_in_a_hybrid(evidence: Evidence) -> None:
    choice = POLICIES["hybrid, no pass"](evidence, 60)
    always = [*range(NUM_FIRST), *range(TOKENS - NUM_RECENT, TOKENS)]
    stored = np.argsort(-evidence.history, axis=-1)[..., : 32 - len(always)]  # whole pages
    for rows, first in zip(choice.reshape(-1, 60), stored.reshape(LAYERS * HEADS, -1), strict=True):
        assert set(always) | set(first) | set(range(64, 80)) <= set(rows), "the page that the probe saw, too"


def test_the_oracle_drops_least_and_history_is_by_other_queries(evidence: Evidence) -> None:
    def kept(policy: str) -> float:
        return float(np.take_along_axis(evidence.oracle, POLICIES[policy](evidence, 50), axis=-1).sum())

    assert all(kept("oracle") > kept(policy) for policy in POLICIES if policy != "oracle")
    best = np.sort(evidence.history, axis=-1)[..., -50:].sum()
    assert np.take_along_axis(evidence.history, POLICIES["history"](evidence, 50), axis=-1).sum() == pytest.approx(best)


@pytest.fixture(scope="module")
def model(tiny_artifact: Path) -> Iterator[PrefixModel]:
    model = PrefixModel(Artifact.open(tiny_artifact))
    yield model
    model.close()


def test_the_probe_looks_with_the_calibrated_head_and_without_one_nothing_is_measured(
    smollm2_artifact: Path, tmp_path: Path
) -> None:
    copy = Artifact.open(shutil.copytree(smollm2_artifact, tmp_path / "copy.radixlm", copy_function=os.link))
    (copy.path / NAME).unlink(missing_ok=True)
    with pytest.raises(InvalidParameter, match="run: radixlm calibrate"):
        PrefixModel(copy)
    for head in (0, 1):
        Calibration.of(copy.manifest, probe_head=head, max_dropped_attention=1.0).write(copy.path)
        model = PrefixModel(copy, num_regions=1)
        assert model.probe_head == head
        model.close()


def test_queries_over_all_rows_are_exact_and_over_few_differ(model: PrefixModel) -> None:
    ids = np.random.default_rng(3).integers(0, 320, 300).tolist()
    queries = [Query(ids[start : start + 10], ids[start + 10 : start + 20]) for start in (200, 220, 240)]
    case = Case(ids[:200], queries)
    measured = list(compare_policies(case, 0, model))  # it asserts that all rows are the prefix
    assert len(measured) == 3 * len(CHOICES) * len(partial_quality.BUDGETS)
    few = ("first+recent", VOTING)
    assert list(compare_policies(case, 0, model, few)) == [one for one in measured if one.policy in few]
    assert all(one.kl > 0 and 0 < one.dropped < 1 for one in measured)
    [row] = [row for row in summary(measured) if (row["policy"], row["budget"]) == ("oracle", 0.5)]
    assert row["num_queries"] == 3
    others = [one for one in summary(measured) if one["budget"] == 0.5]
    assert row["dropped"] == min(one["dropped"] for one in others)
    [compared] = [one for one in others if one["policy"] == partial_quality.COMPARED]
    assert (compared["kl_ratio"], compared["kl_ratio_error"]) == (1, 0)
    assert row["kl_ratio"] == pytest.approx(row["kl"] / compared["kl"]) and row["kl_ratio_error"] > 0
    results = {"rows": others, "workload": "nq", "num_prefixes": 1, "shortest_prefix": 200, "longest_prefix": 200}
    results |= {"origin": dict.fromkeys(("command", "commit", "date", "machine", "apache_tvm"), "")}
    runs = {"runs": {name: {**results, "model": name} for name in ("one", "two")}}
    for section in (report.quality, report.needle):
        page = "".join(section(runs))
        assert page.count("| 50% |") == 2 * len(CHOICES) and "### one: 1 prefixes" in page and "### two: " in page


def test_a_model_is_published_by_its_name_beside_others(tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "_PREFIX", 300)  # tokens, which the tiny model has room for
    published: list[tuple[str, dict[str, Any], str | None]] = []
    monkeypatch.setattr(partial_quality, "publish", lambda *result: published.append(result))
    options = ["text", "--prefixes", "1", "--policies", VOTING]
    monkeypatch.setattr(sys, "argv", ["quality", str(tiny_artifact), *options])
    partial_quality.main()
    [(file, figures, run)] = published
    assert (file, run, figures["model"], figures["num_prefixes"]) == ("partial_text", "tiny", "tiny", 1)
    assert [row["policy"] for row in figures["rows"]] == ["first+recent", VOTING] * len(partial_quality.BUDGETS)


def test_the_probe_is_a_softmax_over_what_is_not_there(model: PrefixModel) -> None:
    ids = np.random.default_rng(4).integers(0, 320, 90).tolist()
    prefix = Prefix(model, ids[:80])
    scores = prefix.probe(np.broadcast_to(np.arange(40), (*prefix.mass.shape[:2], 40)), ids[80:])
    assert scores.shape == (prefix.mass.shape[0], 80)
    assert ((scores >= 0) & (scores <= 1)).all() and (scores[:, :40] == 0).all()
    assert (scores.sum(axis=-1) >= 1 - 1e-5).all()  # the largest of several rows, each of which sums to 1


def test_texts_need_no_other_files_but_for_some(tiny_artifact: Path) -> None:
    made = Texts(Tokenizer.from_str(Artifact.open(tiny_artifact).tokenizer_json))
    for workload in ("text", "needle", "calibration"):
        cases = list(made.cases(workload))
        assert len(cases) >= 4
        assert all(case.num_counted == (1 if workload != "text" else len(case.queries)) for case in cases)
        assert all(query.ids and query.continuation for case in cases for query in case.queries)
