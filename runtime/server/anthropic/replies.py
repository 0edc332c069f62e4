"""Types of the replies of `/v1/messages`: Anthropic's message, and the events of its stream.

Knows formats, not how they are filled.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ..openai.replies import PromptProgressReply, PromptTokensDetails, TruncationReply

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
PING = b'event: ping\ndata: {"type": "ping"}\n\n'


class ThinkingBlockReply(msgspec.Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""


class TextBlockReply(msgspec.Struct, tag_field="type", tag="text"):
    text: str
    citations: None = None


class ToolUseBlockReply(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


BlockReply = ThinkingBlockReply | TextBlockReply | ToolUseBlockReply


class ThinkingTokens(msgspec.Struct):
    thinking_tokens: int


class MessagesUsage(msgspec.Struct, kw_only=True):
    """Token counts. The prompt's tokens are the sum of the first three.

    Each prompt token was cached or computed. Computed ones count as cache creation if the request has `cache_control`,
    else as input.
    """

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens | msgspec.UnsetType = msgspec.UNSET  # unset: no reasoning, or not the end
    service_tier: Literal["standard"] = "standard"
    prompt_tokens_details: PromptTokensDetails | msgspec.UnsetType = msgspec.UNSET  # radixlm's; unset: not the end


class MessageReply(msgspec.Struct, kw_only=True):
    """A message, whole or at the beginning of a stream."""

    id: str
    model: str
    content: list[BlockReply]
    usage: MessagesUsage
    stop_reason: StopReason | None = None  # None before the end
    stop_sequence: str | None = None
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    truncation: TruncationReply | msgspec.UnsetType = msgspec.UNSET  # radixlm's, on request
    ended_in_reasoning: bool | msgspec.UnsetType = msgspec.UNSET  # radixlm's; unset: it did not


class CountTokensReply(msgspec.Struct):
    input_tokens: int


class TextDelta(msgspec.Struct):
    text: str
    type: Literal["text_delta"] = "text_delta"


class ThinkingDelta(msgspec.Struct):
    thinking: str
    type: Literal["thinking_delta"] = "thinking_delta"


class SignatureDelta(msgspec.Struct):
    signature: str
    type: Literal["signature_delta"] = "signature_delta"


class InputJsonDelta(msgspec.Struct):
    partial_json: str
    type: Literal["input_json_delta"] = "input_json_delta"


class MessageStart(msgspec.Struct):
    message: MessageReply
    type: Literal["message_start"] = "message_start"


class Ping(msgspec.Struct):
    prompt_progress: PromptProgressReply | msgspec.UnsetType = msgspec.UNSET  # radixlm's, on request
    type: Literal["ping"] = "ping"


class BlockStart(msgspec.Struct):
    index: int
    content_block: BlockReply
    type: Literal["content_block_start"] = "content_block_start"


class BlockDelta(msgspec.Struct):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta
    type: Literal["content_block_delta"] = "content_block_delta"


class BlockStop(msgspec.Struct):
    index: int
    type: Literal["content_block_stop"] = "content_block_stop"


class StopDelta(msgspec.Struct):
    stop_reason: StopReason
    stop_sequence: str | None = None
    ended_in_reasoning: bool | msgspec.UnsetType = msgspec.UNSET  # radixlm's, as in the whole message


class MessageDelta(msgspec.Struct):
    delta: StopDelta
    usage: MessagesUsage
    type: Literal["message_delta"] = "message_delta"


class MessageStop(msgspec.Struct):
    type: Literal["message_stop"] = "message_stop"
