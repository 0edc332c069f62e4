"""What guessing brings: tokens a second of the same replies with and without, in turns, and whether a byte changed.

    python -m bench.engine.speculation ARTIFACT [--rounds 5]

Two engines of this process, one that guesses and one that does not, answer the same requests one after the other. Each
round has a namespace of its own, so that the cache knows no reply but the one that is asked for again.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from radixlm.runtime import Completion, Engine, SamplingParams
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.chat.grammar import Grammar

from ..options import read_options
from ..report.page import publish

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
    is_again: bool = False  # it is asked for a second time, and that is measured


EDIT = f"```python\n{CODE}\n```\nRepeat the whole file; rename the class KVTransaction to KVStep. Only code."
STORY = "Tell a long story about a fox that wants to see the sea."
TASKS = (
    Task("a file of 120 lines with one change", EDIT, 1500),
    Task("a reply once more, greedily", STORY, 300, is_again=True),
    Task("JSON by a schema", "List six files of a web server in Python.", 400, schema=json.dumps(SCHEMA)),
    Task("a summary that quotes", f"{TEXT}\n\nSummarize this in ten sentences, and quote those you rely on.", 400),
    Task("open text, greedily", STORY, 300),
    Task("open text, sampled", STORY, 300, is_sampled=True),
)


def main() -> None:
    """Measure, print, write `results/speculation.json`."""
    options = read_options(__doc__, "artifact", rounds=5)
    artifact = Artifact.open(options.artifact)
    runs: dict[str, list[dict[str, object]]] = defaultdict(list)
    with Engine(artifact, speculate="off", idle_work=False) as plain, Engine(artifact, idle_work=False) as guesses:
        for number in range(-1, options.rounds):  # the first round warms up and is not counted
            for task in TASKS:
                order = (plain, guesses) if number % 2 else (guesses, plain)
                replies = {engine is guesses: ask(engine, task, number) for engine in order}
                before, after = replies[False], replies[True]
                assert after.token_ids == before.token_ids, f"guesses changed {task.name}"
                if number >= 0:
                    runs[task.name].append(
                        {
                            "plain_per_s": before.timings.decode_tokens_per_s,
                            "guesses_per_s": after.timings.decode_tokens_per_s,
                            "num_tokens": len(after.token_ids),
                            "drafted": after.usage.drafted_tokens,
                            "accepted": after.usage.accepted_tokens,
                        }
                    )
    publish("speculation", {"model": artifact.manifest.name, "tasks": runs}, artifact.manifest.name)


def ask(engine: Engine, task: Task, number: int) -> Completion:
    """The reply to a task in a round."""
    temperature, seed = (0.8, number + 1) if task.is_sampled else (0.0, None)
    params = SamplingParams(max_tokens=task.max_tokens, temperature=temperature, seed=seed)
    constraint = None if task.schema is None else engine.grammars.compile(Grammar.json_schema(json.loads(task.schema)))
    messages = [{"role": "user", "content": task.prompt}]
    namespace = f"{task.name} {number}".encode()
    completion = engine.chat(messages, params, constraint=constraint, namespace=namespace)
    if task.is_again:
        completion = engine.chat(messages, params, namespace=namespace)
    return completion


if __name__ == "__main__":
    main()
