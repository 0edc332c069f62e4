"""Write tasks of lm-evaluation-harness into a folder: the likelihood of texts, and questions after a prefix.

One half of the questions after a prefix is scored; from the other half a store learns which rows of it matter: a prefix
on disk must end before the question that is scored. The texts are those of the folder of real inputs (`RADIXLM_DATA`);
a program makes `booleans`. Knows the harness's files, no model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from ..data import data_dir
from ..partial.judged.questions import SETS

METRICS = {"text": ("word_perplexity",), "booleans": ("exact",), "nq": ("exact", "f1")}
"""The metrics of each scored task."""
ASKED = ("booleans", "nq")
"""Tasks whose prompts share a prefix with others."""
TAUGHT = tuple(f"taught_{task}" for task in ASKED)
"""Tasks of the same prefixes, with other questions."""
_PASSAGE = 1200  # characters
_TASK = """\
task: {task}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {task}.jsonl}}}}
test_split: test
"""
_TEXT = """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}]
"""
_QUESTIONS = """\
output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{right}}}}"
process_results: !function judge.{judge}
generation_kwargs: {{until: ["\\n"], max_gen_toks: {max_tokens}, temperature: 0}}
metric_list: [{metrics}]
"""
_METRIC = "{{metric: {name}, aggregation: mean, higher_is_better: true}}"
# The harness runs where radixlm is not installed, and finds the judges by PYTHONPATH.
_JUDGE = """\
import json

from bench.partial.judged import judging


def booleans(doc, results):
    return judging.beginning(results[0], json.loads(doc["right"]))


def nq(doc, results):
    return judging.words(results[0], json.loads(doc["right"]))
"""


def write_tasks(folder: Path, most: int) -> None:
    """Write the harness's files of all tasks, with at most `most` documents in each scored task.

    Tasks `taught_*`, from which a store learns, have all other questions about the prefixes that are scored.
    """
    (folder / "judge.py").write_text(_JUDGE, encoding="utf-8")
    for task in METRICS:
        if task == "text":
            _write_task(folder, task, _TEXT, islice(_passages(), most))
            continue
        scored = list(islice(_questions(task, half=1), most))
        prefixes = {document["prefix"] for document in scored}
        taught = (document for document in _questions(task, half=0) if document["prefix"] in prefixes)
        _write_task(folder, task, _asked(task), scored)
        _write_task(folder, f"taught_{task}", _asked(task), taught)


def _write_task(folder: Path, task: str, asked: str, documents: Iterable[Any]) -> None:
    """Write a task's documents, and the file that describes the task."""
    lines = "".join(json.dumps(document) + "\n" for document in documents)
    (folder / f"{task}.jsonl").write_text(lines, encoding="utf-8")
    (folder / f"{task}.yaml").write_text(_TASK.format(task=task) + asked, encoding="utf-8")


def _asked(task: str) -> str:
    named = ", ".join(_METRIC.format(name=name) for name in METRICS[task])
    return _QUESTIONS.format(judge=task, metrics=named, max_tokens=SETS[task].max_tokens)


def _passages() -> Iterator[dict[str, Any]]:
    """Yield passages of tinyshakespeare, from its middle on, each from the beginning of a speech."""
    text = (data_dir() / "prompts" / "tinyshakespeare.txt").read_text(encoding="utf-8")
    at = len(text) // 2
    while (at := text.find("\n\n", at)) >= 0 and at + _PASSAGE < len(text):
        yield {"text": text[at + 2 : at + _PASSAGE]}
        at += _PASSAGE


def _questions(task: str, half: int) -> Iterator[dict[str, Any]]:
    """Yield every second question of each prefix as a document: the even ones (half 0) or the odd ones (half 1)."""
    for number, asked in enumerate(SETS[task].asked(Path())):
        for question in asked.questions[half::2]:
            yield {"prefix": number, "text": asked.prefix + question.text, "right": json.dumps(question.right)}
