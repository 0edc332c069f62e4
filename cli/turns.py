"""The turns of a file, to be played one after the other: a conversation, or the bodies of a server's requests.

Knows messages and known replies; asks no model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from radixlm.runtime.server.openai.chat_request import ChatRequest
    from radixlm.runtime.server.openai.requests import CompletionRequest

Reply = str | tuple[int, ...]
EXPECTED = (
    'a JSON list of messages, {"role": ..., "content": ...}, or of the bodies of requests, {"messages": [...]} or '
    '{"prompt": ...}'
)
_NOTHING: dict[str, Any] = {}


@dataclass(frozen=True)
class ReplyTo:
    """Stands for the reply to an earlier turn, by its place among the turns."""

    place: int


@dataclass(frozen=True)
class Turn:
    """A request, and what the model said to it: its text, its ids, or None where it is still to be asked.

    Among the messages of `body` there may be a `ReplyTo`.
    """

    body: Mapping[str, Any]
    reply: Reply | None

    def request(self, replies: Sequence[str]) -> ChatRequest | CompletionRequest:
        """The request, with the replies to the turns before.

        Raises:
            msgspec.ValidationError: it is none.
        """
        from radixlm.runtime.server.openai.chat_request import ChatRequest
        from radixlm.runtime.server.openai.requests import CompletionRequest

        if "messages" not in self.body:
            return msgspec.convert(self.body, CompletionRequest)
        messages = self.body["messages"]
        if isinstance(messages, list):
            messages = [_replied(replies[item.place]) if isinstance(item, ReplyTo) else item for item in messages]
        return msgspec.convert({**self.body, "messages": messages}, ChatRequest)


def read_turns(data: bytes) -> list[Turn]:
    """The turns of a file. What the model really said is a message's `token_ids`, or the `reply` beside a body.

    Raises:
        ValueError: it is something else; the message says what is wrong.
    """
    try:
        items = msgspec.json.decode(data, type=list[dict[str, Any]])
        turns = _conversation(items) if items and "role" in items[0] else _requests(items)
        for turn in turns:
            turn.request([""] * len(turns))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"the turns must be {EXPECTED}: {error}") from error
    if not turns:
        raise ValueError(f"there are no turns; give {EXPECTED}")
    return turns


def _conversation(items: Sequence[dict[str, Any]]) -> list[Turn]:
    """A turn before each reply, and after each question that has none."""
    from radixlm.runtime.server.openai.messages import ChatMessage

    turns: list[Turn] = []
    history: list[dict[str, Any] | ReplyTo] = []
    for item, after in pairwise([*items, _NOTHING]):
        history.append(_without_ids(item))
        msgspec.convert(history[-1], ChatMessage)
        if after.get("role") == "assistant":
            turns.append(Turn({"messages": [*history]}, _reply_of(after)))
        elif item.get("role") == "user":
            turns.append(Turn({"messages": [*history]}, None))
            history.append(ReplyTo(len(turns) - 1))
    return turns


def _requests(items: Sequence[dict[str, Any]]) -> list[Turn]:
    """What is no `reply` to a request is what a later one has as such behind the same messages."""
    turns = []
    for number, item in enumerate(items, 1):
        body = {name: value for name, value in item.items() if name != "reply"}
        reply = msgspec.convert(item.get("reply"), Reply | None)
        if isinstance(body.get("messages"), list):
            messages = [_without_ids(message) for message in body["messages"]]
            body["messages"] = messages
            if reply is None:
                reply = _found_reply(item["messages"], [later.get("messages") for later in items[number:]])
        turns.append(Turn(body, reply))
    return turns


def _found_reply(messages: list[Any], later: Sequence[object]) -> Reply | None:
    """The assistant's message that some later messages have behind these."""
    for others in later:
        if isinstance(others, list) and others[: len(messages)] == messages and len(others) > len(messages):
            answer = others[len(messages)]
            if isinstance(answer, dict) and answer.get("role") == "assistant":
                return _reply_of(answer)
    return None


def _reply_of(message: Mapping[str, Any]) -> Reply:
    reply: Reply = msgspec.convert(message.get("token_ids", message.get("content")), Reply)
    return reply


def _replied(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def _without_ids(message: Any) -> Any:
    return {k: v for k, v in message.items() if k != "token_ids"} if isinstance(message, dict) else message
