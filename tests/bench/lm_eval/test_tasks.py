"""Tasks for lm-evaluation-harness: documents that it can ask, and judges that it can import."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from bench.lm_eval import tasks
from bench.lm_eval.tasks import METRICS, write_tasks
from bench.partial.judged.questions import SETS


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    data = tmp_path / "data" / "prompts"
    data.mkdir(parents=True)
    speeches = "".join(f"\n\nFirst Citizen:\n{'Speak, speak. ' * 12}{number}" for number in range(100))
    (data / "tinyshakespeare.txt").write_text(speeches, encoding="utf-8")
    monkeypatch.setenv("RADIXLM_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(tasks, "METRICS", {"text": METRICS["text"], "booleans": METRICS["booleans"]})
    write_tasks(tmp_path, 5)
    return tmp_path


def documents(folder: Path, task: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{task}.jsonl").read_text(encoding="utf-8").splitlines()]


def test_passages_begin_with_a_speech_and_share_nothing(written: Path) -> None:
    passages = [document["text"] for document in documents(written, "text")]
    assert len(passages) == 5 and len(set(passages)) == 5
    assert all(passage.startswith("First Citizen:") for passage in passages)


def test_a_question_stands_behind_solved_ones_and_its_judge_knows_what_is_right(written: Path) -> None:
    spec = importlib.util.spec_from_file_location("judge", written / "judge.py")
    assert spec is not None and spec.loader is not None
    judge = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(judge)
    first = documents(written, "booleans")[0]
    assert first["text"].count(" is ") >= 48 and first["text"].endswith(" is")
    right = json.loads(first["right"])
    assert judge.booleans(first, [f" {right}\n"]) == {"exact": 1.0}
    assert judge.booleans(first, [f" {right != 'True'}"]) == {"exact": 0.0}


def test_the_harness_is_told_each_metric_and_how_long_a_reply_may_be(written: Path) -> None:
    told = (written / "booleans.yaml").read_text(encoding="utf-8")
    assert "!function judge.booleans" in told and "metric: exact," in told
    assert f"max_gen_toks: {SETS['booleans'].max_tokens}," in told
    assert 'doc_to_text: "{{text}}"' in told


def test_what_teaches_a_store_is_not_what_is_scored(written: Path) -> None:
    """A prefix on disk reached to the end of each question that was asked again, so that no part of it was read."""
    taught, scored = documents(written, "taught_booleans"), documents(written, "booleans")
    assert not {document["text"] for document in taught} & {document["text"] for document in scored}
    assert {document["prefix"] for document in taught} == {document["prefix"] for document in scored} == {0}
    solved = scored[0]["text"].rpartition("\n")[0]
    assert all(document["text"].startswith(solved) for document in [*taught, *scored])
    assert "!function judge.booleans" in (written / "taught_booleans.yaml").read_text(encoding="utf-8")
