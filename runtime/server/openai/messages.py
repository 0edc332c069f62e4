"""The messages of a conversation, as clients send them and as chat templates know them.

Knows their shape, not how they are rendered.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from ...chat.thought_format import FIELD as THOUGHT_FIELD
from ..limits import MAX_MESSAGES
from .tools import CallOfMessage


class TextPart(msgspec.Struct, forbid_unknown_fields=True):
    text: str
    type: Literal["text"] = "text"


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One message; parts of text are joined, for templates expect one string.

    The fields that can only be null are those of a reply: OpenAI's clients send a reply back as they got it.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None  # None: a reply that only calls tools
    name: str | None = None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: list[CallOfMessage] | None = None  # of a reply
    tool_call_id: str | None = None  # of the call that a tool answers
    reasoning_content: str | None = None  # what a reply thought, sent back
    reasoning: str | None = None  # another name of it
    parsed: Any = None  # what OpenAI's client made of a structured reply, and sends back: nothing is done with it

    def __post_init__(self) -> None:
        if self.content is None and not self.tool_calls and not self.thought:
            raise ValueError("a message without tool_calls needs content; it is missing or null")
        if self.thought and self.role != "assistant":
            raise ValueError(f"reasoning_content is set, and role is {self.role!r}; only the assistant thinks")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls is set, and role is {self.role!r}; only the assistant calls tools")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError("tool_call_id and the role 'tool' belong together; one of them is missing")

    @property
    def thought(self) -> str | None:
        """What a reply thought, by whichever name it is sent back."""
        return self.reasoning_content or self.reasoning

    def to_template(self) -> dict[str, object]:
        """The message as chat templates know it; they know `developer` as `system`."""
        content = self.content or ""
        content = content if isinstance(content, str) else "".join(part.text for part in content)
        role = "system" if self.role == "developer" else self.role
        message: dict[str, object] = {"role": role, "content": content}
        if self.thought:
            message[THOUGHT_FIELD] = self.thought
        if self.tool_calls:
            message["tool_calls"] = [call.to_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message if self.name is None else message | {"name": self.name}


Conversation = Annotated[list[ChatMessage], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
