"""The script of a tool loop of coding agents: replies of the model, results of its tools, and messages of the user.

The same each time. Knows texts, not APIs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SYSTEM = "You are a coding agent. Read, edit and run what the user asks for, and say what you did. " * 4
QUESTIONS = (
    "Fix the failing test in src/parser.py, please.",
    "Thanks. Now rename the module to reader.",
    "And write a line about it in the changelog.",
)
TURNS_A_QUESTION = 10
TOOL_NAMES = ("read_file", "edit_file", "run")
_SCHEMA = {"type": "object"}
TOOLS: Sequence[Mapping[str, object]] = [
    {"name": name, "description": f"The tool {name} of the editor.", "parameters": _SCHEMA} for name in TOOL_NAMES
]
_WORDS = ("", "Let me look at {path}.", "\nNow {path}; it may be  the one.  ", "", "Two calls for {path}:")
_GAPS = ("\n", "\n\n", " \n")  # before a call, after text: clients do not get it


@dataclass(frozen=True)
class Turn:
    """One reply and what follows it.

    Attributes:
        thought: the reasoning, if the model reasons.
        words: the text, as the model writes it.
        calls: names, and arguments as the model writes them.
        results: results of the calls.
        question: the user's answer to a reply without calls; None: there is none.
    """

    thought: str
    words: str
    gap: str
    calls: tuple[tuple[str, str], ...]
    results: tuple[str, ...]
    question: str | None = None

    def text(self, *, thinks: bool) -> str:
        """Return the model's whole reply in this turn: reasoning, text and calls, as its template writes them."""
        calls = "\n".join(
            f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
            for name, arguments in self.calls
        )
        gap = self.gap if self.words and calls else ""
        return (f"<think>\n{self.thought}\n</think>\n\n" if thinks else "") + self.words + gap + calls


def loop(num_turns: int) -> list[Turn]:
    """Return the turns: each tenth ends in text, and the user asks again."""
    return [_turn(number, is_last=number == num_turns - 1) for number in range(num_turns)]


def _turn(number: int, *, is_last: bool) -> Turn:
    """Return the turn of this number: reasoning and one or two tool calls with results, or an answer and a question.

    The last turn is an answer without a further question.
    """
    path = f"src/part_{number}/naïve.py"
    thought = f"Turn {number}: the file {path} may tell why. I should look before I change anything there."
    if is_last or number % TURNS_A_QUESTION == TURNS_A_QUESTION - 1:
        question = None if is_last else QUESTIONS[(number // TURNS_A_QUESTION + 1) % len(QUESTIONS)]
        return Turn(thought, f"Done: {path} is as it should be, and {number} tests pass.", "", (), (), question)
    calls = [(TOOL_NAMES[number % 3], _arguments(number, path))]
    if number % 4 == 3:
        calls.append(
            ("run", json.dumps({"timeout": 30.0, "command": f'grep -n "é" {path} | head'}, ensure_ascii=False))
        )
    results = tuple(f"Result {number}.{place} of {name}: " + _output(number) for place, (name, _) in enumerate(calls))
    words = _WORDS[number % len(_WORDS)].format(path=path)
    return Turn(thought, words, _GAPS[number % len(_GAPS)], tuple(calls), results)


def _arguments(number: int, path: str) -> str:
    """Return the arguments of a call as JSON text that other encoders would write differently."""
    return json.dumps(
        {
            "path": path,
            "line": number,
            "new_text": f'def part_{number}(text: str) -> str:\n\treturn text or "ünïcode: {number}"  # 漢字\n',
            "options": {"regex": False, "limits": [1, 2.0, None], "context": 3},
        },
        ensure_ascii=False,
    )


def _output(number: int) -> str:
    return "".join(f"\n{line:4d}  value_{line * (number + 3)} = compute({line}, {number})" for line in range(1, 9))
