"""Make the items of a response while it is generated: a thought, words and calls, each with the events of its own.

Knows the engine's deltas and OpenAI's items; `responses.py` numbers the events.
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
"""Its name behind `response.`, and its fields."""


class ResponseOutput:
    """The items of one reply.

    Args:
        reply: makes the events that items are made of; fresh.
        tools: by the names that the model knows.
        seals: whether a thought comes as `encrypted_content`, too.

    Attributes:
        items: all so far; one has its text when it has ended.
    """

    def __init__(self, reply: ReplyEvents, tools: Mapping[str, OfferedTool], *, seals: bool) -> None:
        self.items: list[OutputItem] = []
        self._reply, self._tools, self._seals = reply, tools, seals
        self._logprobs: list[ChatLogprob] = []  # of words that are not sent yet
        self._sent_logprobs: list[ChatLogprob] = []  # of the last item

    def push(self, delta: Delta, logprobs: list[ChatLogprob]) -> Iterator[Event]:
        """The events of what is said next; `logprobs` are those of the words."""
        self._logprobs += logprobs
        return self._encoded(self._reply.push(delta))

    def finish(self, status: Status = "completed") -> Iterator[Event]:
        """The last events: those of what was held back, and of the end. There is always an item."""
        yield from self._encoded(self._reply.flush())
        if not self.items or (self._logprobs and isinstance(self.items[-1], OutputMessage)):
            yield from self._encoded(self._reply.open("text"))
            if self._logprobs:
                yield self._words(self._reply.parts[-1], "")
        is_cut = status != "completed" or self._reply.has_cut_call
        yield from self._encoded(self._reply.end(), "incomplete" if is_cut else "completed")

    def _encoded(self, events: Sequence[ReplyEvent], status: Status = "completed") -> Iterator[Event]:
        """The same in OpenAI's words; `status` is that of an item that ends."""
        for event in events:
            match event:
                case PartBegin(part):
                    yield from self._begin(part)
                case PartText(ReplyPart(kind="text") as part, text):
                    yield self._words(part, text)
                case PartText(ReplyPart(kind="reasoning") as part, text):
                    yield "reasoning_text.delta", {**self._place(part), "delta": text}
                case PartText(part, text) if isinstance(self.items[part.index], OutputFunctionCall):
                    yield "function_call_arguments.delta", {**self._place(part), "delta": text}
                case PartEnd(part):
                    yield from self._end(part, status)

    def _words(self, part: ReplyPart, text: str) -> Event:
        logprobs, self._logprobs = self._logprobs, []
        self._sent_logprobs += logprobs
        return "output_text.delta", {**self._place(part), "delta": text, "logprobs": logprobs}

    def _begin(self, part: ReplyPart) -> Iterator[Event]:
        item = self._item(part)
        yield "output_item.added", {"output_index": part.index, "item": _copy(item)}
        self.items.append(item)
        self._sent_logprobs = []
        if part.call is None:
            content = OutputTextPart("") if part.kind == "text" else ReasoningPart("")
            yield "content_part.added", {**self._place(part), "part": content}

    def _item(self, part: ReplyPart) -> OutputItem:
        if part.call is None:
            return OutputMessage(new_id("msg_")) if part.kind == "text" else OutputReasoning(new_id("rs_"))
        call_id, tool = part.call.call_id, self._tools[part.call.name]
        namespace = msgspec.UNSET if tool.namespace is None else tool.namespace
        if tool.is_custom:
            return OutputCustomCall(new_id("ctc_"), call_id, tool.name, namespace=namespace)
        return OutputFunctionCall(new_id("fc_"), call_id, tool.name, namespace=namespace)

    def _end(self, part: ReplyPart, status: Status) -> Iterator[Event]:
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
                said = read_cut(text).get("input", "")
                item.input = said if isinstance(said, str) else ""
                yield "custom_tool_call_input.delta", {**place, "delta": item.input}
                yield "custom_tool_call_input.done", {**place, "input": item.input}
        yield "output_item.done", {"output_index": part.index, "item": _copy(item)}

    def _place(self, part: ReplyPart) -> dict[str, Any]:
        place = {"item_id": self.items[part.index].id, "output_index": part.index}
        return place if part.call is not None else {**place, "content_index": 0}


def _copy(value: Any) -> Any:
    """A struct as it is now: an event may be sent after more was said."""
    return msgspec.structs.replace(value)
