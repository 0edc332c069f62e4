"""Make questions whose answers can be judged, many after one prefix: at least 200 of each set.

`nq` asks about passages of NQ-open, of the folder of real inputs (`RADIXLM_DATA`), none of them among those that a
policy's settings were chosen on. `calls` are BFCL's simple calls with BFCL's answers, read from the wheel of
`bfcl-eval` without installing it. A program makes `needles`, `booleans` and `brackets`; the last two are tasks of BBH,
with as many solved ones before them as make a prefix. Knows texts, no tokens or models.
"""

from __future__ import annotations

import gzip
import itertools
import json
import random
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...data import data_dir
from ..texts import PROSE, batched
from . import judging

Judge = Callable[[str, Any], judging.Scores]
NUM_QUESTIONS = 200  # at least


@dataclass(frozen=True)
class Question:
    """A question after a prefix, and the right answer, as the set's judge expects it. A reply is one line."""

    text: str
    right: Any


@dataclass(frozen=True)
class Asked:
    """A prefix and the questions after it, in their order."""

    prefix: str
    questions: Sequence[Question]


@dataclass(frozen=True)
class QuestionSet:
    """Functions that make questions and judge replies, the length limit of replies, and the score of a guess."""

    asked: Callable[[Path], Iterator[Asked]]  # of the wheel of bfcl-eval
    judge: Judge
    max_tokens: int
    chance: float = 0.0


