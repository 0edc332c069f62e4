"""Converse with a real model, and count how much of its own replies it computes again.

    python -m bench.replay.live ARTIFACT [--conversations N]

SmolLM2 at temperature 1, 30 conversations of 6 turns; five minutes on two cores. The first questions are those of
MT-Bench (`RADIXLM_DATA`) and a few of ours, in Chinese and Japanese, so that replies end within characters. If the
client got a reply's whole text, no token of it may be prefilled again but the last sampled one, which was never
computed.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from radixlm.runtime import Completion, Engine, SamplingParams
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.model.batch import Runner
from radixlm.runtime.model.model_runner import ModelRunner

from ..data import data_dir
from ..options import read_options
from ..report.page import publish
from ..worker import Closable
from .engine import Message, turn_of, with_reply
from .recording_runner import RecordingRunner

Reply = Literal["whole", "stop string", "mid-character", "no text"]
REPLIES: tuple[Reply, ...] = ("whole", "stop string", "mid-character", "no text")
"""Whether the client has the reply as it was sampled. `no text`: it has control tokens, or bytes that are no UTF-8,
which no text can represent."""

NUM_TURNS = 6
OURS = (
    "用中文讲一个关于猫的故事。",
    "请用中文介绍一下北京。",
    "日本語で自己紹介してください。",
    "写一首关于春天的诗。",
)
NEXT = ("Go on, please.", "Why is that so?", "Say it in one sentence.", "Give me an example.", "Thanks! What else?")
STOPS = (None, None, ". ", None, "\n\n")  # of one conversation after the other


@dataclass(frozen=True)
class LiveTurn:
    """The tokens of the conversation before that a turn computed again; `reply` is how the last reply had ended."""

    reply: Reply
    is_other: bool  # the last reply's ids are not the encoding of its text
    num_prompt_tokens: int
    num_prefilled: int
    num_again: int  # of `num_prefilled`, how many had KV
    num_by_ids: int  # what would be prefilled if the ids of the encoding were matched


class LiveReplay(Closable):
    """A model for one turn at a time; a context manager."""

    def __init__(self, artifact: Path, *, max_tokens: int = 64, seed: int = 0) -> None:
        self._engine = Engine(
            artifact, max_num_seqs=1, kv_cache_bytes=1 << 29, speculate="off", open_runner=self._open_runner
        )
        self._max_tokens, self._seed = max_tokens, seed

    def talk(self, opening: str, questions: Iterable[str], stop: str | None = None) -> list[LiveTurn]:
        """Run a conversation; return its turns after the first."""
        messages: list[Message] = [{"role": "user", "content": opening}]
        completion = self._ask(messages, stop)
        self._recorder.take()
        turns = []
        for question in questions:
            last = completion
            messages = with_reply(messages, last.text, question)
            completion = self._ask(messages, stop)
            turns.append(self._turn(last, completion, messages))
        return turns

    def _ask(self, messages: Sequence[Message], stop: str | None) -> Completion:
        self._seed += 1
        params = SamplingParams(
            temperature=1.0, max_tokens=self._max_tokens, seed=self._seed, stop=() if stop is None else (stop,)
        )
        return self._engine.chat(messages, params)

    def _turn(self, last: Completion, now: Completion, messages: Sequence[Message]) -> LiveTurn:
        turn = turn_of(now, self._recorder.take())
        computed = (*last.prompt_token_ids, *last.token_ids[:-1])
        tokenizer = self._engine.tokenizer
        encoded = tokenizer.prepare_chat(self._engine.render(messages)).ids
        return LiveTurn(
            reply=self._how_it_ended(last),
            is_other=tuple(tokenizer.encode_inside(last.text)) != self._without_end(last),
            num_prompt_tokens=len(turn.prompt_ids),
            num_prefilled=len(turn.prefilled_ids),
            num_again=len(computed) - _num_common(computed, turn.reused_ids),
            num_by_ids=len(encoded) - _num_common(computed, encoded),
        )

    def _how_it_ended(self, last: Completion) -> Reply:
        ids = self._without_end(last)
        if self._engine.tokenizer.profile.special_ids.intersection(ids):
            return "no text"
        spelled = b"".join(map(self._engine.tokenizer.token_bytes, ids))
        if spelled == last.text.encode():
            return "whole"
        if spelled.startswith(last.text.encode()):
            return "stop string"
        whole = last.text.rstrip("\N{REPLACEMENT CHARACTER}").encode()
        return "mid-character" if spelled.startswith(whole) and len(spelled) - len(whole) < 4 else "no text"

    def _without_end(self, last: Completion) -> tuple[int, ...]:
        ends = self._engine.manifest.tokenizer.eos_token_ids
        return last.token_ids[:-1] if last.token_ids[-1] in ends else last.token_ids

    def _open_runner(self, artifact: Artifact, num_pages: int, num_threads: int | None) -> Runner:
        self._recorder = RecordingRunner(num_pages, ModelRunner(artifact, num_pages=num_pages, num_threads=num_threads))
        return self._recorder

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()


def summary(turns: Sequence[LiveTurn]) -> dict[str, dict[str, int]]:
    """Return, by how the replies ended, the number of turns and the sums of their counts."""
    found: dict[str, dict[str, int]] = {}
    for reply in REPLIES:
        mine = [turn for turn in turns if turn.reply == reply]
        if mine:
            counts = [dataclasses.asdict(turn) for turn in mine]
            names = [field.name for field in dataclasses.fields(LiveTurn) if field.name != "reply"]
            found[reply] = {"num_turns": len(mine), **{name: sum(one[name] for one in counts) for name in names}}
    return found


def _num_common(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = zip(left, right, strict=False)
    return next((at for at, (ours, theirs) in enumerate(pairs) if ours != theirs), min(len(left), len(right)))


def _openings(data: Path) -> list[str]:
    lines = (data / "conversations" / "mt_bench_question.jsonl").read_text(encoding="utf-8").splitlines()
    return [*OURS, *(str(json.loads(line)["turns"][0]) for line in lines)]


def main() -> None:
    """Converse with a real model, and count its tokens computed again; print, write `results/replay_live.json`."""
    options = read_options(__doc__, "artifact", conversations=30)
    openings = _openings(data_dir())[: options.conversations]
    turns: list[LiveTurn] = []
    with LiveReplay(options.artifact) as live:
        for number, opening in enumerate(openings):
            turns += live.talk(opening, NEXT[: NUM_TURNS - 1], STOPS[number % len(STOPS)])
    is_met = not any(turn.num_again for turn in turns if turn.reply == "whole")
    figures = {"num_conversations": len(openings), "num_turns": NUM_TURNS, "is_met": is_met}
    publish("replay_live", {**figures, "replies": summary(turns)})


if __name__ == "__main__":
    main()
