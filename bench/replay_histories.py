"""What clients make of a conversation: they edit, cut, quote and re-order it, go on with it, or ask again.

Knows messages and a random generator, nothing else.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from .replay_engine import Message

ASK = "And what else is there to say about it?"
Change = Callable[[random.Random, Sequence[Message]], list[Message]]


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
"""Given a conversation that ends in a reply, the messages of another request."""
