"""Types of Anthropic's messages: blocks of text, reasoning, tool calls and tool results.

Knows formats. `conversation.py` translates them for chat templates.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from ..request_fields import MAX_MESSAGES
from ..unread_parts import note


class TextBlock(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    text: str


class SystemBlock(msgspec.Struct, forbid_unknown_fields=True):
    """A text block of the system prompt, which has no other blocks."""

    type: Literal["text"]  # a field, not a tag: msgspec does not require the tag of a single type
    text: str


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking", forbid_unknown_fields=True):
    """Reasoning of an earlier reply. The signature is not checked."""

    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(msgspec.Struct, tag_field="type", tag="redacted_thinking", forbid_unknown_fields=True):
    """Encrypted reasoning of another server, which is dropped."""

    data: str = ""


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use", forbid_unknown_fields=True):
    """A tool call of an earlier reply."""

    id: str
    name: str
    input: dict[str, Any]


class UnreadBlock(msgspec.Struct):
    """A block that models cannot read. Its fields are not checked."""

    @property
    def kind(self) -> str:
        return str(self.__struct_config__.tag)

    @property
    def text(self) -> str:
        """The note that replaces it in a tool result."""
        return note(self.kind)


class ImageBlock(UnreadBlock, tag_field="type", tag="image"):
    pass


class DocumentBlock(UnreadBlock, tag_field="type", tag="document"):
    pass


class ToolResultBlock(msgspec.Struct, tag_field="type", tag="tool_result", forbid_unknown_fields=True):
    """The result of a tool call."""

    tool_use_id: str
    content: str | list[TextBlock | ImageBlock | DocumentBlock] | None = None
    is_error: bool | None = None

    @property
    def text(self) -> str:
        """Its text. An error is marked in the text, for the model to read."""
        text = text_of(self.content or "")
        return f"Error: {text}" if self.is_error else text

    @property
    def unread(self) -> set[str]:
        """Names of its blocks that models cannot read."""
        parts = self.content if isinstance(self.content, list) else ()
        return {f"messages.content.content.{part.kind}" for part in parts if isinstance(part, UnreadBlock)}


Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock | ImageBlock | DocumentBlock


class InputMessage(msgspec.Struct, forbid_unknown_fields=True):
    """One message of a conversation. A system message may be anywhere, and stays there."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]
    clear_at: Literal["next_user_message", "never"] | None = None  # of a system message: when to drop it

    @property
    def blocks(self) -> list[Block]:
        """Its content as blocks; a plain text is one block."""
        return [TextBlock(self.content)] if isinstance(self.content, str) else self.content


InputMessages = Annotated[list[InputMessage], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
System = str | list[SystemBlock]


def text_of(content: str | list[Any]) -> str:
    """Return a text, or the texts of blocks joined without a separator, as in Chat Completions."""
    return content if isinstance(content, str) else "".join(block.text for block in content)