def _nq(wheel: Path) -> Iterator[Asked]:
    """Yield four passages of Natural Questions and a question about each, after two solved examples."""
    with gzip.open(data_dir() / "prompts" / "nq-open-oracle.jsonl.gz", "rt", encoding="utf-8") as file:
        items = [json.loads(line) for line in itertools.islice(file, 280, 280 + 6 * NUM_QUESTIONS // 4)]
    for some in batched(items, 6):
        passages = [f"{item['ctxs'][0]['title']}\n{item['ctxs'][0]['text']}\n\n" for item in some]
        asked = [f"Question: {item['question'].capitalize()}?\nAnswer:" for item in some]
        solved = [f"{passages[i]}{asked[i]} {some[i]['answers'][0]}\n\n" for i in (4, 5)]
        prefix = "Answer each question with a few words from the passages.\n\n" + "".join([*solved, *passages[:4]])
        questions = [Question(text, item["answers"]) for text, item in zip(asked[:4], some, strict=False)]
        yield Asked(prefix, questions)


def _calls(wheel: Path) -> Iterator[Asked]:
    """Yield eight functions and a request for each, after two calls of two more functions."""
    with zipfile.ZipFile(wheel) as file:
        items, answers = (
            [json.loads(line) for line in file.read(f"bfcl_eval/data/{name}").decode().splitlines()]
            for name in ("BFCL_v4_simple_python.json", "possible_answer/BFCL_v4_simple_python.json")
        )
    rights = {answer["id"]: answer["ground_truth"][0] for answer in answers}
    for some in batched(items[96 : 96 + 260], 10):
        schemas = [json.dumps(item["function"][0]) for item in some]
        asked = [f"Request: {item['question'][0][0]['content']}\nCall:" for item in some]
        solved = [f"{text} {_call(rights[item['id']])}\n\n" for text, item in zip(asked[8:], some[8:], strict=True)]
        prefix = "For each request call one of these functions.\n\n" + "\n".join(schemas) + "\n\n" + "".join(solved)
        yield Asked(prefix, [Question(text, rights[item["id"]]) for text, item in zip(asked[:8], some, strict=False)])


def _call(right: Mapping[str, Mapping[str, Sequence[Any]]]) -> str:
    [(name, arguments)] = right.items()
    return json.dumps({"name": name, "arguments": {key: values[0] for key, values in arguments.items() if values[0]}})


def _needles(wheel: Path) -> Iterator[Asked]:
    """Yield ten facts at even distances in a text, and a question about each."""
    chance, lines = random.Random(1), [line for line in PROSE.read_text("utf-8").split("\n\n") if line.strip()]
    things = [f"{kind} of {town}" for kind in _KINDS for town in _TOWNS]
    answers = [f"{adjective} {noun}" for adjective in _ADJECTIVES for noun in _NOUNS]
    chance.shuffle(things)
    chance.shuffle(answers)
    facts = list(zip(things, answers, strict=False))
    for number, some in enumerate(batched(facts[:NUM_QUESTIONS], 10)):
        start = number * 3 % (len(lines) // 2)
        text = "\n\n".join([*lines[start:], *lines[:start]])[:3200]
        parts = [text[i * 320 : (i + 1) * 320] for i in range(10)]
        prefix = "".join(
            f"{part}\n\nThe {thing} is {answer}.\n\n" for part, (thing, answer) in zip(parts, some, strict=True)
        )
        asked = list(some)
        chance.shuffle(asked)
        yield Asked(
            prefix,
            [
                Question(f"\n\nQuestion: What is the {thing}?\nAnswer: The {thing} is", answer)
                for thing, answer in asked
            ],
        )


def _booleans(wheel: Path) -> Iterator[Asked]:
    """Yield Boolean expressions of BBH's kind, after 48 with their values."""
    return _generate_questions(
        random.Random(2), _boolean, 48, "Evaluate the result of a random Boolean expression.\n\n"
    )


def _brackets(wheel: Path) -> Iterator[Asked]:
    """Yield brackets to be closed, after 40 that are."""
    return _generate_questions(random.Random(3), _dyck, 40, "Close all brackets, the last one first.\n\n")


def _generate_questions(
    chance: random.Random, make: Callable[[random.Random], tuple[str, str]], num_solved: int, task: str
) -> Iterator[Asked]:
    """Yield sets of 25 random questions, after a task's text and `num_solved` other questions with answers.

    Args:
        make: makes a question and its answer.
    """
    for _ in range(NUM_QUESTIONS // 25):
        cases = dict(make(chance) for _ in range(1000))  # each text once
        some = [(text, right) for text, right in itertools.islice(cases.items(), num_solved + 25)]
        solved = "".join(f"{text} {right}\n" for text, right in some[25:])
        yield Asked(task + solved, [Question(text, right) for text, right in some[:25]])


def _boolean(chance: random.Random) -> tuple[str, str]:
    text = _expression(chance, chance.choice((2, 3, 4)))
    return f"{text} is", str(bool(eval(text, {"__builtins__": {}})))


def _expression(chance: random.Random, num_values: int) -> str:
    """Return a random boolean expression of this many values, such as `not True and ( False or True )`."""
    if num_values == 1:
        return "not " * chance.choice((0, 0, 1)) + chance.choice(("True", "False"))
    left = chance.randrange(1, num_values)
    parts = (_expression(chance, left), chance.choice(("and", "or")), _expression(chance, num_values - left))
    text = " ".join(parts)
    return f"not ( {text} )" if chance.random() < 0.25 else f"( {text} )" if chance.random() < 0.25 else text


def _dyck(chance: random.Random) -> tuple[str, str]:
    """Return a text of open brackets to be closed, and the brackets that close them (Dyck language)."""
    pairs, text, still_open = {"(": ")", "[": "]", "{": "}", "<": ">"}, list[str](), list[str]()
    for _ in range(chance.choice((3, 4, 5, 6, 7))):
        if still_open and chance.random() < 0.35:
            text.append(pairs[still_open.pop()])
        else:
            still_open.append(chance.choice(list(pairs)))
            text.append(still_open[-1])
    if not still_open:
        still_open.append("(")
        text.append("(")
    return f"Open: {' '.join(text)} Close:", " ".join(pairs[one] for one in reversed(still_open))


_KINDS = ("password", "flag", "motto", "anthem", "guest house", "patron", "festival", "main export", "mascot", "relic")
_TOWNS = (
    *("Merovale", "Zandoria", "Hillbrook", "Ostwick", "Calder", "Fenmoor", "Tarnby", "Quillon", "Redmarsh", "Ulverton"),
    *("Brassford", "Nethercott", "Varnholm", "Pellworth", "Inglemere", "Drossel", "Yarrowby", "Kestrelton"),
    *("Lowenfeld", "Sandhurst"),
)
_ADJECTIVES = (
    *("silver", "quiet", "crimson", "hollow", "northern", "gentle", "broken", "golden", "velvet", "frozen"),
    *("amber", "wandering", "painted", "iron", "distant"),
)
_NOUNS = (
    *("marigold", "lantern", "heron", "compass", "orchard", "anvil", "feather", "harbour", "thimble", "badger"),
    *("trumpet", "cardamom", "window", "sparrow"),
)
SETS: Mapping[str, QuestionSet] = {
    "nq": QuestionSet(_nq, judging.words, 16),
    "booleans": QuestionSet(_booleans, judging.beginning, 2, chance=0.5),
    "brackets": QuestionSet(_brackets, judging.whole, 12),
    "calls": QuestionSet(_calls, judging.call, 72),
    "needles": QuestionSet(_needles, judging.beginning, 6),
}
