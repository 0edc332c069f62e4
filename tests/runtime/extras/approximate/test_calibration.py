"""A budget needs a calibration of this very artifact; what is wrong with one is told, and it is never used."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from radixlm.cli.calibrate import calibration_rows
from radixlm.cli.main import cli
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.artifact.manifest import Manifest
from radixlm.runtime.engine.engine import Engine
from radixlm.runtime.errors import InvalidParameter
from radixlm.runtime.extras.approximate.calibration import calibrate as calibrating
from radixlm.runtime.extras.approximate.calibration import measured_prefix
from radixlm.runtime.extras.approximate.calibration.calibrate import NUM_FINALISTS, calibrate, pages_needed
from radixlm.runtime.extras.approximate.calibration.calibration import NAME, BudgetLoss, Calibration
from radixlm.runtime.extras.approximate.calibration.measured_prefix import FACTS, Case, Question, cases, shipped_text
from radixlm.runtime.model.model_runner import ModelRunner
from radixlm.tokenizer_fix import Tokenizer


@pytest.fixture
def artifact(tiny_artifact: Path, tmp_path: Path) -> Artifact:
    """A copy whose calibration may be changed."""
    return Artifact.open(shutil.copytree(tiny_artifact, tmp_path / "tiny.radixlm"))


def measured(manifest: Manifest) -> Calibration:
    return Calibration(1, manifest.digest, 0, 0.125, 0.25, 9, {"0": 0.5}, [BudgetLoss(0.25, 0.5, 9, 0.1)])


def test_what_was_written_is_read(artifact: Artifact) -> None:
    one = measured(artifact.manifest)
    path = one.write(artifact.path)
    again = Calibration.read(artifact.path, artifact.manifest)
    assert msgspec.structs.replace(again, digest=one.digest) == one and again.digest != one.digest
    assert path.name == NAME and not list(artifact.path.glob("*.new"))
    Artifact.open(artifact.path).verify()  # it is none of the manifest's files


def changed(field: str, value: object) -> Callable[[Calibration], Calibration]:
    return lambda one: msgspec.structs.replace(one, **{field: value})


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (changed("artifact", "1" * 64), "is of the artifact 1111"),
        (changed("version", 2), "has version 2, this radixlm reads 1"),
        (changed("probe_head", 1), "names KV head 1, the model has 1"),
        (changed("probe_head", -1), "names KV head -1"),
        (changed("max_dropped_attention", 0.0), "allows 0.0 of the attention"),
        (changed("max_dropped_attention", 1.5), "allows 1.5 of the attention"),
        (changed("least_budget", -0.5), "asks for at least -0.5 of the rows"),
        (changed("least_budget", 25.0), "asks for at least 25.0 of the rows"),
        (changed("losses", [1]), "is not valid"),
    ],
)
def test_what_is_not_of_this_artifact_is_refused(
    artifact: Artifact, change: Callable[[Calibration], Calibration], why: str
) -> None:
    change(measured(artifact.manifest)).write(artifact.path)
    with pytest.raises(InvalidParameter, match=why) as told:
        Calibration.read(artifact.path, artifact.manifest)
    assert f"radixlm calibrate {artifact.path}" in str(told.value) and told.value.param == "kv_budget"


def test_no_changed_byte_is_read(artifact: Artifact) -> None:
    path = measured(artifact.manifest).write(artifact.path)
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(InvalidParameter, match="radixlm calibrate"):
            Calibration.read(artifact.path, artifact.manifest)
        path.write_bytes(whole[:at])
        with pytest.raises(InvalidParameter, match="radixlm calibrate"):
            Calibration.read(artifact.path, artifact.manifest)
    path.write_bytes(b" " * (2 << 20))
    with pytest.raises(InvalidParameter, match="has more than"):
        Calibration.read(artifact.path, artifact.manifest)


def test_without_a_calibration_a_budget_is_refused_and_nothing_else_is(artifact: Artifact, tmp_path: Path) -> None:
    (artifact.path / NAME).unlink()
    options: dict[str, Any] = {"kv_cache_bytes": 1 << 20, "store": tmp_path / "store", "store_bytes": 1 << 20}
    for budget in (0.5, 1.0):  # with 1 each request may ask for less
        with pytest.raises(InvalidParameter, match="is not there; run: radixlm calibrate"):
            Engine(artifact.path, **options, kv_budget=budget)
    assert not (tmp_path / "store").exists()
    Engine(artifact.path, **options).close()
    calibration = Calibration.of(artifact.manifest, probe_head=0, max_dropped_attention=0.25)
    calibration.write(artifact.path)
    with Engine(artifact.path, **options, kv_budget=0.5) as engine:
        tier: Any = engine._core.tier
        assert tier.extra.observer.probe_head == 0 and tier.extra.sources.max_dropped_attention == 0.25


def test_the_command_measures_a_model_and_inspect_tells(artifact: Artifact) -> None:
    (artifact.path / NAME).unlink()
    assert "radixlm calibrate" in CliRunner().invoke(cli, ["inspect", str(artifact.path)]).output
    done = CliRunner().invoke(cli, ["calibrate", str(artifact.path), "--json"])
    assert done.exit_code == 0, done.output
    found = Calibration.read(artifact.path, artifact.manifest)
    assert json.loads(done.stdout) == msgspec.to_builtins(msgspec.structs.replace(found, digest="0" * 64))
    assert list(found.head_kl) == ["0"] and found.probe_head == 0
    assert [loss.budget for loss in found.losses] == [0.05, 0.1, 0.25, 0.5]
    assert f"probe head {found.probe_head}" in CliRunner().invoke(cli, ["inspect", str(artifact.path)]).output


def test_a_text_may_be_given_and_what_was_measured_is_printed(
    artifact: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[str] = []

    def few(text: str, *args: Any, **options: Any) -> list[Case]:
        given.append(text)
        return cases(text, *args, **options)[:1]

    monkeypatch.setattr(measured_prefix, "cases", few)
    (text := tmp_path / "long.txt").write_text(" ".join(f"the {number}th leaf" for number in range(3000)))
    done = CliRunner().invoke(cli, ["calibrate", str(artifact.path), "--text", str(text)])
    assert done.exit_code == 0 and given == [text.read_text()], done.output
    found = Calibration.read(artifact.path, artifact.manifest)
    for name, value in calibration_rows(found):
        assert f"{name} " in done.output and f" {value}\n" in done.output
    assert str(artifact.path / NAME) in done.output


def test_the_table_says_what_may_be_left_out(artifact: Artifact) -> None:
    one = measured(artifact.manifest)
    assert calibration_rows(one) == [
        ("probe head", "0 (KL in nats a token at a quarter of the rows: head 0 0.500)"),
        ("dropped attention", "at most 0.125; above that, all rows are loaded"),
        ("  25% of the rows", "KL 0.500, 9 of 9 facts found"),
        ("least budget", "0.25, among the tested shares"),
    ]
    none = calibration_rows(msgspec.structs.replace(one, least_budget=1.0, head_kl={}))
    assert "not measured" in none[0][1] and "do not use --kv-budget" in none[-1][1]


def test_a_text_that_is_too_short_is_refused(artifact: Artifact, tmp_path: Path) -> None:
    (text := tmp_path / "short.txt").write_text("he in the tree")
    done = CliRunner().invoke(cli, ["calibrate", str(artifact.path), "--text", str(text)])
    assert done.exit_code == 2 and "give a longer one" in done.output
    with pytest.raises(InvalidParameter, match="too short to calibrate in"):
        cases("", lambda text: [], first_ids=[], context_length=200)


def test_facts_lie_in_their_prefixes_once_and_are_asked_for_once() -> None:
    asked = cases(shipped_text(), lambda text: list(text.encode()), first_ids=[300], context_length=4096)
    assert len(asked) == 12 and all(case.prefix[0] == 300 for case in asked)
    for number, case in enumerate(asked):
        thing, answer = FACTS[number // 3]
        prefix = bytes(case.prefix[1:])
        assert prefix.count(f"The {thing} is {answer}.".encode()) == 1
        assert bytes(case.questions[0].ids).endswith(f"The {thing} is".encode())
        assert bytes(case.questions[0].continuation) == f" {answer}".encode()
        assert not any(answer.encode() in bytes(question.ids) for question in case.questions[1:])


@dataclass
class FakeAsked:
    """Loses the more, the farther a head is from the seventh."""

    asked: list[int]

    def loss(self, budget: float, head: int, dims: object) -> SimpleNamespace:
        self.asked.append(head)
        return SimpleNamespace(kl=abs(head - 7))


def test_of_many_heads_the_worst_are_dropped_early(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def fakes(model: object, case: object) -> Iterator[FakeAsked]:
        yield FakeAsked(asked)

    monkeypatch.setattr(calibrating, "questions_of", fakes)
    model: Any = SimpleNamespace(layout=SimpleNamespace(num_kv_heads=32))
    none = [Case([], [Question([], [])])] * 12
    found = calibrating._compare_heads(model, none, np.zeros((1, 0), int), lambda done: None)
    assert min(found, key=lambda head: found[head]) == 7 and len(found) == NUM_FINALISTS
    assert len(asked) == 32 + 16 + 8 + 9 * NUM_FINALISTS


def test_smollm2_looks_with_its_last_head(smollm2_artifact: Path) -> None:
    artifact = Artifact.open(smollm2_artifact)
    tokenizer = Tokenizer(artifact.tokenizer_json)
    some = cases(shipped_text(), tokenizer.encode_inside, first_ids=[], context_length=2048)[::3]
    with closing(ModelRunner(artifact, num_pages=pages_needed(some), keep_scores=True)) as runner:
        found = calibrate(artifact, runner, some)
    assert found.probe_head == 2 and sorted(found.head_kl) == ["0", "1", "2"]
    assert 2 * found.head_kl["2"] < min(found.head_kl["0"], found.head_kl["1"])
    kl = [loss.kl for loss in found.losses]
    assert kl == sorted(kl, reverse=True) and np.isfinite(kl).all(), "more rows lose less"
    estimates = [loss.dropped for loss in found.losses]
    assert estimates == sorted(estimates, reverse=True)
