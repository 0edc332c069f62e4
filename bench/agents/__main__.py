"""Measure how much of coding agents' tool loops is computed again, in each API, whatever clients do to their history.

    python -m bench.agents [--turns N] [--models ...] [--dialects ...] [--llama-cpp .cache/llama.cpp]

The model's replies are scripted; tokenizer, templates, cache and HTTP are real. llama.cpp's server gets the same
requests. Six minutes on two cores.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

from ..options import read_options
from ..report.page import publish
from .clients import DIALECTS, SHAPES
from .llama_cpp import LlamaCppReplay
from .loops import loop
from .models import MODELS, artifact_of
from .replay import AgentServer, Replayed

BAR = 1.01
NUM_TURNS = 30


def main() -> None:
    """Play tool loops through each API, count the prompt tokens computed, print, and write `results/agents.json`."""
    options = read_options(
        __doc__,
        turns=NUM_TURNS,
        models=tuple(MODELS),
        dialects=tuple(DIALECTS),
        llama_cpp=Path(".cache/llama.cpp"),
    )
    program, turns = options.llama_cpp.resolve() / "llama-server", loop(options.turns)
    rows: list[Replayed] = []
    for model in options.models:
        with AgentServer(model) as server, tempfile.TemporaryDirectory() as scratch:
            peer = LlamaCppReplay(program, artifact_of(model), Path(scratch))
            for shape in SHAPES:
                rows += [server.play(dialect, shape, turns, peer) for dialect in options.dialects]
    is_met = all(row.ratio <= BAR for row in rows)
    figures = [{**dataclasses.asdict(row), "ratio": row.ratio, "peer_ratio": row.peer_ratio} for row in rows]
    publish("agents", {"bar": BAR, "is_met": is_met, "num_turns": options.turns, "rows": figures})


if __name__ == "__main__":
    main()
