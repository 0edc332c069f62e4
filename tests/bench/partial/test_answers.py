"""Questions are judged as their sets say, and what is answered over all rows is what the prefix itself answers."""

from __future__ import annotations

import doctest
import json
import random
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from radixlm.runtime.artifact import Artifact

from bench.partial import answers, voting
from bench.partial.answers import (
    FULL,
    ONLY_OURS,
    OURS,
    VOTING,
    WAYS,
    Asker,
    ask_again,
    gather,
    interval,
    name_of,
    published,
    summary,
    verdict,
)
from bench.partial.judged import judging
from bench.partial.judged.questions import NUM_QUESTIONS, SETS, Asked, Question, QuestionSet
from bench.partial.judged.replies import Parts
from bench.partial.prefix import Prefix, PrefixModel
from bench.partial.voting import MIN_AGREEMENT, Vote, attention, select_by_vote
from bench.report.answers import answers as section

NO_WHEEL = Path("no wheel")


@pytest.mark.parametrize("module", [judging, voting])
def test_examples_are_true(module: object) -> None:
    assert doctest.testmod(module).failed == 0  # type: ignore[arg-type]


@pytest.mark.parametrize(("reply", "score"), [("The  Eiffel Tower!", 1.0), ("Tower", 2 / 3), ("Louvre", 0.0)])
def test_words_count_and_not_how_they_are_written(reply: str, score: float) -> None:
    found = judging.words(reply, ["Notre-Dame", "Eiffel Tower"])
    assert found == {"exact": float(score == 1), "f1": pytest.approx(score)}


@pytest.mark.parametrize(
    ("reply", "exact", "named"),
    [
        ('{"name": "area", "arguments": {"base": 10.0, "unit": "C.M."}}', 1, 1),
        ('{"name": "area", "arguments": {"base": 10}} and more', 1, 1),
        ('{"name": "area", "arguments": {"unit": "cm"}}', 0, 1),  # an argument is missing
        ('{"name": "area", "arguments": {"base": 10, "height": 2}}', 0, 1),  # one is made up
        ('{"name": "area", "arguments": {"base": 11}}', 0, 1),
        ('{"name": "area", "arguments": {"base": true}}', 0, 1),
        ('{"name": "area", "arguments": {"base":', 0, 1),
        ('{"name": "volume", "arguments": {"base": 10}}', 0, 0),
        ("[1, 2]", 0, 0),
    ],
)
def test_a_call_is_right_by_name_and_every_argument(reply: str, exact: int, named: int) -> None:
    assert judging.call(reply, {"area": {"base": [10], "unit": ["cm", ""]}}) == {"exact": exact, "named": named}


@pytest.mark.parametrize("name", ["booleans", "brackets", "needles"])
def test_what_a_program_makes_is_judged_right_when_it_is(name: str) -> None:
    asked = list(SETS[name].asked(NO_WHEEL))
    questions = [question for one in asked for question in one.questions]
    assert len(questions) >= NUM_QUESTIONS
    judge, chance = SETS[name].judge, random.Random(0)
    assert all(judge(f" {question.right}", question.right)["exact"] == 1 for question in questions)
    wrong = [chance.choice(questions).right for _ in questions]
    pairs = [(said, question.right) for said, question in zip(wrong, questions, strict=True) if said != question.right]
    assert pairs and not any(judge(said, right)["exact"] for said, right in pairs)
    if name == "needles":
        assert all(f" is {question.right}.\n" in one.prefix for one in asked for question in one.questions)
    else:
        assert not any(f"\n{question.text}" in one.prefix for one in asked for question in one.questions)


def test_calls_are_of_the_wheel_and_their_own_examples_are_right(tmp_path: Path) -> None:
    numbers = range(96 + 260)
    calls = [{"id": f"{i}", "ground_truth": [{f"f{i}": {"x": [i], "y": ["", 1]}}]} for i in numbers]
    asked = [{"id": f"{i}", "question": [[{"content": f"do {i}"}]], "function": [{"name": f"f{i}"}]} for i in numbers]
    wheel = tmp_path / "bfcl.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        for name, items in (("", asked), ("possible_answer/", calls)):
            lines = "\n".join(map(json.dumps, items))
            file.writestr(f"bfcl_eval/data/{name}BFCL_v4_simple_python.json", lines)
    first, *others = SETS["calls"].asked(wheel)
    assert sum(len(one.questions) for one in (first, *others)) >= NUM_QUESTIONS
    assert '{"name": "f96"}' in first.prefix and first.questions[0].right == {"f96": {"x": [96], "y": ["", 1]}}
    solved = first.prefix.split("Call: ")[1].partition("\n")[0]
    assert judging.call(solved, {"f104": {"x": [104], "y": ["", 1]}})["exact"] == 1


