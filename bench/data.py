"""Find the folder of real inputs, `RADIXLM_DATA` or ../shared/data, and read conversations from it.

The repository cannot include it. Knows files and their formats, not tokens.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def data_dir() -> Path:
    """Return the folder; if it is missing, end the program with instructions."""
    path = Path(os.environ.get("RADIXLM_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
    if not path.is_dir():
        raise SystemExit(f"the texts are not at {path}; set RADIXLM_DATA to the folder that holds prompts/")
    return path


@dataclass(frozen=True)
class Conversation:
    """The messages of user and assistant in turns, beginning with the user."""

    texts: tuple[str, ...]

    @property
    def num_questions(self) -> int:
        """Number of user messages."""
        return (len(self.texts) + 1) // 2


def oasst(data: Path, most: int | None = None) -> list[Conversation]:
    """Return every path from a root to a leaf with a second user message, or the first `most` of them."""
    lines = (data / "conversations" / "oasst_en_50_trees.jsonl").read_text(encoding="utf-8").splitlines()
    paths = [path for line in lines for path in _paths(json.loads(line)["prompt"], ())]
    return [Conversation(path) for path in paths if len(path) > 2][:most]


def _paths(message: dict[str, Any], before: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield the texts from a message to each of its last replies, after the texts `before`."""
    path = (*before, str(message["text"]))
    if not message["replies"]:
        yield path
    for reply in message["replies"]:
        yield from _paths(reply, path)
