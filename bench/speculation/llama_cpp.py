"""Send the same requests to llama.cpp's server with each of its kinds of n-grams: its speed, and whether text changes.

Knows its HTTP and its flags.
"""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import Any

from ..served import Client, ServedProcess
from .ours import Figures
from .tasks import EDIT, STORY

KINDS = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
ASKED = {"a file with one change": (EDIT, 500), "open text, greedily": (STORY, 200)}


def measure(program: Path, gguf: Path) -> Figures:
    """Return a row for each kind and task, compared with no drafts."""
    plain = _replies(program, gguf, "none")
    figures: Figures = {}
    for kind in KINDS:
        for name, reply in _replies(program, gguf, kind).items():
            timings, before = reply["timings"], plain[name]["timings"]
            figures[f"{kind}: {name}"] = [
                {
                    "plain_per_s": before["predicted_per_second"],
                    "drafting_per_s": timings["predicted_per_second"],
                    "num_tokens": timings["predicted_n"],
                    "drafted": timings.get("draft_n", 0),
                    "accepted": timings.get("draft_n_accepted", 0),
                    "is_same": _text(reply) == _text(plain[name]),
                }
            ]
    return figures


def _replies(program: Path, gguf: Path, kind: str) -> dict[str, dict[str, Any]]:
    """Return a fresh server's replies, by task."""
    threads = str(len(os.sched_getaffinity(0)))
    options = ("--parallel", "1", "--ctx-size", "4096", "--threads", threads, "--jinja", "--spec-type", kind)
    with (
        ServedProcess((str(program), "--model", str(gguf), *options)) as server,
        closing(Client(server.port)) as client,
    ):
        replies: dict[str, dict[str, Any]] = {}
        for name, (prompt, max_tokens) in ASKED.items():
            body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens, "temperature": 0.0}
            replies[name] = client.json("POST", "/v1/chat/completions", body)
        return replies


def _text(reply: dict[str, Any]) -> str:
    return str(reply["choices"][0]["message"]["content"])
