"""Ids of calls for templates that want nine letters and digits, as Mistral's do, or a name and a number, as Kimi's.

Knows messages in the form that chat templates expect. What the model wrote as an id ends the id that clients have.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Final

Message = Mapping[str, object]

LENGTH: Final = 9
_OURS: Final = re.compile(rf"call_[a-zA-Z0-9]{{{24 - LENGTH}}}([a-zA-Z0-9]{{{LENGTH}}})")
_SHORT: Final = re.compile(rf"[a-zA-Z0-9]{{{LENGTH}}}")


def short_id(call_id: object) -> str:
    """The nine letters and digits for an id; of ours, the last nine; of others, the same ones each time.

    >>> short_id("call_0123456789abcdefghijklmn"), short_id("a1b2c3d4e"), len(short_id("toolu_1"))
    ('fghijklmn', 'a1b2c3d4e', 9)
    """
    text = str(call_id)
    if _SHORT.fullmatch(text):
        return text
    ours = _OURS.fullmatch(text)
    return ours[1] if ours else hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:LENGTH]


def with_short_ids(messages: Sequence[Message]) -> list[Message]:
    """Messages whose calls and results have such ids."""
    return [_shortened(message) for message in messages]


def with_counted_ids(messages: Sequence[Message], id_text: str) -> list[Message]:
    """Messages whose calls, counted from 0 through all of them, have the ids that a template writes as they are.

    >>> calls = [{"id": "call_1", "function": {"name": "f"}}]
    >>> said = [{"tool_calls": calls}, {"role": "tool", "tool_call_id": "call_1"}]
    >>> with_counted_ids(said, "functions.{name}:{number}")[1]["tool_call_id"]
    'functions.f:0'

    Args:
        id_text: an id, with the slots `{name}` and `{number}`.
    """
    ids: dict[str, str] = {}  # that were sent, to those of the template
    number, counted = 0, list[Message]()
    for message in messages:
        changed: dict[str, object] = {}
        if "tool_call_id" in message:
            changed["tool_call_id"] = ids.get(str(message["tool_call_id"]), message["tool_call_id"])
        calls = message.get("tool_calls")
        if isinstance(calls, list | tuple):
            named: list[object] = []
            for call in calls:
                made = id_text.replace("{number}", str(number)).replace("{name}", call["function"]["name"])
                ids[str(call.get("id"))], number = made, number + 1
                named.append({**call, "id": made})
            changed["tool_calls"] = named
        counted.append({**message, **changed} if changed else message)
    return counted


def _shortened(message: Message) -> Message:
    changed: dict[str, object] = {}
    if "tool_call_id" in message:
        changed["tool_call_id"] = short_id(message["tool_call_id"])
    calls = message.get("tool_calls")
    if isinstance(calls, list | tuple):
        changed["tool_calls"] = [{**call, "id": short_id(call.get("id"))} for call in calls]
    return {**message, **changed} if changed else message
