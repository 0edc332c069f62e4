"""Replay conversations among clients that change them, and hold each reuse to what was computed.

Reuse must be true (the used ids spell the prompt, and the reused ones were computed one after the other) and reach the
last token before the first changed byte.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from bench.data import Conversation
from bench.replay.engine import Message, ReplayEngine, Turn, with_reply
from bench.replay.replies import Replies

from .ledger import Ledger

NO_ANSWER = "Well."
ASK = "And what else is there to say about it?"
Change = Callable[[random.Random, Sequence[Message]], list[Message]]


@dataclass
class Held:
    """Requests of one kind, and how many of them reused less than they must."""

    num_requests: Counter[str] = field(default_factory=Counter)
    num_short: Counter[str] = field(default_factory=Counter)


class Adversaries:
    """Clients in one namespace of an engine, whose model splits its replies anyhow."""

    def __init__(self, engine: ReplayEngine, seed: int = 0) -> None:
        self.held = Held()
        self._engine = engine
        self._random = random.Random(seed)
        self._replies = Replies(engine.engine.tokenizer, seed)
        self._ledger = Ledger()
        self._lead = _lead(engine)

    def run(self, conversations: Sequence[Conversation]) -> Held:
        """Each conversation, then what others make of it; every request is held to the laws.

        Raises:
            AssertionError: what was reused is not what the prompt says.
        """
        for conversation in conversations:
            self._talk(conversation)
        return self.held

    def _talk(self, conversation: Conversation) -> None:
        messages: list[Message] = [{"role": "user", "content": conversation.texts[0]}]
        for said, asked in zip(conversation.texts[1::2], [*conversation.texts[2::2], None], strict=False):
            turn = self._ask("same client", messages, said)
            again = self._ask("regenerated", messages, said)  # the same text, other ids
            other = self._ask("regenerated", messages, said[: len(said) // 2] + NO_ANSWER)
            for name, change in CHANGES.items():
                told = with_reply(messages, self._random.choice([turn, again, other]).text)
                if name == "first turn left out" and len(told) < 4:
                    continue
                self._ask(name, change(self._random, told), NO_ANSWER)
            if asked is None:
                return
            messages = with_reply(messages, turn.text, asked)

    def _ask(self, name: str, messages: Sequence[Message], said: str) -> Turn:
        prompt = self._engine.spelled(messages)
        must = self._ledger.num_allowed(prompt)
        reply = [*self._replies.split(self._lead + said), self._engine.end_id]
        turn = self._engine.ask(messages, reply)
        self._ledger.check_truth(prompt, turn)
        self.held.num_requests[name] += 1
        self.held.num_short[name] += self._ledger.num_reused(prompt, turn) < must
        self._ledger.note(prompt, turn)
        return turn


def _lead(engine: ReplayEngine) -> str:
    """What a reply begins with so that the template renders it as it was said: a space, or nothing."""
    asked: list[Message] = [{"role": "user", "content": "a"}]
    prompt = engine.engine.render(asked).removesuffix(" ")
    later = engine.engine.render(with_reply(asked, "xyz", "b"))
    return later[len(prompt) :].partition("xyz")[0]


def _asked(messages: Sequence[Message]) -> list[Message]:
    """Ending in a question, as every request does."""
    kept = list(messages) if messages and messages[-1]["role"] == "assistant" else list(messages[:-1])
    return [*kept, {"role": "user", "content": ASK}]


def _with_text(messages: Sequence[Message], index: int, text: str) -> list[Message]:
    changed: Message = {**messages[index], "content": text}
    return [*messages[:index], changed, *messages[index + 1 :]]


def _edited(rng: random.Random, messages: Sequence[Message], role: str) -> list[Message]:
    index = rng.choice([i for i, message in enumerate(messages) if message["role"] == role])
    text = messages[index]["content"]
    at = rng.randrange(len(text))
    with_letter = rng.choice(["", "é", "x", " and", text[at] + text[at]])
    return _asked(_with_text(messages, index, text[:at] + with_letter + text[at + 1 :]))


def _truncated(rng: random.Random, messages: Sequence[Message]) -> list[Message]:
    index = rng.choice([i for i, message in enumerate(messages) if message["role"] == "assistant"])
    text = messages[index]["content"]
    return _asked(_with_text(messages, index, text[: rng.randrange(1, len(text) + 1)])[: index + 1])


def _quoted(rng: random.Random, messages: Sequence[Message]) -> list[Message]:
    """The user says what the model said."""
    said = rng.choice([message["content"] for message in messages if message["role"] == "assistant"])
    told = _asked(messages)
    return [*told[:-1], {"role": "user", "content": f"{said}\n{ASK}"}]


def _reordered(rng: random.Random, messages: Sequence[Message]) -> list[Message]:
    """Two messages of one role change places; where there is one only, it is told twice."""
    role = rng.choice(["user", "assistant"])
    places = [i for i, message in enumerate(messages) if message["role"] == role]
    first, second = rng.sample(places, 2) if len(places) > 1 else (places[0], places[0])
    changed = _with_text(messages, first, messages[second]["content"])
    changed = _with_text(changed, second, messages[first]["content"])
    return _asked([*changed, *changed[-2:]] if first == second else changed)


CHANGES: Mapping[str, Change] = {
    "second client": lambda rng, messages: _asked(messages),
    "question edited": lambda rng, messages: _edited(rng, messages, "user"),
    "reply edited": lambda rng, messages: _edited(rng, messages, "assistant"),
    "truncated": _truncated,
    "quoted": _quoted,
    "re-ordered": _reordered,
    "first turn left out": lambda rng, messages: _asked(messages[2:]),
}
"""What a client makes of a conversation that ends in a reply: the messages of another request."""
