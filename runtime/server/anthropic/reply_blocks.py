"""Make Anthropic's blocks of a reply while it is generated: thoughts, words and calls, one after the other.

Knows pieces of replies and events, not endpoints.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ...chat.tools.cut_arguments import read_cut
from ...chat.tools.tool_calls import Arguments, CallStart, Content, Piece, ToolCallReader
from ...engine.completion import Delta
from .replies import (
    BlockDelta,
    BlockReply,
    BlockStart,
    BlockStop,
    InputJsonDelta,
    SignatureDelta,
    TextBlockReply,
    TextDelta,
    ThinkingBlockReply,
    ThinkingDelta,
    ToolUseBlockReply,
)

SIGNATURE = "unsigned"  # clients drop thoughts without a signature, and thoughts that come back are not checked


class ReplyBlocks:
    """The blocks of one reply.

    Args:
        reader: finds the calls; None: there are none.

    Attributes:
        blocks: all so far; the input of a call is there when its block has ended.
    """

    def __init__(self, reader: ToolCallReader | None) -> None:
        self.reader = reader
        self.blocks: list[BlockReply] = []
        self._is_open = False  # the last block
        self._arguments = ""  # of the last block

    def push(self, delta: Delta) -> Iterator[msgspec.Struct]:
        """The events of a delta; with the last one those that end the last block."""
        if delta.thought:
            yield from self._begin(ThinkingBlockReply, ThinkingBlockReply(""))
            yield self._changed(ThinkingDelta(delta.thought))
        yield from self._said(delta.text)
        if delta.finish_reason is not None:
            if self.reader is not None:
                for piece in self.reader.finish():
                    yield from self._add(piece)
            yield from self._end()

    def _said(self, text: str) -> Iterator[msgspec.Struct]:
        pieces: list[Piece] = [Content(text)] if self.reader is None else list(self.reader.push(text))
        for piece in pieces:
            yield from self._add(piece)

    def _add(self, piece: Piece) -> Iterator[msgspec.Struct]:
        match piece:
            case Content(text) if text:
                yield from self._begin(TextBlockReply, TextBlockReply(""))
                yield self._changed(TextDelta(text))
            case CallStart(_, call_id, name):
                yield from self._begin(None, ToolUseBlockReply(call_id, name, {}))
            case Arguments(_, text):
                yield self._changed(InputJsonDelta(text))

    def _begin(self, kind: type[BlockReply] | None, block: BlockReply) -> Iterator[msgspec.Struct]:
        """Go on with the last block if it is of a kind, else begin another."""
        if self._is_open and kind is not None and isinstance(self.blocks[-1], kind):
            return
        yield from self._end()
        yield BlockStart(len(self.blocks), msgspec.structs.replace(block))  # this one is filled further below
        self.blocks.append(block)
        self._is_open, self._arguments = True, ""

    def _changed(self, delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta) -> BlockDelta:
        match self.blocks[-1], delta:
            case TextBlockReply() as block, TextDelta(text):
                block.text += text
            case ThinkingBlockReply() as block, ThinkingDelta(thinking):
                block.thinking += thinking
            case ThinkingBlockReply() as block, SignatureDelta(signature):
                block.signature = signature
            case ToolUseBlockReply(), InputJsonDelta(partial_json):
                self._arguments += partial_json
        return BlockDelta(len(self.blocks) - 1, delta)

    def _end(self) -> Iterator[msgspec.Struct]:
        if not self._is_open:
            return
        match self.blocks[-1]:
            case ThinkingBlockReply():
                yield self._changed(SignatureDelta(SIGNATURE))
            case ToolUseBlockReply() as call:
                call.input = read_cut(self._arguments)
        self._is_open = False
        yield BlockStop(len(self.blocks) - 1)
