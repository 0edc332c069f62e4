"""Write replies of radixlm and of llama.cpp's server to twenty questions, with all defaults, for a reader to judge.

    python -m bench.peers.first_reply [--artifact .cache/smollm2.radixlm] [--file .cache/bench/first_reply.txt]
    python -m bench.peers.first_reply --count    # once each reply in that file is marked

A request has a question, a seed and a limit of the reply's length. All else is default, on the file that the artifact
was compiled from. Both replies follow their question in an order that does not tell whose they are. A person marks each
as sane or not: whole sentences, no invented words, no broken text.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from radixlm.compile.sources import default_model
from radixlm.runtime.artifact.cpu import default_num_threads

from ..options import read_options
from ..processes import RADIXLM
from ..report.page import publish
from ..report.serving import SANE
from ..results import read_results
from ..served import Client, Json, ServedProcess

NAME = "first_reply"
OURS, PEER = "radixlm", "llama.cpp"
MAX_TOKENS = 128
QUESTIONS = (
    "hi, who are you?",
    "What is gravity?",
    "Write one sentence about rain.",
    "Name three fruits.",
    "What is the capital of France?",
    "Why is the sky blue?",
    "Tell me a short story about a dog.",
    "How do I boil an egg?",
    "Write a poem of four lines about winter.",
    "What can you help me with?",
    "Explain what a computer program is.",
    "What should I eat for breakfast?",
    "Who wrote Romeo and Juliet?",
    "Give me a tip for sleeping better.",
    "What is the difference between a cat and a dog?",
    "Translate 'good morning' into French.",
    "Write a polite e-mail that asks for a day off.",
    "How many days has a week?",
    "Write a Python function that adds two numbers.",
    "Tell me a joke.",
)
"""The seed of each is its number, from 1."""
_LABELS = ("A", "B")
_HEADING = "=== {number}: {question}"
_MARK = re.compile(r"^--- (?P<label>[AB]):(?P<mark>.*)$", re.MULTILINE)
_RULES = f"""\
Write behind each letter "{SANE}" if the reply is sane, else what is wrong with it. Sane: whole sentences of words that
exist, and no broken text. A reply may be wrong, or end where its length was limited.
"""


def main() -> None:
    """Write both servers' replies to a file for a reader; with --count read the marks and write the results."""
    options = read_options(
        __doc__,
        artifact=Path(".cache/smollm2.radixlm"),
        llama_cpp=Path(".cache/llama.cpp"),
        file=Path(".cache/bench/first_reply.txt"),
        count=False,
    )
    if options.count:
        asked = read_results(NAME) or {}
        publish(NAME, {**asked, "rows": read_marks(asked["rows"], options.file.read_text(encoding="utf-8"))})
        return
    llama_server = [str(options.llama_cpp.resolve() / "llama-server"), "--model", str(default_model.download())]
    commands = {
        OURS: [RADIXLM, "serve", str(options.artifact.resolve())],
        PEER: [*llama_server, "--jinja", "--threads", str(default_num_threads())],
    }
    replies = {name: list(ask_questions(command)) for name, command in commands.items()}
    rows = [
        {"question": question, "replies": {name: replies[name][number] for name in commands}, "marks": {}}
        for number, question in enumerate(QUESTIONS)
    ]
    options.file.parent.mkdir(parents=True, exist_ok=True)
    options.file.write_text(text_to_read(rows), encoding="utf-8")
    publish(NAME, {"max_tokens": MAX_TOKENS, "rows": rows})
    print(f"mark the replies in {options.file}, then run this again with --count")


def ask_questions(command: Sequence[str]) -> Iterator[str]:
    """Yield a fresh server's reply to each question, each on a new connection."""
    with ServedProcess(command) as server:
        for seed, question in enumerate(QUESTIONS, 1):
            body = {
                "messages": [{"role": "user", "content": question}],
                "seed": seed,
                "max_tokens": MAX_TOKENS,
            }
            with closing(Client(server.port)) as client:
                reply = client.json("POST", "/v1/chat/completions", body)
            yield reply["choices"][0]["message"]["content"]


def text_to_read(rows: Sequence[Json]) -> str:
    """Return the replies after their questions, without names."""
    parts = [_RULES]
    for number, row in enumerate(rows, 1):
        parts.append(_HEADING.format(number=number, question=row["question"]))
        parts += [f"--- {label}:\n{row['replies'][name]}" for label, name in _names(row["replies"]).items()]
    return "\n\n".join(parts) + "\n"


def read_marks(rows: Sequence[Json], text: str) -> list[Json]:
    """Return `rows` with the marks that a reader wrote into the text of `text_to_read`.

    Raises:
        ValueError: a reply has no mark, or the text is of other replies.
    """
    found = []
    for number, row in enumerate(rows, 1):
        heading = _HEADING.format(number=number, question=row["question"])
        marks = {each["label"]: each["mark"].strip() for each in _MARK.finditer(_section(text, heading))}
        if set(marks) != set(_LABELS) or not all(marks.values()):
            raise ValueError(f"question {number} has the marks {marks}; write one behind each of {_LABELS}")
        found.append({**row, "marks": {name: marks[label] for label, name in _names(row["replies"]).items()}})
    return found


def _section(text: str, heading: str) -> str:
    """Return the text after a heading, up to the next."""
    _, _, rest = text.partition(heading)
    return rest.partition("\n=== ")[0]


def _names(replies: Mapping[str, str]) -> dict[str, str]:
    """Return whose reply each letter is, in an order that depends only on the replies, so that no reader guesses."""
    names = list(replies)
    random.Random("".join(replies.values())).shuffle(names)
    return dict(zip(_LABELS, names, strict=True))


if __name__ == "__main__":
    main()
