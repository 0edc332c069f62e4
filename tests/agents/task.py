"""What each agent is asked to do, the ten steps in which its model does it, and what is there in the end.

Knows files and steps; a client's own tools are named where it is tried.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

TASK = "The greeting in greeting.py is misspelt. Correct it, see that the test passes, and say so in NOTES.md."
FILES = {
    "greeting.py": 'def greet(name):\n    return "Helo, " + name + "!"\n',
    "test_greeting.py": "from greeting import greet\n\n"
    'assert greet("Ann") == "Hello, Ann!", greet("Ann")\nprint("passed")\n',
}
DONE = "The greeting is spelt as it should be, and the test passes."
TITLE = "Misspelt greeting"  # what is said to all other requests: most are for titles


@dataclass(frozen=True)
class Step:
    """What the agent does: run `text`, read `path`, write `text` to it, or replace the line `old` in it by `text`."""

    kind: Literal["run", "read", "write", "edit"]
    path: str = ""
    text: str = ""
    old: str = ""


STEPS = (
    Step("run", text="ls"),
    Step("read", "greeting.py"),
    Step("read", "test_greeting.py"),
    Step("run", text="python3 test_greeting.py"),
    Step("edit", "greeting.py", '    return "Hello, " + name + "!"', '    return "Helo, " + name + "!"'),
    Step("run", text="python3 test_greeting.py"),
    Step("write", "NOTES.md", "# Notes\n\nThe greeting was misspelt.\n"),
    Step("read", "NOTES.md"),
    Step("edit", "NOTES.md", "The greeting was misspelt; it is right now.", "The greeting was misspelt."),
    Step("run", text="cat NOTES.md greeting.py"),
)
SHOWN = ("AssertionError: Helo, Ann!", "passed", "misspelt; it is right now")  # by the tools, whoever runs them

Call = tuple[str, dict[str, Any]]
"""A tool's name, and its arguments."""


def make_repository(folder: Path) -> Path:
    """The files, in a new folder that is a repository of its own."""
    folder.mkdir(parents=True)
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


def check_done(folder: Path) -> None:
    """Fail unless the files are what they should be now."""
    assert (folder / "greeting.py").read_text() == FILES["greeting.py"].replace("Helo", "Hello")
    assert (folder / "test_greeting.py").read_text() == FILES["test_greeting.py"]
    assert (folder / "NOTES.md").read_text() == "# Notes\n\nThe greeting was misspelt; it is right now.\n"


def script(tool: str, call_of: Callable[[Step], Call], steps: Sequence[Step] = STEPS) -> dict[str, Any]:
    """The script of `scripted_server.py`: each step as the model calls a tool, then the answer."""
    turns = [_turn(*call_of(step)) for step in steps]
    return {"task": TASK, "tool": tool, "turns": [*turns, DONE], "otherwise": TITLE}


def _turn(name: str, arguments: dict[str, Any]) -> str:
    called = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{called}\n</tool_call>"
