"""Make the items of a response while it is generated: a thought, words and calls, each with the events of its own.

Knows the engine's deltas and OpenAI's items; `responses.py` numbers the events.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from typing import Any

import msgspec

from ...chat.tools.cut_arguments import read_cut
from ...chat.tools.tool_calls import Arguments, CallStart, Content, Piece, ToolCallReader
from ..request_log import new_id
from .replies import ChatLogprob
from .response_items import sealed
from .response_replies import (
    OutputCustomCall,
    OutputFunctionCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputTextPart,
    ReasoningPart,
    Status,
)
from .response_tools import OfferedTool

Event = tuple[str, dict[str, Any]]
"""Its name behind `response.`, and its fields."""


class ResponseOutput:
    """The items of one reply.

    Args:
        reader: finds the calls; None: there are none.
        tools: by the names that the model knows.
        seals: whether a thought comes as `encrypted_content`, too.

    Attributes:
        items: all so far, the last one as far as it is.
    """

    def __init__(self, reader: ToolCallReader | None, tools: Mapping[str, OfferedTool], *, seals: bool) -> None:
        self.items: list[OutputItem] = []
        self._reader, self._tools, self._seals = reader, tools, seals
        self._is_open = False  # the last item
        self._arguments = ""  # of the last call
        self._logprobs: list[ChatLogprob] = []  # of words that are not sent yet

    @property
    def has_cut_call(self) -> bool:
        """Whether a call began, and its arguments are not complete."""
        return self._reader is not None and self._reader.num_calls > 0 and not self._reader.has_whole_calls

    def push(self, text: str, thought: str, logprobs: list[ChatLogprob]) -> Iterator[Event]:
        """The events of what is said next; `logprobs` are those of the words."""
        if thought:
            item = yield from self._begin(OutputReasoning(new_id("rs_")))
            item.content[0].text += thought
            yield "reasoning_text.delta", {**self._place(), "delta": thought}
        self._logprobs += logprobs
        for piece in [Content(text)] if self._reader is None else self._reader.push(text):
            yield from self._add(piece)

    def finish(self, status: Status = "completed") -> Iterator[Event]:
        """The last events: those of what was held back, and of the end. There is always an item."""
        if self._reader is not None:
            for piece in self._reader.finish():
                yield from self._add(piece)
        if self._logprobs and (not self.items or isinstance(self.items[-1], OutputMessage)):
            yield from self._words("")
        if not self.items:
            yield from self._begin(OutputMessage(new_id("msg_")))
        yield from self._end("incomplete" if status != "completed" or self.has_cut_call else "completed")

    def _add(self, piece: Piece) -> Iterator[Event]:
        match piece:
            case Content(text) if text:
                yield from self._words(text)
            case CallStart(_, call_id, name):
                yield from self._begin(self._call(call_id, name))
            case Arguments(_, text):
                self._arguments += text
                match self.items[-1]:
                    case OutputFunctionCall() as call:
                        call.arguments += text
                        yield "function_call_arguments.delta", {**self._place(), "delta": text}

    def _words(self, text: str) -> Iterator[Event]:
        item = yield from self._begin(OutputMessage(new_id("msg_")))
        [part] = item.content
        logprobs, self._logprobs = self._logprobs, []
        part.text += text
        if logprobs:
            part.logprobs = [*part.logprobs, *logprobs]
        yield "output_text.delta", {**self._place(), "delta": text, "logprobs": logprobs}

    def _call(self, call_id: str, name: str) -> OutputFunctionCall | OutputCustomCall:
        tool = self._tools[name]
        namespace = msgspec.UNSET if tool.namespace is None else tool.namespace
        if tool.is_custom:
            return OutputCustomCall(new_id("ctc_"), call_id, tool.name, namespace=namespace)
        return OutputFunctionCall(new_id("fc_"), call_id, tool.name, namespace=namespace)

    def _begin(self, item: Any) -> Generator[Event, None, Any]:
        """Go on with the last item if it is of this kind, and no call; else begin another. Returns it."""
        is_call = isinstance(item, OutputFunctionCall | OutputCustomCall)
        if self._is_open and not is_call and type(self.items[-1]) is type(item):
            return self.items[-1]
        yield from self._end("completed")
        yield "output_item.added", {"output_index": len(self.items), "item": _copy(item)}
        self.items.append(item)
        self._is_open, self._arguments = True, ""
        if not is_call:
            part = OutputTextPart("") if isinstance(item, OutputMessage) else ReasoningPart("")
            item.content = [part]
            yield "content_part.added", {**self._place(), "part": _copy(part)}
        return item

    def _end(self, status: Status) -> Iterator[Event]:
        if not self._is_open:
            return
        self._is_open = False
        item = self.items[-1]
        item.status = status
        match item:
            case OutputMessage(content=[part]):
                yield "output_text.done", {**self._place(), "text": part.text, "logprobs": part.logprobs}
                yield "content_part.done", {**self._place(), "part": part}
            case OutputReasoning(content=[part]):
                if self._seals:
                    item.encrypted_content = sealed(part.text)
                yield "reasoning_text.done", {**self._place(), "text": part.text}
                yield "content_part.done", {**self._place(), "part": part}
            case OutputFunctionCall():
                done = {"arguments": item.arguments, "name": item.name}
                yield "function_call_arguments.done", {**self._place(), **done}
            case OutputCustomCall():
                said = read_cut(self._arguments).get("input", "")
                item.input = said if isinstance(said, str) else ""
                yield "custom_tool_call_input.delta", {**self._place(), "delta": item.input}
                yield "custom_tool_call_input.done", {**self._place(), "input": item.input}
        yield "output_item.done", {"output_index": len(self.items) - 1, "item": _copy(item)}

    def _place(self) -> dict[str, Any]:
        item = self.items[-1]
        place = {"item_id": item.id, "output_index": len(self.items) - 1}
        return place if isinstance(item, OutputFunctionCall | OutputCustomCall) else {**place, "content_index": 0}


def _copy(value: Any) -> Any:
    """A struct as it is now: an event may be sent after more was said."""
    return msgspec.structs.replace(value)
