"""lm-evaluation-harness scores the served model by its URL alone, and gets what transformers gets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ..serve_process import ServeProcess
from .conftest import MODEL, run

TASKS = Path(__file__).resolve().parent / "tasks"
ROUNDING = 0.25  # nats a token: inputs are rounded to 8 bits; 0.1 is usual


@pytest.fixture(scope="module")
def scores() -> Any:
    return json.loads((TASKS / "scores.json").read_text(encoding="utf-8"))


def evaluate(
    server: ServeProcess, folder: Path, task: str, *, batch_size: int = 1, **model_args: object
) -> tuple[dict[str, float], list[Any]]:
    """The metrics of a task, and its documents with their answers."""
    told = {"model": MODEL, "base_url": f"{server.url}/v1/completions", **model_args}
    arguments = ",".join(f"{name}={value}" for name, value in told.items())
    command = ("run", "--model", "local-completions", "--model_args", arguments, "--tasks", task)
    options = ("--batch_size", batch_size, "--include_path", TASKS, "--output_path", folder / "out", "--log_samples")
    run(TASKS, "lm-eval", *command, *options, home=folder)
    [results] = (folder / "out").rglob("results_*.json")
    [samples] = (folder / "out").rglob("samples_*.jsonl")
    documents = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
    metrics = json.loads(results.read_text(encoding="utf-8"))["results"][task]
    return {name.partition(",")[0]: value for name, value in metrics.items() if isinstance(value, float)}, documents


@pytest.mark.parametrize("how", [{}, {"num_concurrent": 4}, {"batch_size": 8}], ids=lambda how: "".join(how) or "alone")
def test_choices_score_as_transformers_does(
    server: ServeProcess, tmp_path: Path, scores: Any, how: dict[str, int]
) -> None:
    metrics, documents = evaluate(server, tmp_path, "radixlm_facts", **how)
    documents.sort(key=lambda document: document["doc_id"])
    right = 0
    for document, expected in zip(documents, scores["facts"], strict=True):
        found = [float(answer[0][0]) for answer in document["resps"]]
        assert found == pytest.approx(expected, abs=4 * ROUNDING)
        right += expected.index(max(expected)) == document["doc"]["answer"]
    assert metrics["acc"] == pytest.approx(right / len(documents))


def test_passages_are_as_likely_as_transformers_says(server: ServeProcess, tmp_path: Path, scores: Any) -> None:
    metrics, documents = evaluate(server, tmp_path, "radixlm_passages")
    documents.sort(key=lambda document: document["doc_id"])
    found = [float(answer[0] if isinstance(answer, list) else answer) for [answer] in (d["resps"] for d in documents)]
    assert found == pytest.approx(scores["passages"], rel=0.01)
    num_words = sum(len(document["doc"]["text"].split()) for document in documents)
    assert metrics["word_perplexity"] == pytest.approx(2.718281828 ** (-sum(found) / num_words), rel=0.05)


def test_greedy_text_is_that_of_transformers(server: ServeProcess, tmp_path: Path) -> None:
    metrics, documents = evaluate(server, tmp_path, "radixlm_replies")
    assert [document["resps"][0][0] for document in documents] == [document["doc"]["reply"] for document in documents]
    assert metrics["exact_match"] == 1.0


def test_an_evaluation_that_was_run_before_gets_the_same_scores(server: ServeProcess, tmp_path: Path) -> None:
    """All of it is cached by now, and computed again."""
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    first, second = (evaluate(server, tmp_path / name, "radixlm_facts") for name in ("1", "2"))
    assert first[0] == second[0]
    assert [document["resps"] for document in first[1]] == [document["resps"] for document in second[1]]
