"""Make Anthropic's blocks of a reply while it is generated: thoughts, words and calls, one after the other.

Knows pieces of replies and events, not endpoints.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec

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


def read_cut(text: str) -> dict[str, Any]:
    """A JSON object, or what can be read of one that was cut.

    >>> read_cut('{"path": "a.py", "lines": [1, 2], "text": "x = \\\\"1')
    {'path': 'a.py', 'lines': [1, 2], 'text': 'x = "1'}
    """
    closers: list[str] = []
    is_in_text = is_escaped = False
    num_whole, closing = 0, "{}"  # up to the last value that is whole, and what ends it
    for place, letter in enumerate(text):
        if is_in_text:
            if is_escaped:
                is_escaped = False
            elif letter == "\\":
                is_escaped = True
            elif letter == '"':
                is_in_text = False
        elif letter == '"':
            is_in_text = True
        elif letter in "{[":
            closers.append("}" if letter == "{" else "]")
            num_whole, closing = place + 1, "".join(reversed(closers))
        elif letter in "}]" and closers:
            closers.pop()
            num_whole, closing = place + 1, "".join(reversed(closers))
        elif letter == ",":
            num_whole, closing = place, "".join(reversed(closers))
    end = "".join(reversed(closers))
    candidates = [text[:num_whole] + closing]
    if is_in_text:
        candidates.insert(0, f'{text[:-1] if is_escaped else text}"{end}')
    elif text.endswith('"'):  # else a number or a word, which may have gone on
        candidates.insert(0, text + end)
    for candidate in candidates:
        try:
            read = json.loads(candidate)
        except (ValueError, RecursionError):
            continue
        if isinstance(read, dict):
            return read
    return {}