def test_heads_that_agree_choose_for_all_and_others_fall_back() -> None:
    seen = np.random.default_rng(0).random((2, 3, 40))
    seen[0] = seen[0, 0]  # of the first layer all heads see the same
    votes = select_by_vote(seen, 4, 10)
    assert votes.choice.shape == (2, 4, 10) and votes.falls_back.tolist() == [False, True]
    assert set(votes.choice[0, 3]) == set(np.argsort(-seen[0, 0])[:10])
    assert votes.loaded_share(40) == pytest.approx((1 + 0.25 + 0.75 * 3 / 4 / 2) / 2)
    assert select_by_vote(seen, 4, 40).agreement.tolist() == [1, 1]
    assert Vote(votes.choice, np.array([MIN_AGREEMENT, 0.59])).falls_back.tolist() == [False, True]


def test_a_row_that_two_heads_want_comes_before_what_one_wants_more() -> None:
    seen = np.zeros((1, 3, 6))
    seen[0, 0, [0, 1]] = seen[0, 1, [1, 2]] = seen[0, 2, [3, 4]] = 0.1
    seen[0, 0, 0], seen[0, 2, 3] = 0.9, 0.5
    assert select_by_vote(seen, 1, 2).choice.tolist() == [[[0, 1]]]
    assert select_by_vote(seen, 1, 1).choice.tolist() == [[[0]]]


@pytest.fixture(scope="module")
def model(tiny_artifact: Path) -> Iterator[PrefixModel]:
    opened = PrefixModel(Artifact.open(tiny_artifact), num_regions=4)
    yield opened
    opened.close()


def test_replies_over_all_rows_in_any_order_are_those_of_the_prefix(model: PrefixModel) -> None:
    ids = np.random.default_rng(3).integers(0, 320, 150).tolist()
    prefix = Prefix(model, ids[:120])
    parts = Parts(model, prefix)
    shape = (model.layout.num_layers, model.layout.num_kv_heads, 1)
    whole = parts.write(2, np.tile(np.arange(120)[::-1], shape))
    some = np.tile(np.arange(40), shape)
    few = parts.write(3, some)
    asked = ids[120:]
    one, other, third = parts.greedy([parts.whole, whole, few], asked, 8, lambda reply: False)
    assert one == other and len(one) == 8
    assert one != third, "a third of the rows says the same; ask something else"
    steps = [prefix.exact([*asked, *one[:count]], 1).logits.argmax() for count in range(8)]
    assert one == steps
    assert third == [prefix.partial(some, [*asked, *third[:count]], 1).argmax() for count in range(8)]
    assert parts.greedy([parts.whole], asked, 8, lambda reply: len(reply) == 3) == [one[:3]]


def test_attention_of_voters_is_that_of_the_model(model: PrefixModel) -> None:
    ids = np.random.default_rng(4).integers(0, 320, 60).tolist()
    prefix = Prefix(model, ids[:50])
    mass = prefix.exact(ids[50:], 0).mass[:, 0]
    queries = model.all_queries(10)
    group = queries.shape[2] // model.layout.num_kv_heads
    seen = attention(queries[:, :, :group], prefix.rows.keys_of(0))
    for mine, theirs in zip(seen, mass, strict=True):  # the model's rows see their own, too
        assert np.corrcoef(mine, theirs)[0, 1] > 0.99


def test_a_ratio_knows_which_questions_are_the_same() -> None:
    full = np.array([1.0] * 60 + [0.0] * 140)
    assert interval(full, full) == (1.0, 1.0)
    low, high = interval(np.roll(full, 60), full)
    assert low < 0.9 < 1.1 < high
    assert interval(full, np.zeros(200)) == (0.0, 0.0)


