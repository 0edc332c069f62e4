"""Count how much of conversations and tool loops models with states compute again, and the minimum of pure attention.

    python -m bench.replay.states [--conversations N] [--turns N] [--llama-cpp .cache/llama.cpp]

As `bench.replay` and `bench.agents`, with states as large as the keys and values of a few tokens (LFM2), and of
thousands (Qwen3.5), in a pool of `STATE_BYTES`. llama.cpp's server gets the same requests, where replies are the
encoding of their text: its states are so small that all of them have room. Eight minutes on two cores.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ..agents.clients import DIALECTS, SHAPES
from ..agents.llama_cpp import Asked, LlamaCppReplay
from ..agents.loops import loop
from ..agents.models import MODELS as AGENTS
from ..agents.models import artifact_of
from ..agents.replay import AgentServer
from ..data import Conversation, data_dir, oasst
from ..options import read_options
from ..report.page import publish
from .engine import STATE_BYTES, Message, Turn, with_reply
from .models import HYBRIDS, MODELS, TalkingArtifact, artifact, read_tokenizer
from .replies import KINDS
from .talks import Replay

BARS = {"LFM2": 1.10, "Qwen3.5": 1.25}
TALKING = ("qwen2", "smollm2")  # whose templates render a conversation as the beginning of a longer one
NUM_TURNS = 30


@dataclasses.dataclass(frozen=True)
class Row:
    """One conversation; tokens of all prompts but the first."""

    states: str
    talk: str
    num_computed: int
    num_least: int
    num_peer: int | None = None  # by llama.cpp, for the same requests

    @property
    def ratio(self) -> float:
        """Computed tokens, divided by pure attention's minimum."""
        return self.num_computed / self.num_least

    @property
    def peer_ratio(self) -> float | None:
        """llama.cpp's computed tokens, divided by the same minimum."""
        return None if self.num_peer is None else self.num_peer / self.num_least


def main() -> None:
    """Replay, print and write `bench/results/replay_states.json`."""
    options = read_options(__doc__, conversations=int, turns=NUM_TURNS, llama_cpp=Path(".cache/llama.cpp"))
    program = options.llama_cpp.resolve() / "llama-server"
    talks, turns, rows = oasst(data_dir(), options.conversations), loop(options.turns), list[Row]()
    for name, hybrid in HYBRIDS.items():
        for model in TALKING:
            talking = artifact(MODELS[model], read_tokenizer(MODELS[model], data_dir()), hybrid)
            replay = Replay(model, talking)
            for kind in KINDS:
                chats: list[list[Turn]] = []
                found = replay.run(talks, kind, "text", chats)
                peer = _peer(program, talking, talks, chats) if kind == "bare" else None
                rows.append(Row(name, f"OASST, {model}: {kind}", found.num_prefilled, found.num_ideal, peer))
        for model in AGENTS:
            with AgentServer(model, hybrid=hybrid) as server, tempfile.TemporaryDirectory() as scratch:
                replay_peer = (
                    LlamaCppReplay(program, artifact_of(model, hybrid), Path(scratch)) if program.exists() else None
                )
                for shape in SHAPES:
                    for dialect in DIALECTS:
                        played = server.play(dialect, shape, turns, replay_peer)
                        text = f"tools, {model}: {shape.name}, {dialect}"
                        rows.append(Row(name, text, played.num_computed, played.num_least, played.num_peer))
    sizes = {name: hybrid.state_bytes for name, hybrid in HYBRIDS.items()}
    is_met = all(row.ratio <= BARS[row.states] for row in rows)
    figures = [{**dataclasses.asdict(row), "ratio": row.ratio, "peer_ratio": row.peer_ratio} for row in rows]
    publish("replay_states", {"bars": BARS, "is_met": is_met, "bytes": STATE_BYTES, "sizes": sizes, "rows": figures})


def _peer(
    program: Path, talking: TalkingArtifact, talks: Sequence[Conversation], played: Sequence[Sequence[Turn]]
) -> int | None:
    """Return the tokens that llama.cpp computes for the same conversations."""
    if not program.exists():
        return None
    loops = [_asked(talk, turns) for talk, turns in zip(talks, played, strict=True)]
    with tempfile.TemporaryDirectory() as scratch:
        return LlamaCppReplay(program, talking, Path(scratch)).play_all(loops)


def _asked(talk: Conversation, turns: Sequence[Turn]) -> tuple[list[Asked], list[str]]:
    messages: list[Message] = []
    asked, replies = list[Asked](), [turn.text for turn in turns]
    for number, question in enumerate(talk.texts[::2]):
        user: Message = {"role": "user", "content": question}
        messages = with_reply(messages, replies[number - 1], question) if number else [user]
        asked.append(("/v1/chat/completions", {"messages": messages, "max_tokens": 1}))
    return asked, replies


if __name__ == "__main__":
    main()
