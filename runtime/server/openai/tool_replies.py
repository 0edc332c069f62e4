"""Calls of tools in the shapes of OpenAI's replies: whole, and piece by piece."""

from __future__ import annotations

from ...engine.completion import Delta, FinishReason
from .replies import (
    ChatDelta,
    ChatFinishReason,
    FunctionCallDelta,
    FunctionCallReply,
    ReplyMessage,
    ToolCallDelta,
    ToolCallReply,
)
from .tool_calls import Arguments, CallStart, Content, Piece, ReadReply, ToolCallReader


def message_of(reply: ReadReply) -> ReplyMessage:
    """A whole reply; one that only calls has no content."""
    if not reply.calls:
        return ReplyMessage(reply.content)
    calls = [ToolCallReply(call.call_id, FunctionCallReply(call.name, call.arguments)) for call in reply.calls]
    return ReplyMessage(reply.content or None, tool_calls=calls)


def deltas_of(delta: Delta, reader: ToolCallReader | None) -> list[ChatDelta]:
    """What a step of the engine adds to a stream; nothing while it is not certain what it is."""
    if reader is None:
        return [ChatDelta(content=delta.text)] if delta.text else []
    pieces = reader.push(delta.text)
    if delta.finish_reason:
        pieces += reader.finish()
    return [_delta_of(piece) for piece in pieces]


def finish_reason_of(reason: FinishReason, reader: ToolCallReader | None) -> ChatFinishReason:
    """Why a reply ended, in OpenAI's words: one that calls says so, unless it was cut, be it by a stop string."""
    return "tool_calls" if reason == "stop" and reader is not None and reader.has_whole_calls else reason


def _delta_of(piece: Piece) -> ChatDelta:
    match piece:
        case Content(text):
            return ChatDelta(content=text)
        case CallStart(index, call_id, name):
            call = ToolCallDelta(index, FunctionCallDelta("", name), call_id, "function")
        case Arguments(index, text):
            call = ToolCallDelta(index, FunctionCallDelta(text))
    return ChatDelta(tool_calls=[call])
