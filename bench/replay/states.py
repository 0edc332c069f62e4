"""How much of conversations and tool loops is computed again by models that keep states, beside pure attention's least.

    python -m bench.replay.states [--conversations N] [--turns N]

As `bench.replay` and `bench.agents`, with states as large as the keys and values of a few tokens (LFM2), and of
thousands (Qwen3.5), in a pool of `STATE_BYTES`. Five minutes on two cores.
"""

from __future__ import annotations

import dataclasses

from ..agents.clients import DIALECTS, SHAPES
from ..agents.loops import loop
from ..agents.models import MODELS as AGENTS
from ..agents.replay import AgentServer
from ..data import data_dir, oasst
from ..options import read_options
from ..report.page import publish
from .engine import STATE_BYTES
from .models import HYBRIDS, MODELS, artifact, read_tokenizer
from .replies import KINDS
from .talks import Replay

BARS = {"LFM2": 1.10, "Qwen3.5": 1.25}
TALKING = ("qwen2", "smollm2")  # whose templates render a talk as the beginning of a longer one
NUM_TURNS = 30


@dataclasses.dataclass(frozen=True)
class Row:
    """One talk; tokens of all prompts but the first."""

    states: str
    talk: str
    num_computed: int
    num_least: int

    @property
    def ratio(self) -> float:
        """Computed tokens, to pure attention's least."""
        return self.num_computed / self.num_least


def main() -> None:
    """Replay, print and write `bench/results/replay_states.json`."""
    options = read_options(__doc__, conversations=int, turns=NUM_TURNS)
    talks, turns, rows = oasst(data_dir(), options.conversations), loop(options.turns), list[Row]()
    for name, hybrid in HYBRIDS.items():
        for model in TALKING:
            replay = Replay(model, artifact(MODELS[model], read_tokenizer(MODELS[model], data_dir()), hybrid))
            for kind in KINDS:
                found = replay.run(talks, kind, "text")
                rows.append(Row(name, f"OASST, {model}: {kind}", found.num_prefilled, found.num_ideal))
        for model in AGENTS:
            with AgentServer(model, hybrid=hybrid) as server:
                for shape in SHAPES:
                    for dialect in DIALECTS:
                        played = server.play(dialect, shape, turns)
                        text = f"tools, {model}: {shape.name}, {dialect}"
                        rows.append(Row(name, text, played.num_computed, played.num_least))
    sizes = {name: hybrid.state_bytes for name, hybrid in HYBRIDS.items()}
    is_met = all(row.ratio <= BARS[row.states] for row in rows)
    figures = [{**dataclasses.asdict(row), "ratio": row.ratio} for row in rows]
    publish("replay_states", {"bars": BARS, "is_met": is_met, "bytes": STATE_BYTES, "sizes": sizes, "rows": figures})


if __name__ == "__main__":
    main()
