"""Requests that measure drafts.

Knows requests, not how they are measured.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from radixlm.runtime import Completion, Engine, SamplingParams
from radixlm.runtime.chat.grammar import Grammar

ROOT = Path(__file__).resolve().parents[2]
CODE = "\n".join((ROOT / "runtime/cache/kv_transaction.py").read_text(encoding="utf-8").splitlines()[:120])
TEXT = (ROOT / "docs/cache.md").read_text(encoding="utf-8")[:6000]
SCHEMA = {
    "type": "object",
    "properties": {
        "files": {
            "type": "array",
            "minItems": 6,
            "maxItems": 6,
            "items": {
                "type": "object",
                "properties": {"path": {"type": "string", "maxLength": 40}, "num_lines": {"type": "integer"}},
                "required": ["path", "num_lines"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["files"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Task:
    """One kind of request."""

    name: str
    prompt: str
    max_tokens: int
    is_sampled: bool = False
    schema: str | None = None
    is_again: bool = False  # it is sent a second time, and that is measured


EDIT = f"```python\n{CODE}\n```\nRepeat the whole file; rename the class KVTransaction to KVStep. Only code."
STORY = "Tell a long story about a fox that wants to see the sea."
FILES = sorted((ROOT / "runtime/cache").glob("*.py"), key=lambda path: path.stat().st_size)[-8:]
TASKS = (
    Task("a file of 120 lines with one change", EDIT, 1500),
    Task("a reply once more, greedily", STORY, 300, is_again=True),
    Task("JSON by a schema", "List six files of a web server in Python.", 400, schema=json.dumps(SCHEMA)),
    Task("a summary that quotes", f"{TEXT}\n\nSummarize this in ten sentences, and quote those you rely on.", 400),
    Task("open text, greedily", STORY, 300),
    Task("open text, sampled", STORY, 300, is_sampled=True),
)
OPEN = TASKS[-2:]


def params_of(task: Task, number: int) -> SamplingParams:
    """Return how a task's tokens are sampled in a round."""
    temperature, seed = (0.8, number + 1) if task.is_sampled else (0.0, None)
    return SamplingParams(max_tokens=task.max_tokens, temperature=temperature, seed=seed)


def ask(engine: Engine, task: Task, number: int) -> Completion:
    """Return the reply to a task in a round, which has its own namespace."""
    params = params_of(task, number)
    constraint = None if task.schema is None else engine.grammars.compile(Grammar.json_schema(json.loads(task.schema)))
    messages = [{"role": "user", "content": task.prompt}]
    namespace = f"{task.name} {number}".encode()
    completion = engine.chat(messages, params, constraint=constraint, namespace=namespace)
    if task.is_again:
        completion = engine.chat(messages, params, namespace=namespace)
    return completion


def editing(num_lines: int) -> list[list[dict[str, Any]]]:
    """Make a conversation for each of eight files, of which the first lines are to be repeated with one change."""
    asked = "Repeat the whole file; the first line becomes # changed. Only code."
    texts = ["\n".join(path.read_text(encoding="utf-8").splitlines()[:num_lines]) for path in FILES]
    return [[{"role": "user", "content": f"```python\n{text}\n```\n{asked}"}] for text in texts]
