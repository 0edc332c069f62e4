"""One reply in Ollama's format, whole or streamed as lines of JSON.

Both endpoints that generate use it, each with its own type of line. Knows replies, not requests.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...chat.tools.arguments import read_cut
from ...engine.completion import Completion, Delta
from ..choices import Choices
from ..errors import shaped
from ..http.connection import while_connected
from ..http.sse import EventStream
from ..openai.replies import PromptProgressReply, TruncationReply
from ..openai.reply_parts import chat_logprobs, usage_of
from ..reply_events import PartEnd, PartText, ReplyEvent, ReplyEvents, ReplyPart
from ..served import Served, json_response, whole_answer
from .replies import CalledFunctionReply, CallReply, DoneReason, OllamaReply, nanoseconds, timestamp

MEDIA_TYPE = "application/x-ndjson"


class MakeLine(Protocol):
    """Makes a reply or line from text, reasoning and tool calls, with further fields of `OllamaReply`."""

    def __call__(
        self, content: str = "", thinking: str = "", calls: Sequence[CallReply] = (), **fields: Any
    ) -> OllamaReply: ...


@dataclass(frozen=True)
class Answer:
    """The response to one request, whole or as lines.

    Args:
        name: the model's name in the request.
        events: converts the engine's deltas into events.
        truncation: the dropped messages; unset if the request does not truncate.
    """

    served: Served
    name: str
    choices: Choices
    events: ReplyEvents
    make_line: MakeLine
    truncation: TruncationReply | msgspec.UnsetType = msgspec.UNSET

    async def respond(self, request: Request, *, streams: bool) -> Response:
        """Return the response to the request, whole or as a stream."""
        if streams:
            return EventStream(
                self.lines(),
                self.choices,
                encode=_line,
                encode_error=_error_line,
                done=b"",
                keep_alive_s=self.served.options.keep_alive_s,
                comment=_line(self._line()),  # a comment must be JSON, too
                media_type=MEDIA_TYPE,
            )
        async with self.choices:
            [completion] = await while_connected(request.receive, self.choices.results())
        return await whole_answer([completion], lambda: self.whole(completion))

    def whole(self, completion: Completion) -> OllamaReply:
        """Return the whole reply."""
        self.events.push(Delta.whole(completion))
        texts = {
            kind: "".join(part.text for part in self.events.parts if part.kind == kind)
            for kind in ("text", "reasoning")
        }
        calls = [call for part in self.events.parts if (call := self._call(part)) is not None]
        whole = self._end(completion, texts["text"], texts["reasoning"], calls)
        if (logprobs := chat_logprobs(self.served, completion.logprobs)) is not None:
            whole.logprobs = logprobs.content
        return whole

    async def lines(self) -> AsyncGenerator[OllamaReply]:
        """Yield the reply as it is generated, each tool call in one piece, and at the end the counts and times."""
        async for _, delta in self.choices:
            if delta.progress is not None:
                yield self._line(prompt_progress=PromptProgressReply.of(delta.progress))
            events = self.events.push(delta)
            if delta.finish_reason is not None:
                events += self.events.end()
            lines = [line for event in events for line in self._lines_of(event)]
            if (logprobs := chat_logprobs(self.served, delta.logprobs)) is not None and logprobs.content:
                lines = lines or [self._line()]
                lines[0].logprobs = logprobs.content
            for line in lines:
                yield line
        yield self._end(self.choices.result(0))

    def _lines_of(self, event: ReplyEvent) -> Iterator[OllamaReply]:
        """Yield the line of an event that a client sees: text, reasoning, or the end of a tool call."""
        match event:
            case PartText(part, text) if part.kind == "text":
                yield self._line(text)
            case PartText(part, text) if part.kind == "reasoning":
                yield self._line(thinking=text)
            case PartEnd(part) if (call := self._call(part)) is not None:
                yield self._line(calls=[call])

    def _call(self, part: ReplyPart) -> CallReply | None:
        """Return a part as a tool call; None if it is not one, or is incomplete: clients would run it."""
        call = part.call
        if call is None or (self.events.has_cut_call and part is self.events.parts[-1]):
            return None
        return CallReply(call.call_id, CalledFunctionReply(call.name, read_cut(part.text), call.index))

    def _line(
        self, content: str = "", thinking: str = "", calls: Sequence[CallReply] = (), **fields: Any
    ) -> OllamaReply:
        return self.make_line(content, thinking, calls, model=self.name, created_at=timestamp(time.time()), **fields)

    def _end(
        self, completion: Completion, content: str = "", thinking: str = "", calls: Sequence[CallReply] = ()
    ) -> OllamaReply:
        """Return the last line, or the whole reply, with the finish reason, the counts and times."""
        times, usage = completion.timings, completion.usage
        queue_s = times.queue_s or 0.0
        first_s = times.total_s if times.time_to_first_token_s is None else times.time_to_first_token_s
        tells = self.served.options.tells_cached_text
        return self._line(
            content,
            thinking,
            calls,
            done=True,
            done_reason="length" if completion.finish_reason == "length" else "stop",
            total_duration=nanoseconds(times.total_s),
            load_duration=nanoseconds(queue_s),
            prompt_eval_count=usage.prompt_tokens,
            prompt_eval_duration=nanoseconds(first_s - queue_s),
            eval_count=usage.completion_tokens,
            eval_duration=nanoseconds(times.total_s - first_s),
            prompt_tokens_details=usage_of([completion], tells_cached_text=tells).prompt_tokens_details,
            truncation=self.truncation,
        )


def loaded(make_line: MakeLine, name: str, stays_loaded_s: float | None) -> Response:
    """Return the response to a request without a prompt, which only loads or unloads the model."""
    reason: DoneReason = "unload" if stays_loaded_s == 0 else "load"
    return json_response(make_line(model=name, created_at=timestamp(time.time()), done=True, done_reason=reason))


def _line(value: msgspec.Struct) -> bytes:
    return msgspec.json.encode(value) + b"\n"


def _error_line(error: Exception, path: str) -> bytes:
    return _line(shaped(error, path)[1])
