"""What a conversation is made of in Anthropic's shapes: blocks of text, of calls and their results, and of thoughts.

Knows shapes; `conversation.py` knows what they are for chat templates.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from ..request_fields import MAX_MESSAGES
from ..unread_parts import note


class TextBlock(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    text: str


class SystemBlock(msgspec.Struct, forbid_unknown_fields=True):
    """A text of the system's, which has blocks of no other type."""

    type: Literal["text"]  # a field, no tag: msgspec does not miss a tag where no other could stand
    text: str


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking", forbid_unknown_fields=True):
    """What an earlier reply thought. The signature is whatever the client got."""

    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(msgspec.Struct, tag_field="type", tag="redacted_thinking", forbid_unknown_fields=True):
    """A thought that another server has hidden: nobody here can read it."""

    data: str = ""


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use", forbid_unknown_fields=True):
    """A call that an earlier reply made."""

    id: str
    name: str
    input: dict[str, Any]


class UnreadBlock(msgspec.Struct):
    """What no model here can read. Its fields are not looked at."""

    @property
    def kind(self) -> str:
        return str(self.__struct_config__.tag)

    @property
    def text(self) -> str:
        """What stands for it in the result of a call."""
        return note(self.kind)


class ImageBlock(UnreadBlock, tag_field="type", tag="image"):
    pass


class DocumentBlock(UnreadBlock, tag_field="type", tag="document"):
    pass


class ToolResultBlock(msgspec.Struct, tag_field="type", tag="tool_result", forbid_unknown_fields=True):
    """What a call brought."""

    tool_use_id: str
    content: str | list[TextBlock | ImageBlock | DocumentBlock] | None = None
    is_error: bool | None = None

    @property
    def text(self) -> str:
        """All of it; a model is told of an error in words."""
        said = text_of(self.content or "")
        return f"Error: {said}" if self.is_error else said

    @property
    def unread(self) -> set[str]:
        """Names of what stands in it and cannot be read."""
        parts = self.content if isinstance(self.content, list) else ()
        return {f"messages.content.content.{part.kind}" for part in parts if isinstance(part, UnreadBlock)}


Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock | ImageBlock | DocumentBlock


class InputMessage(msgspec.Struct, forbid_unknown_fields=True):
    """One message of a conversation. One of the system stands where it is to be read."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]
    clear_at: Literal["next_user_message", "never"] | None = None  # of the system's: when it is no longer read

    @property
    def blocks(self) -> list[Block]:
        """Its content; a text is a block."""
        return [TextBlock(self.content)] if isinstance(self.content, str) else self.content


InputMessages = Annotated[list[InputMessage], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
System = str | list[SystemBlock]


def text_of(content: str | list[Any]) -> str:
    """A text, or the texts of blocks, joined as those of chat completions are."""
    return content if isinstance(content, str) else "".join(block.text for block in content)
