"""Translate a conversation in Anthropic's shapes into messages as chat templates know them.

Knows which calls and results belong together, not how either is written for a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from ...chat.reasoning_format import FIELD as REASONING_FIELD
from ...errors import InvalidParameter
from ..unread_parts import ADVICE
from .blocks import (
    InputMessage,
    RedactedThinkingBlock,
    System,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    UnreadBlock,
    text_of,
)

BILLING_LINE = "x-anthropic-billing-header:"
"""Begins the line that Claude Code puts before the system prompt, with a number of its own for each request.

It would hide all that follows from the cache, and means nothing to a model."""
Message = dict[str, object]


@dataclass
class Conversation:
    """Messages for a chat template, each with its place in what was sent; the system's first words have none.

    Attributes:
        ignored: names of parts that were left out, as the header of ignored fields lists them.
        unread: likewise of images and documents in results of calls, in whose place a note stands.
    """

    messages: list[Message] = field(default_factory=list)
    places: list[int | None] = field(default_factory=list)
    ignored: set[str] = field(default_factory=set)
    unread: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, system: System | None, messages: Sequence[InputMessage]) -> Conversation:
        """The same conversation.

        Raises:
            InvalidParameter: calls and results do not belong together, a block stands in a message of a role that has
                none such, or the last message is the assistant's.
        """
        conversation = cls()
        conversation._add_system(system)
        calls = _Calls()
        newest = max((place for place, message in enumerate(messages) if message.role == "user"), default=-1)
        for place, message in enumerate(messages):
            match message.role:
                case "system" if message.clear_at == "next_user_message" and place < newest:
                    pass
                case "system":
                    conversation._add(place, {"role": "system", "content": _only_text(place, message)})
                case "user":
                    conversation._add_user(place, message, calls)
                case "assistant":
                    calls.close(place)
                    conversation._add(place, _said(place, message, calls))
        calls.close(len(messages))
        if messages[-1].role == "assistant":
            raise InvalidParameter(
                "the last message is the assistant's; a reply always begins anew here: end with a user's message",
                param="messages",
            )
        return conversation

    def _add(self, place: int | None, message: Message) -> None:
        self.messages.append(message)
        self.places.append(place)

    def _add_system(self, system: System | None) -> None:
        """The system's words, without a line that differs in each request and hides the rest from the cache."""
        if isinstance(system, list) and system and is_billing_line(system[0].text):
            system = system[1:]
            self.ignored.add(f"system.{BILLING_LINE.removesuffix(':')}")
        if system:
            self._add(None, {"role": "system", "content": text_of(system)})

    def _add_user(self, place: int, message: InputMessage, calls: _Calls) -> None:
        """Results of calls and words, each where it stands: templates know results as messages of their own."""
        words: list[str] = []

        def say() -> None:
            if words:
                self._add(place, {"role": "user", "content": "".join(words)})
                words.clear()

        for number, block in enumerate(message.blocks):
            match block:
                case TextBlock(text):
                    words.append(text)
                case ToolResultBlock(tool_use_id, _):
                    say()
                    name = calls.answer(tool_use_id, _field(place, number))
                    result: Message = {"role": "tool", "tool_call_id": tool_use_id, "name": name}
                    self._add(place, {**result, "content": block.text})
                    self.unread |= block.unread
                case _:
                    raise _misplaced(place, number, message, block)
        if not message.blocks:
            words.append("")
        say()


@dataclass
class _Calls:
    """The calls so far: each is answered before the assistant speaks again, and until then no other has its id. Some
    servers count the calls of each reply anew.
    """

    unanswered: dict[str, str] = field(default_factory=dict)  # ids to names

    def begin(self, call: ToolUseBlock, param: str) -> None:
        if call.id in self.unanswered:
            message = f"{param}: the id {call.id!r:.80} is that of another call without a result; ids must be unique"
            raise InvalidParameter(message, param=param)
        self.unanswered[call.id] = call.name

    def answer(self, call_id: str, param: str) -> str:
        """The name of the tool that was called."""
        name = self.unanswered.pop(call_id, None)
        if name is None:
            message = f"{param}: no call before it has the id {call_id!r:.80}, or it has its result already"
            raise InvalidParameter(f"{message}; send results right after their calls, each once", param=param)
        return name

    def close(self, place: int) -> None:
        """The assistant speaks, or the conversation ends."""
        if self.unanswered:
            ids = ", ".join(repr(each)[:80] for each in list(self.unanswered)[:8])
            raise InvalidParameter(
                f"messages[{place - 1}]: calls are without results: {ids}; send a tool_result for each of them in the "
                "user's message behind them",
                param=f"messages[{place - 1}]",
            )


def _said(place: int, message: InputMessage, calls: _Calls) -> Message:
    """A message of the assistant: templates know thoughts, words and calls, in this order."""
    thoughts, words, called = list[str](), list[str](), list[Message]()
    for number, block in enumerate(message.blocks):
        match block:
            case TextBlock(text):
                words.append(text)
            case ThinkingBlock(thinking):
                thoughts.append(thinking)
            case RedactedThinkingBlock():
                pass
            case ToolUseBlock(call_id, name, arguments):
                calls.begin(block, _field(place, number))
                function = {"name": name, "arguments": _json(arguments, _field(place, number))}
                called.append({"id": call_id, "type": "function", "function": function})
            case _:
                raise _misplaced(place, number, message, block)
    said: Message = {"role": "assistant", "content": "".join(words)}
    if any(thoughts):
        said[REASONING_FIELD] = "".join(thoughts)
    return {**said, "tool_calls": called} if called else said


def _only_text(place: int, message: InputMessage) -> str:
    for number, block in enumerate(message.blocks):
        if not isinstance(block, TextBlock):
            raise _misplaced(place, number, message, block)
    return text_of(message.content)


def _json(arguments: object, param: str) -> str:
    try:
        return msgspec.json.encode(arguments).decode()
    except RecursionError as error:
        raise InvalidParameter(f"{param}.input is nested too deep; send it flatter", param=param) from error


def _field(place: int, number: int) -> str:
    return f"messages[{place}].content[{number}]"


def _misplaced(place: int, number: int, message: InputMessage, block: msgspec.Struct) -> InvalidParameter:
    param = _field(place, number)
    kind = block.__struct_config__.tag
    if isinstance(block, UnreadBlock):
        return InvalidParameter(f"{param}: {kind} blocks {ADVICE}", param=param)
    return InvalidParameter(
        f"{param} is a {kind} block, and a message of the {message.role} has none such", param=param
    )


def is_billing_line(text: str) -> bool:
    """Whether a text is that line, and nothing else.

    >>> is_billing_line("x-anthropic-billing-header: cc_version=2.1; cch=fa690;"), is_billing_line("Be brief.")
    (True, False)
    """
    return text.startswith(BILLING_LINE) and len(text.splitlines()) == 1


def without_billing_line(system: object) -> object:
    """What a body has as `system`, whatever it is, without a first block that is the line."""
    if isinstance(system, list) and system and isinstance(system[0], dict):
        text = system[0].get("text")
        if isinstance(text, str) and is_billing_line(text):
            return system[1:]
    return system