def test_all_is_asked_once_and_judged(tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    class Counting(Asker):
        def replies(self, asked: Asked, ways: Any = WAYS, *, asks_whole: bool = True) -> Iterator[dict[str, Any]]:
            calls.append(asked)
            return super().replies(asked, ways, asks_whole=asks_whole)

    monkeypatch.setattr(answers, "Asker", Counting)
    text = " ".join(str(number * 7919) for number in range(50))
    asked = [Asked(text[i:], [Question("What?", "x"), Question("Who?", "y")]) for i in range(2)]
    few = QuestionSet(lambda wheel: iter(asked), judging.beginning, 3)
    artifact, kept = Artifact.open(tiny_artifact), tmp_path / "kept" / "few.jsonl"
    assert gather(kept, artifact, few, NO_WHEEL, seconds=0.0) is None
    assert gather(kept, artifact, few, NO_WHEEL, seconds=600.0) is not None
    rows = gather(kept, artifact, few, NO_WHEEL, seconds=0.0)
    assert rows is not None and len(rows) == 4 and len(calls) == 2
    first, second = kept.read_text("utf-8").splitlines()
    changed = [row | {"said": row["said"] | {name_of(OURS, 0.5): "?", FULL: "!"}} for row in json.loads(first)]
    kept.write_text(f"{json.dumps(changed)}\n{second}\n", "utf-8")
    ask_again(kept, artifact, few, NO_WHEEL)
    again = gather(kept, artifact, few, NO_WHEEL, seconds=0.0)
    assert again is not None and [row["said"].pop(FULL) for row in again[:2]] == ["!", "!"]
    assert again[2:] == rows[2:] and all(
        row["said"].items() <= old["said"].items() for row, old in zip(again, rows, strict=True)
    )
    assert all(row["said"].keys() == {FULL, *(name_of(*way) for way in WAYS)} for row in rows)
    ours = gather(kept.with_suffix(".ours"), artifact, few, NO_WHEEL, 600.0, ONLY_OURS)
    assert ours is not None and all(row["said"].keys() == {FULL, *(name_of(*way) for way in ONLY_OURS)} for row in ours)
    assert all(row["said"].items() <= old["said"].items() for row, old in zip(ours, rows, strict=True))
    for row in rows[:3]:
        row["right"] = row["said"][FULL] = "Paris"
        row["said"][name_of(OURS, 0.5)] = row["said"][name_of(OURS, 0.75)] = "Paris"
        row["said"][name_of(OURS, 0.25)] = "London"
    found = summary(rows, few)
    scores = {(row["way"], row["budget"]): row["exact"] for row in found}
    assert scores[FULL, 1.0] == scores[OURS, 0.5] == 0.75 and scores[OURS, 0.25] == 0
    result = verdict(rows, found, few)
    assert result["least"][OURS] == 0.5 and result["is_above_chance"]
    run = {"model": "tiny", "set": "needles", "chance": 0.0, "num_questions": 4, "rows": found, **result}
    origin = {"command": "c", "commit": "1", "date": "d", "machine": "m", "python": "3", "apache_tvm": "0"}
    run |= {"shortest_prefix": 1, "longest_prefix": 2, "origin": origin}
    [table] = [part for part in section({"runs": {"tiny": run}}) if part.startswith("|")]
    assert table.count("\n") == 5 and f"| {VOTING}, layers that fall back |" in table
    assert not any(part.startswith("Of commit") for part in section({"runs": {"tiny": run}}))


def test_other_ways_that_were_not_asked_again_say_their_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"way": way, "budget": 0.25} for way in (FULL, OURS, VOTING)]
    before = {"runs": {"tiny, nq": {"origin": {"commit": "abc"}, "rows": rows}}}
    monkeypatch.setattr(answers, "read_results", lambda name: before)
    assert list(published("tiny, nq")) == [{"way": VOTING, "budget": 0.25, "commit": "abc"}]
    before["runs"]["tiny, nq"] = {"origin": {"commit": "def"}, "rows": list(published("tiny, nq"))}
    assert [row["commit"] for row in published("tiny, nq")] == ["abc"], "and keep it"
    assert not list(published("tiny, calls"))
