"""The messages of a chat completion request, and their translation for chat templates.

Knows their format, not how they are rendered.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from ...chat.reasoning_format import FIELD as REASONING_FIELD
from ..request_fields import MAX_MESSAGES
from ..unread_parts import note
from .tools import CalledFunction, CallOfMessage, id_of_call


class MessagePart(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a message. Parts other than text cannot be read by models, and their fields are not checked."""

    type: str = "text"
    text: str | None = None  # None for other types
    refusal: str | None = None  # an earlier reply's refusal to answer
    image_url: Any = None
    input_audio: Any = None
    video_url: Any = None
    file: Any = None

    def __post_init__(self) -> None:
        if not self.is_unread and self.own_text is None:
            raise ValueError(
                f"a part of the type {self.type!r:.60} has no {self.type}; send one, or leave the part out"
            )

    @property
    def is_unread(self) -> bool:
        """Return whether models cannot read the part."""
        return self.type not in ("text", "refusal")

    @property
    def own_text(self) -> str | None:
        """Its text, or None."""
        return self.refusal if self.type == "refusal" else self.text

    @property
    def template_text(self) -> str:
        """Its text, or the note that replaces it in a tool result."""
        return note(_KINDS.get(self.type, "attachment")) if self.is_unread else self.own_text or ""


_KINDS = {"image_url": "image", "input_audio": "audio", "video_url": "video", "file": "document"}


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One message of a conversation.

    It has the fields of replies, too, because OpenAI's clients send a reply back as they got it.
    """

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[MessagePart] | None = None  # None if a reply only calls tools
    name: str | None = None
    refusal: str | None = None  # of a reply
    annotations: list[Any] | None = None  # of a reply; ignored
    audio: Any = None  # of another model's spoken reply; dropped
    function_call: CalledFunction | None = None  # of a reply: the older form of tool_calls
    tool_calls: list[CallOfMessage] | None = None  # of a reply
    tool_call_id: str | None = None  # of a tool result
    reasoning_content: str | None = None  # of a reply
    reasoning: str | None = None  # another name for reasoning_content
    parsed: Any = None  # added by OpenAI's client to a structured reply; ignored

    def __post_init__(self) -> None:
        if self.content is None and not (self.calls or self.reasoning_text or self.refusal or self.audio):
            raise ValueError("a message without tool_calls needs content; it is missing or null")
        if self.unread and self.role not in ("tool", "function"):
            kind = self.unread[0].type
            raise ValueError(f"a part has the type {kind!r:.60}; models read and write text only: send text")
        for name in ("refusal", "audio"):
            if getattr(self, name) and self.role != "assistant":
                raise ValueError(f"{name} is set, and role is {self.role!r}; only assistant messages can have it")
        if self.reasoning_text and self.role != "assistant":
            raise ValueError(
                f"reasoning_content is set, and role is {self.role!r}; only assistant messages can have it"
            )
        if self.calls and self.role != "assistant":
            raise ValueError(f"tool_calls is set, and role is {self.role!r}; only assistant messages can have it")
        if self.role == "function" and self.name is None:
            raise ValueError("a message of the role 'function' needs the function's name; it is missing")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise ValueError("tool_call_id and the role 'tool' belong together; one of them is missing")

    @property
    def unread(self) -> list[MessagePart]:
        """Parts that models cannot read."""
        return [part for part in self.content if part.is_unread] if isinstance(self.content, list) else []

    @property
    def calls(self) -> list[CallOfMessage]:
        """The tool calls of a reply, in either form."""
        if self.tool_calls or self.function_call is None:
            return self.tool_calls or []
        return [CallOfMessage(id_of_call(self.function_call.name), self.function_call)]

    @property
    def reasoning_text(self) -> str | None:
        """The reasoning of a reply, by either name."""
        return self.reasoning_content or self.reasoning

    def to_template(self) -> dict[str, object]:
        """Return the message for chat templates: its text parts joined to one string, and `developer` as `system`."""
        content = self.content or self.refusal or ""
        content = content if isinstance(content, str) else "".join(part.template_text for part in content)
        message: dict[str, object] = {"role": _ROLES.get(self.role, self.role), "content": content}
        if self.reasoning_text:
            message[REASONING_FIELD] = self.reasoning_text
        if self.calls:
            message["tool_calls"] = [call.to_template() for call in self.calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        elif self.role == "function":
            message["tool_call_id"] = id_of_call(self.name or "")
        return message if self.name is None else message | {"name": self.name}


_ROLES = {"developer": "system", "function": "tool"}  # names in chat templates
Conversation = Annotated[list[ChatMessage], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
