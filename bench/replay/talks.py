"""Replay conversations with a model whose replies are given, and count the minimum of computed tokens.

The ideal is all tokens of a prompt after the last one whose KV can exist. A reply's last sampled token has no KV: it
was never passed to the model. The ideal is counted in the encoding of the whole prompt by the offsets of the
`tokenizers` library, which are of whole characters. Ids that continue within a character may be reused up to there,
and are a token fewer than this ideal then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import tokenizers
from radixlm.runtime import Engine

from ..data import Conversation, oasst
from .engine import POLICIES, Message, Policy, ReplayEngine, Turn, with_reply
from .models import MODELS, TalkingArtifact, artifact, read_tokenizer
from .replies import KINDS, Replies


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
        """The prefilled tokens, divided by the ideal."""
        return self.num_prefilled / self.num_ideal


class Replay:
    """One model, whose replies are given."""

    def __init__(self, name: str, artifact: TalkingArtifact) -> None:
        self._name = name
        self._artifact = artifact

    def run(
        self,
        conversations: Sequence[Conversation],
        kind: str,
        policy: Policy,
        played: list[list[Turn]] | None = None,
    ) -> Replayed:
        """Replay each in turn, each in its own namespace, on an empty cache; append the turns to `played`."""
        with ReplayEngine(self._artifact) as engine:
            replies = Replies(engine.engine.tokenizer)
            ideal = Ideal(engine.engine, self._artifact.tokenizer_json)
            turns = [
                turn
                for number, conversation in enumerate(conversations)
                for turn in _turns(engine, replies, ideal, conversation, kind, policy, b"%d" % number, played)
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
    played: list[list[Turn]] | None,
) -> Iterator[tuple[int, int, int]]:
    """Yield the numbers of prompt tokens, prefilled and ideal ones of each turn after the first."""
    messages: list[Message] = []
    last: Turn | None = None
    turns: list[Turn] = []
    if played is not None:
        played.append(turns)
    for number, question in enumerate(conversation.texts[::2]):
        messages = with_reply(messages, last.text, question) if last else [{"role": "user", "content": question}]
        answer = conversation.texts[2 * number + 1 : 2 * number + 3]
        ids = KINDS[kind](replies, answer[0]) if len(answer) == 2 else []  # no turn follows the last one
        turn = engine.ask(messages, ids if ids and kind == "cut" else [*ids, engine.end_id], policy, namespace)
        if last is not None:
            yield len(turn.prompt_ids), len(turn.prefilled_ids), ideal.num_tokens(last, messages)
        last = turn
        turns.append(turn)


def replay_model(name: str, data: Path, most: int | None) -> list[Replayed]:
    """Replay all kinds of replies and policies with one of `MODELS`, over the first conversations."""
    replay = Replay(name, artifact(MODELS[name], read_tokenizer(MODELS[name], data)))
    conversations = oasst(data, most)
    return [replay.run(conversations, kind, policy) for kind in KINDS for policy in POLICIES]


class Ideal:
    """The ideal for one model, whose templates render a conversation as the beginning of a longer one."""

    def __init__(self, engine: Engine, tokenizer_json: str) -> None:
        self._engine = engine
        self._tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)

    def num_tokens(self, last: Turn, messages: Sequence[Message]) -> int:
        """Return the ideal of `messages`, which end in the reply of the turn `last` and the user's next message."""
        rendered = self._engine.render(messages)
        place = rendered.rindex(last.text.strip(), 0, rendered.rindex(messages[-1]["content"].strip()))
        computed = self._engine.tokenizer.decode(last.reply_ids[:-1]).lstrip()
        place += sum(1 for _ in takewhile(_are_same, zip(computed, rendered[place:], strict=False)))
        without_suffix = rendered.removesuffix(" ")  # which the prompt need not have: the reply may begin with it
        offsets = self._tokenizer.encode(without_suffix, add_special_tokens=False).offsets
        return sum(end > place or start >= place for start, end in offsets)


def _are_same(pair: tuple[str, str]) -> bool:
    return pair[0] == pair[1]
