"""How much of conversations is computed again, counted at the model's door: the ids that are passed to `forward`.

    python -m bench.replay [--conversations N]

OASST conversations from the folder of real inputs (`RADIXLM_DATA`), each with the tokenizers and templates of five
models, replies that begin and are split in different ways, and each policy of the cache; five minutes on two cores. The
ideal is all after the last token whose KV can exist. `others` feeds and matches the ids of the rendered text, as
engines do that key their cache by token ids. Then 60 of them among clients who change what was said.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import replay_conversations
from .replay_adversaries import Adversaries, Held
from .replay_conversations import Conversation
from .replay_engine import POLICIES, Message, Policy, ReplayEngine, Turn, with_reply
from .replay_ideal import Ideal
from .replay_models import MODELS, TalkingArtifact, artifact, read_tokenizer
from .replay_replies import KINDS, Replies
from .results import write_results
from .texts import data_dir

BAR = 1.01
NUM_CHANGED = 60  # conversations that other clients change


@dataclass(frozen=True)
class Replayed:
    """All turns but the first of all conversations, with replies of one kind, under one policy."""

    model: str
    replies: str
    policy: Policy
    num_turns: int
    num_prompt_tokens: int
    num_prefilled: int
    num_ideal: int
    num_turns_above: int  # turns that prefilled more than the ideal

    @property
    def ratio(self) -> float:
        """Tokens prefilled, to the ideal."""
        return self.num_prefilled / self.num_ideal


class Replay:
    """One model, told what to say."""

    def __init__(self, name: str, artifact: TalkingArtifact) -> None:
        self._name = name
        self._artifact = artifact

    def run(self, conversations: Sequence[Conversation], kind: str, policy: Policy) -> Replayed:
        """Replay them one after the other, each in a namespace of its own, on an empty cache."""
        with ReplayEngine(self._artifact) as engine:
            replies = Replies(engine.engine.tokenizer)
            ideal = Ideal(engine.engine, self._artifact.tokenizer_json)
            turns = [
                turn
                for number, conversation in enumerate(conversations)
                for turn in _turns(engine, replies, ideal, conversation, kind, policy, b"%d" % number)
            ]
        prompts, prefilled, ideals = zip(*turns, strict=True)
        above = sum(more > least for more, least in zip(prefilled, ideals, strict=True))
        return Replayed(
            self._name, kind, policy, len(turns), sum(prompts), sum(prefilled), sum(ideals), num_turns_above=above
        )


def _turns(
    engine: ReplayEngine,
    replies: Replies,
    ideal: Ideal,
    conversation: Conversation,
    kind: str,
    policy: Policy,
    namespace: bytes,
) -> Iterator[tuple[int, int, int]]:
    """Prompt tokens, prefilled and ideal ones of each turn after the first."""
    messages: list[Message] = []
    last: Turn | None = None
    for number, question in enumerate(conversation.texts[::2]):
        messages = with_reply(messages, last.text, question) if last else [{"role": "user", "content": question}]
        answer = conversation.texts[2 * number + 1 : 2 * number + 3]
        ids = KINDS[kind](replies, answer[0]) if len(answer) == 2 else []  # nobody goes on from the last one
        turn = engine.ask(messages, ids if ids and kind == "cut" else [*ids, engine.end_id], policy, namespace)
        if last is not None:
            yield len(turn.prompt_ids), len(turn.prefilled_ids), ideal.num_tokens(last, messages)
        last = turn


def _replay_model(name: str, data: Path, most: int | None) -> tuple[list[Replayed], dict[str, Held]]:
    model = artifact(MODELS[name], read_tokenizer(MODELS[name], data))
    conversations = replay_conversations.oasst(data, most)
    replay = Replay(name, model)
    rows = [replay.run(conversations, kind, policy) for kind in KINDS for policy in POLICIES]
    held = {}
    for way, with_memo in (("text", False), ("memo", True)):
        with ReplayEngine(model) as engine:
            held[way] = Adversaries(engine, with_memo=with_memo).run(conversations[:NUM_CHANGED])
    return rows, held


def main() -> None:
    """Replay, print and write `bench/results/replay.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, help="only the first N")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    arguments = parser.parse_args()
    rows: list[Replayed] = []
    changed: dict[str, Any] = {}
    with ProcessPoolExecutor(2) as pool:
        jobs = {
            name: pool.submit(_replay_model, name, data_dir(), arguments.conversations) for name in arguments.models
        }
        for name, job in jobs.items():
            replayed, held = job.result()
            rows += replayed
            changed[name] = {way: dict(vars(found)) for way, found in held.items()}
            for row in replayed:
                print(f"{name:14} {row.replies:7} {row.policy:7} {row.ratio:8.4f}", flush=True)
            for way, found in held.items():
                short, asked = found.num_short.total(), found.num_requests.total()
                print(f"{name:14} {way}: {short} of {asked} requests reused less than they must", flush=True)
    missed = [row for row in rows if row.policy == "text" and row.ratio > BAR]
    figures = [{**dataclasses.asdict(row), "ratio": row.ratio} for row in rows]
    print(write_results("replay", {"bar": BAR, "is_met": not missed, "rows": figures, "changed": changed}))


if __name__ == "__main__":
    main()
