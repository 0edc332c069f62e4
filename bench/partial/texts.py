"""Make prefixes that many queries share, with the true continuation of each query.

`text` and `needle` use text.txt, a former bench/LOG.md. `nq` (passages with questions), `tools` (schemas of functions
with requests) and `bbh` (few-shot prompts) use the folder of real inputs (`RADIXLM_DATA`). Knows texts and token ids,
no model.
"""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ..data import data_dir

MAX_CONTINUATION = 48  # tokens
PROSE = Path(__file__).resolve().parent / "text.txt"
_PREFIX, _QUERY, _QUERIES = 900, 16, 6  # tokens, tokens, count


@dataclass(frozen=True)
class Query:
    """Token ids of a query, and of its true continuation."""

    ids: list[int]
    continuation: list[int]


@dataclass(frozen=True)
class Case:
    """A prefix and its queries. With a depth, the first query alone counts: it asks for a fact at that share of the
    prefix, and no other query asks for it."""

    prefix: list[int]
    queries: list[Query]
    depth: float | None = None

    @property
    def num_counted(self) -> int:
        """The number of queries that are measured; the others are history."""
        return len(self.queries) if self.depth is None else 1


class Texts:
    """Cases of one tokenizer, whose model's chats are ChatML."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def cases(self, workload: str) -> Iterator[Case]:
        """Yield the cases of one of `WORKLOADS`."""
        return WORKLOADS[workload](self)

    def text(self) -> Iterator[Case]:
        """Yield parts of a text as prefixes, and later parts as queries, as if they followed."""
        for start in range(4):
            prefix, queries = self._stretch(start)
            yield Case(prefix, queries)

    def needle(self) -> Iterator[Case]:
        """Yield prefixes of text with a fact in it, at several depths.

        The first query asks for the fact; the others are later parts of the text.
        """
        placed = [(fact, depth) for i, fact in enumerate(FACTS) for depth in DEPTHS[i % 2 :: 2]]
        return self._needles(placed, range(4))

    def calibration(self) -> Iterator[Case]:
        """Yield other facts in other parts: those on which the probe's head and its window were chosen."""
        return self._needles(list(itertools.product(CALIBRATION_FACTS, CALIBRATION_DEPTHS)), range(4, 6))

    def nq(self) -> Iterator[Case]:
        """Yield seven passages and a question about each."""
        return self._passages(0, 140)

    def nq_calibration(self) -> Iterator[Case]:
        """Yield other passages, on which a policy's settings are chosen."""
        return self._passages(140, 280)

    def tools(self) -> Iterator[Case]:
        """Yield cases of eight function definitions as a prefix, and a request for each function."""
        path = data_dir() / "prompts" / "bfcl" / "BFCL_v4_simple_python.json"
        items = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[:96]]
        for some in batched(items, 8):
            schemas = [json.dumps(item["function"][0]) for item in some]
            asked = [
                (item["question"][0][0]["content"], f'{{"name": "{item["function"][0]["name"]}", "arguments": {{"')
                for item in some
            ]
            yield self._chat("Call one of these functions.\n\n" + "\n".join(schemas), asked)

    def bbh(self) -> Iterator[Case]:
        """Yield two examples of each of three tasks, and the third one of each; every example is the third once."""
        paths = sorted((data_dir() / "prompts" / "bbh_cot").glob("*.txt"))
        for some, held_out in itertools.product(batched(paths[:12], 3), range(3)):
            prefix, queries = "", []
            for path in some:
                task, *examples = path.read_text(encoding="utf-8").partition("-----\n")[2].split("\n\nQ: ")
                question, step, answer = examples.pop(held_out).partition("A: Let's think step by step.\n")
                prefix += "\n\nQ: ".join([task, *examples]) + "\n\n"
                queries.append(self._query(f"{task}\n\nQ: {question}{step}", answer))
            yield Case(self._ids(prefix), queries)

    def _passages(self, start: int, stop: int) -> Iterator[Case]:
        """Yield cases of seven passages of NQ-open each, from items `start` to `stop`, with their questions."""
        with gzip.open(data_dir() / "prompts" / "nq-open-oracle.jsonl.gz", "rt", encoding="utf-8") as file:
            items = [json.loads(line) for line in itertools.islice(file, start, stop)]
        for some in batched(items, 7):
            texts = [f"{item['ctxs'][0]['title']}\n{item['ctxs'][0]['text']}" for item in some]
            asked = [(item["question"].capitalize() + "?", item["answers"][0]) for item in some]
            yield self._chat("Answer from these passages.\n\n" + "\n\n".join(texts), asked)

    def _needles(self, placed: Sequence[tuple[tuple[str, str], float]], stretches: Sequence[int]) -> Iterator[Case]:
        """Yield cases with a fact at a depth of a stretch of prose; the first query asks for it."""
        for number, ((thing, answer), depth) in enumerate(placed):
            prefix, queries = self._stretch(stretches[number % len(stretches)])
            line = int(depth * len(prefix))
            fact = self._ids(f"\n\nThe {thing} is {answer}.\n\n")
            question = f"\n\nQuestion: What is the {thing}?\nAnswer: The {thing} is"
            asked = Query(self._ids(question), self._ids(f" {answer}"))
            whole = [*prefix[:line], *fact, *prefix[line:]]
            yield Case(whole, [asked, *queries], depth)

    def _stretch(self, start: int) -> tuple[list[int], list[Query]]:
        """Return a stretch of prose as a prefix, and the text after it cut into queries with continuations."""
        ids = self._ids(PROSE.read_text(encoding="utf-8"))
        size = _PREFIX + _QUERIES * (_QUERY + MAX_CONTINUATION)
        ids = ids[start * size : (start + 1) * size]
        later = batched(ids[_PREFIX:], _QUERY + MAX_CONTINUATION)
        return ids[:_PREFIX], [Query(list(part[:_QUERY]), list(part[_QUERY:])) for part in later]

    def _chat(self, system: str, asked: Sequence[tuple[str, str]]) -> Case:
        """Return a case with a system prompt as the prefix, and questions with their answers as queries."""
        queries = [
            self._query(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n", reply)
            for question, reply in asked
        ]
        return Case(self._ids(f"<|im_start|>system\n{system}<|im_end|>\n"), queries)

    def _query(self, text: str, continuation: str) -> Query:
        """Tokenize a query and its continuation, which is cut to `MAX_CONTINUATION` tokens."""
        return Query(self._ids(text), self._ids(continuation)[:MAX_CONTINUATION])

    def _ids(self, text: str) -> list[int]:
        """Tokenize a text without special tokens."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


def batched(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    """Return consecutive groups of `size` items; a smaller rest is dropped."""
    return [items[start : start + size] for start in range(0, len(items) - size + 1, size)]


FACTS = (
    ("password of the north gate", "silver marigold"),
    ("name of the watchman's dog", "Barnaby"),
    ("capital of Zandoria", "Merovale"),
    ("favourite food of the lighthouse keeper", "baked turnips"),
    ("secret ingredient of the soup", "black cardamom"),
    ("colour of the third door", "turquoise"),
    ("best time to visit the old harbour", "the second week of October"),
    ("reason for the delay", "a flooded tunnel"),
)
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
CALIBRATION_FACTS = (
    ("motto of the old library", "quiet hands"),
    ("owner of the red bicycle", "Matilda Crane"),
    ("name of the ship", "Wandering Star"),
    ("price of the painting", "ninety crowns"),
)
CALIBRATION_DEPTHS = (0.2, 0.45, 0.75)
WORKLOADS: dict[str, Callable[[Texts], Iterator[Case]]] = {
    "text": Texts.text,
    "needle": Texts.needle,
    "calibration": Texts.calibration,
    "nq": Texts.nq,
    "nq_calibration": Texts.nq_calibration,
    "tools": Texts.tools,
    "bbh": Texts.bbh,
}
