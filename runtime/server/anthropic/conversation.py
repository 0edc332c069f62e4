"""Translate a conversation in Anthropic's format into messages for a chat template.

Knows which tool calls and results belong together, not how a template writes them.
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
"""Prefix of the line that Claude Code puts before the system prompt, with a different number in each request.

It means nothing to a model, and would keep the rest of the prompt from matching the prefix cache."""
Message = dict[str, object]


@dataclass
class Conversation:
    """Messages for a chat template.

    Attributes:
        places: index of the request's message that each was made from; None for the system prompt.
        ignored: names of dropped parts, for the header of ignored fields.
        unread: names of images and documents in tool results that were replaced by a note.
    """

    messages: list[Message] = field(default_factory=list)
    places: list[int | None] = field(default_factory=list)
    ignored: set[str] = field(default_factory=set)
    unread: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, system: System | None, messages: Sequence[InputMessage]) -> Conversation:
        """Translate a system prompt and messages.

        Raises:
            InvalidParameter: tool calls and results do not match, a block is not allowed in a message of its role, or
                the last message is the assistant's.
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
                    conversation._add(place, _assistant(place, message, calls))
        calls.close(len(messages))
        if messages[-1].role == "assistant":
            raise InvalidParameter(
                "the last message is the assistant's; replies cannot be prefilled: end with a user message",
                param="messages",
            )
        return conversation

    def _add(self, place: int | None, message: Message) -> None:
        self.messages.append(message)
        self.places.append(place)

    def _add_system(self, system: System | None) -> None:
        """Add the system prompt, without a billing line, which would differ in each request."""
        if isinstance(system, list) and system and is_billing_line(system[0].text):
            system = system[1:]
            self.ignored.add(f"system.{BILLING_LINE.removesuffix(':')}")
        if system:
            self._add(None, {"role": "system", "content": text_of(system)})

    def _add_user(self, place: int, message: InputMessage, calls: _Calls) -> None:
        """Add a user message in its order. Tool results become messages of their own, as templates expect."""
        texts: list[str] = []

        def add_text() -> None:
            if texts:
                self._add(place, {"role": "user", "content": "".join(texts)})
                texts.clear()

        for number, block in enumerate(message.blocks):
            match block:
                case TextBlock(text):
                    texts.append(text)
                case ToolResultBlock(tool_use_id, _):
                    add_text()
                    name = calls.answer(tool_use_id, _field(place, number))
                    result: Message = {"role": "tool", "tool_call_id": tool_use_id, "name": name}
                    self._add(place, {**result, "content": block.text})
                    self.unread |= block.unread
                case _:
                    raise _misplaced(place, number, message, block)
        if not message.blocks:
            texts.append("")
        add_text()


@dataclass
class _Calls:
    """The tool calls without a result. Each needs one before the next assistant message.

    Ids must be unique among them only, because some servers restart numbering with each reply.
    """

    unanswered: dict[str, str] = field(default_factory=dict)  # ids to names

    def begin(self, call: ToolUseBlock, param: str) -> None:
        """Record a tool call that needs a result.

        Raises:
            InvalidParameter: another call without a result has the same id; `param` names this one.
        """
        if call.id in self.unanswered:
            message = f"{param}: another call without a result has the id {call.id!r:.80}; ids must be unique"
            raise InvalidParameter(message, param=param)
        self.unanswered[call.id] = call.name

    def answer(self, call_id: str, param: str) -> str:
        """Remove the call that a result answers, and return the name of its tool."""
        name = self.unanswered.pop(call_id, None)
        if name is None:
            message = f"{param}: there is no open tool call with the id {call_id!r:.80}"
            raise InvalidParameter(f"{message}; send each result once, right after its call", param=param)
        return name

    def close(self, place: int) -> None:
        """Require that all calls have results, before the message at index `place`.

        Called before an assistant message, and at the end.

        Raises:
            InvalidParameter: some have none.
        """
        if self.unanswered:
            ids = ", ".join(repr(each)[:80] for each in list(self.unanswered)[:8])
            raise InvalidParameter(
                f"messages[{place - 1}]: tool calls have no results: {ids}; send a tool_result for each in the next "
                "user message",
                param=f"messages[{place - 1}]",
            )


def _assistant(place: int, message: InputMessage, calls: _Calls) -> Message:
    """Translate an assistant message: templates write reasoning, text and calls, in this order."""
    reasoning, texts, called = list[str](), list[str](), list[Message]()
    for number, block in enumerate(message.blocks):
        match block:
            case TextBlock(text):
                texts.append(text)
            case ThinkingBlock(thinking):
                reasoning.append(thinking)
            case RedactedThinkingBlock():
                pass
            case ToolUseBlock(call_id, name, arguments):
                calls.begin(block, _field(place, number))
                function = {"name": name, "arguments": _json(arguments, _field(place, number))}
                called.append({"id": call_id, "type": "function", "function": function})
            case _:
                raise _misplaced(place, number, message, block)
    translated: Message = {"role": "assistant", "content": "".join(texts)}
    if any(reasoning):
        translated[REASONING_FIELD] = "".join(reasoning)
    return {**translated, "tool_calls": called} if called else translated


def _only_text(place: int, message: InputMessage) -> str:
    """Return the text of a message.

    Raises:
        InvalidParameter: it has another kind of block.
    """
    for number, block in enumerate(message.blocks):
        if not isinstance(block, TextBlock):
            raise _misplaced(place, number, message, block)
    return text_of(message.content)


def _json(arguments: object, param: str) -> str:
    """Return the arguments of a call as JSON text.

    Raises:
        InvalidParameter: they are nested too deep.
    """
    try:
        return msgspec.json.encode(arguments).decode()
    except RecursionError as error:
        raise InvalidParameter(f"{param}.input is nested too deep; send it flatter", param=param) from error


def _field(place: int, number: int) -> str:
    return f"messages[{place}].content[{number}]"


def _misplaced(place: int, number: int, message: InputMessage, block: msgspec.Struct) -> InvalidParameter:
    """Return the error for a block that a message of this role cannot have, or that is not supported."""
    param = _field(place, number)
    kind = block.__struct_config__.tag
    if isinstance(block, UnreadBlock):
        return InvalidParameter(f"{param}: {kind} blocks {ADVICE}", param=param)
    return InvalidParameter(f"{param}: a {kind} block is not allowed in a message of role {message.role}", param=param)


def is_billing_line(text: str) -> bool:
    """Return whether a text is Claude Code's billing line and nothing else.

    >>> is_billing_line("x-anthropic-billing-header: cc_version=2.1; cch=fa690;"), is_billing_line("Be brief.")
    (True, False)
    """
    return text.startswith(BILLING_LINE) and len(text.splitlines()) == 1


def without_billing_line(system: object) -> object:
    """Return the `system` field of an unvalidated body without a billing line as its first block."""
    if isinstance(system, list) and system and isinstance(system[0], dict):
        text = system[0].get("text")
        if isinstance(text, str) and is_billing_line(text):
            return system[1:]
    return system
