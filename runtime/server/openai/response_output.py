"""Build the output items of a response while it is generated: reasoning, text and tool calls, with their events.

Knows the engine's deltas and OpenAI's items. `responses.py` numbers the events.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ...chat.tools.arguments import read_cut
from ...engine.completion import Delta
from ..reply_events import PartBegin, PartEnd, PartText, ReplyEvent, ReplyEvents, ReplyPart
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
"""The name of an event after `response.`, and its fields."""


class ResponseOutput:
    """The output items of one response.

    Args:
        reply: the events of the reply, none of which was made yet.
        tools: the client's tools, by the names that the model uses.
        seals: add `encrypted_content` to reasoning.

    Attributes:
        items: all items so far; an item gets its text when it ends.
    """

    def __init__(self, reply: ReplyEvents, tools: Mapping[str, OfferedTool], *, seals: bool) -> None:
        self.items: list[OutputItem] = []
        self._reply, self._tools, self._seals = reply, tools, seals
        self._logprobs: list[ChatLogprob] = []  # of text that is not sent yet
        self._sent_logprobs: list[ChatLogprob] = []  # of the last item

    def push(self, delta: Delta, logprobs: list[ChatLogprob]) -> Iterator[Event]:
        """Return the events of the next delta. `logprobs` are those of its text."""
        self._logprobs += logprobs
        return self._encoded(self._reply.push(delta))

    def finish(self, status: Status = "completed") -> Iterator[Event]:
        """Yield the last events: those of held-back text, and of the end. Adds an empty message if there is no item."""
        yield from self._encoded(self._reply.flush())
        if not self.items or (self._logprobs and isinstance(self.items[-1], OutputMessage)):
            yield from self._encoded(self._reply.open("text"))
            if self._logprobs:
                yield self._text_delta(self._reply.parts[-1], "")
        is_cut = status != "completed" or self._reply.has_cut_call
        yield from self._encoded(self._reply.end(), "incomplete" if is_cut else "completed")

    def _encoded(self, events: Sequence[ReplyEvent], status: Status = "completed") -> Iterator[Event]:
        """Yield OpenAI's events for events of the reply. `status` is that of an item that ends."""
        for event in events:
            match event:
                case PartBegin(part):
                    yield from self._begin(part)
                case PartText(ReplyPart(kind="text") as part, text):
                    yield self._text_delta(part, text)
                case PartText(ReplyPart(kind="reasoning") as part, text):
                    yield "reasoning_text.delta", {**self._place(part), "delta": text}
                case PartText(part, text) if isinstance(self.items[part.index], OutputFunctionCall):
                    yield "function_call_arguments.delta", {**self._place(part), "delta": text}
                case PartEnd(part):
                    yield from self._end(part, status)

    def _text_delta(self, part: ReplyPart, text: str) -> Event:
        """Return the event of a piece of text, with the logprobs of its tokens."""
        logprobs, self._logprobs = self._logprobs, []
        self._sent_logprobs += logprobs
        return "output_text.delta", {**self._place(part), "delta": text, "logprobs": logprobs}

    def _begin(self, part: ReplyPart) -> Iterator[Event]:
        """Yield the events that begin an output item."""
        item = self._item(part)
        yield "output_item.added", {"output_index": part.index, "item": _copy(item)}
        self.items.append(item)
        self._sent_logprobs = []
        if part.call is None:
            content = OutputTextPart("") if part.kind == "text" else ReasoningPart("")
            yield "content_part.added", {**self._place(part), "part": content}

    def _item(self, part: ReplyPart) -> OutputItem:
        """Return the empty output item of a part of the reply: a message, reasoning or a call."""
        if part.call is None:
            return OutputMessage(new_id("msg_")) if part.kind == "text" else OutputReasoning(new_id("rs_"))
        call_id, tool = part.call.call_id, self._tools[part.call.name]
        namespace = msgspec.UNSET if tool.namespace is None else tool.namespace
        if tool.is_custom:
            return OutputCustomCall(new_id("ctc_"), call_id, tool.name, namespace=namespace)
        return OutputFunctionCall(new_id("fc_"), call_id, tool.name, namespace=namespace)

    def _end(self, part: ReplyPart, status: Status) -> Iterator[Event]:
        """Complete an output item, and yield the events that end it."""
        item, place, text = self.items[part.index], self._place(part), part.text
        item.status = status
        match item:
            case OutputMessage():
                words = OutputTextPart(text, logprobs=self._sent_logprobs)
                item.content = [words]
                yield "output_text.done", {**place, "text": text, "logprobs": words.logprobs}
                yield "content_part.done", {**place, "part": words}
            case OutputReasoning():
                thought = ReasoningPart(text)
                item.content = [thought]
                if self._seals:
                    item.encrypted_content = sealed(text)
                yield "reasoning_text.done", {**place, "text": text}
                yield "content_part.done", {**place, "part": thought}
            case OutputFunctionCall():
                item.arguments = text
                yield "function_call_arguments.done", {**place, "arguments": text, "name": item.name}
            case OutputCustomCall():
                argument = read_cut(text).get("input", "")
                item.input = argument if isinstance(argument, str) else ""
                yield "custom_tool_call_input.delta", {**place, "delta": item.input}
                yield "custom_tool_call_input.done", {**place, "input": item.input}
        yield "output_item.done", {"output_index": part.index, "item": _copy(item)}

    def _place(self, part: ReplyPart) -> dict[str, Any]:
        place = {"item_id": self.items[part.index].id, "output_index": part.index}
        return place if part.call is not None else {**place, "content_index": 0}


def _copy(value: Any) -> Any:
    """Return a copy of a struct, because an event may be sent after the item has changed."""
    return msgspec.structs.replace(value)
