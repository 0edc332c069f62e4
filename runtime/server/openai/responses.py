"""`POST /v1/responses`: OpenAI's newer way to ask for a reply, whole or as events.

Nothing is stored: a conversation goes on by sending it again, which the prefix cache makes cheap.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...engine.completion import Completion, Delta, TokenLogprob
from ...engine.sampling_params import SamplingParams
from ..app_state import AppState
from ..asked_chat import AskedChat
from ..choices import Choices
from ..errors import HTTPError, describe
from ..field_policy import IgnoredFields
from ..http.disconnect import while_connected
from ..http.sse import EventStream, named_event
from ..lenient.shapes import RESPONSES, relax, relaxing
from ..lenient.values import relax_values
from ..limits import require_small
from ..request_log import RequestRecord, new_id, record_of
from ..truncation import Truncation
from .foreign_items import leave_out_foreign
from .replies import ChatLogprob, PromptProgressReply, TruncationReply
from .reply_parts import chat_logprobs, usage_of
from .response_format import named_grammar
from .response_items import History
from .response_output import ResponseOutput
from .response_replies import (
    IncompleteDetails,
    OutputTokensDetails,
    ReasoningReply,
    ResponseError,
    ResponseEvent,
    ResponseReply,
    ResponseUsage,
    Status,
)
from .response_requests import AnyText, ReasoningOptions, ResponseRequest, TextOptions
from .response_tools import FunctionOfResponses, OfferedTool, offered, response_tool_use

_LEAVE_OUT = relaxing(RESPONSES, ResponseRequest, leave_out_foreign)
_TRUNCATION: Mapping[str | None, Truncation | None] = {"auto": "middle", "disabled": "none", None: None}


_NOTHING_ASKED: Mapping[str, object] = {
    "instructions": None,
    "metadata": {},
    "user": None,
    "safety_identifier": None,
    "prompt_cache_key": None,
    "tools": [],
    "tool_choice": "auto",
    "text": TextOptions(AnyText()),
    "truncated": msgspec.UNSET,
}
"""The fields of a response that repeat what was asked, without it."""


@dataclass(frozen=True)
class Responses:
    """The endpoint for one served model."""

    state: AppState

    async def create(self, request: Request) -> Response:
        """Answer one request; `errors.describe` knows every error that it raises."""
        read = partial(self._asked, request)
        asked = await self.state.prepared(request, ResponseRequest, read, leave_out=_LEAVE_OUT)
        body, history, tools, chat = asked
        opened = await chat.open(self.state, request)
        choices = opened.choices
        truncated: TruncationReply | msgspec.UnsetType = msgspec.UNSET
        if chat.truncates:
            places = sorted(place for dropped in opened.truncated.dropped for place in history.places[dropped])
            truncated = TruncationReply("middle", tuple(places), opened.truncated.num_dropped_tokens)
        reply = chat.reply(self.state, choices)
        output = ResponseOutput(reply, {each.tool.name: each for each in tools}, seals=body.seals_thoughts)
        response = _Response(self.state, body, chat.params, output, truncated)
        if body.stream:
            keep_alive_s = self.state.keep_alive_s
            events = response.events(choices, record_of(request))
            return EventStream(events, choices, encode=named_event, done=b"", keep_alive_s=keep_alive_s)
        async with choices:
            completion = await while_connected(request.receive, choices.result(0))
        return await self.state.answer([completion], lambda: response.whole(completion))

    def _asked(
        self, request: Request, body: ResponseRequest
    ) -> tuple[ResponseRequest, History, Sequence[OfferedTool], AskedChat]:
        self.state.models.named(body.model)
        if body.previous_response_id:
            message = "previous_response_id is set, and nothing is stored here; send the whole conversation as input"
            raise HTTPError(400, message, param="previous_response_id", code="previous_response_not_found")
        require_small("metadata", body.metadata)
        history = body.history()
        self.state.leave_out(request, unread=history.unread, others=body.left_out)
        ignored = record_of(request).ignored or IgnoredFields()
        raw: dict[str, Any] = {"tools": body.tools, "tool_choice": body.tool_choice}  # which have any shape so far
        if not self.state.is_strict:
            ignored.harmless |= relax(raw, RESPONSES)
            for tool in raw.get("tools") or ():
                if tool.get("type") == "function":
                    ignored.harmless |= {f"tools.{name}" for name in relax_values(tool, FunctionOfResponses)}
        tools = offered(raw.get("tools"), ignored, is_strict=self.state.is_strict)
        asked = AskedChat(
            history.messages,
            body.sampling_params(self.state.engine.default_params),
            self.state.options(request, body).changed(template_kwargs=body.template_kwargs),
            use=response_tool_use(tools, raw.get("tool_choice"), is_parallel=body.parallel_tool_calls is not False),
            parameters_field=lambda place: tools[place].field,
            content=body.grammar,
            naming=partial(named_grammar, "text.format.schema"),
            content_field="text.format.schema",
            truncates=self.state.truncates(_TRUNCATION[body.truncation]),
        )
        return body, history, tools, asked


class _Response:
    """One response while it is made; all its events have the same id."""

    def __init__(
        self,
        state: AppState,
        body: ResponseRequest,
        params: SamplingParams,
        output: ResponseOutput,
        truncated: TruncationReply | msgspec.UnsetType,
    ) -> None:
        self._state, self._output = state, output
        reasoning = body.reasoning or ReasoningOptions()
        self._reply = partial(
            ResponseReply,
            id=new_id("resp_"),
            created_at=int(time.time()),
            model=state.models.named(body.model),
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_logprobs=body.top_logprobs or 0,
            metadata=body.metadata or {},
            user=body.user,
            safety_identifier=body.safety_identifier,
            prompt_cache_key=body.prompt_cache_key,
            reasoning=ReasoningReply(reasoning.effort, reasoning.summary),
            tools=body.tools or [],
            tool_choice=body.tool_choice or "auto",
            text=body.text if body.text and body.text.format else TextOptions(AnyText()),
            truncation="disabled" if truncated is msgspec.UNSET else "auto",
            truncated=truncated,
            parallel_tool_calls=body.parallel_tool_calls is not False,
        )

    def whole(self, completion: Completion) -> ResponseReply:
        """The whole response."""
        logprobs = self._named(completion.logprobs)[completion.usage.thought_tokens :]
        for _ in self._output.push(Delta.whole(completion), logprobs):
            pass
        for _ in self._output.finish(_status(completion)):
            pass
        return self._ended(completion)

    async def events(self, choices: Choices, record: RequestRecord) -> AsyncGenerator[msgspec.Struct]:
        """OpenAI's events, numbered. A failure is the last event, and `record` gets its name."""
        numbers = itertools.count()

        def event(name: str, /, **fields: Any) -> ResponseEvent:
            return ResponseEvent(type=f"response.{name}", sequence_number=next(numbers), **fields)

        begun = self._reply(status="in_progress", output=[])
        yield event("created", response=begun)
        yield event("in_progress", response=begun)
        # with each step of a prompt: without what the client sent, which may be megabytes
        bare = msgspec.structs.replace(begun, **_NOTHING_ASKED)
        try:
            logprobs: list[ChatLogprob] = []  # of all tokens
            num_sent = 0
            async for _, delta in choices:
                if delta.progress is not None:
                    progress = PromptProgressReply.of(delta.progress)
                    yield event("in_progress", response=msgspec.structs.replace(bare, prompt_progress=progress))
                logprobs += self._named(delta.logprobs)
                said: list[ChatLogprob] = []
                if delta.text or delta.finish_reason:
                    said = logprobs[max(num_sent, delta.num_thought_tokens) :]
                    num_sent = len(logprobs)
                for name, fields in self._output.push(delta, said):
                    yield event(name, **fields)
            completion = await choices.result(0)
            for name, fields in self._output.finish(_status(completion)):
                yield event(name, **fields)
            ended = self._ended(completion)
            yield event("incomplete" if ended.incomplete_details else "completed", response=ended)
        except Exception as error:  # as `EventStream` would, in the words of this endpoint
            record.error = type(error).__name__
            yield event("failed", response=self._failed(error))

    def _ended(self, completion: Completion) -> ResponseReply:
        status = _status(completion)
        return self._reply(
            status=status,
            output=self._output.items,
            usage=self._usage(completion),
            incomplete_details=IncompleteDetails("max_output_tokens") if status == "incomplete" else None,
            ended_in_reasoning=completion.ended_in_reasoning or msgspec.UNSET,
        )

    def _failed(self, error: Exception) -> ResponseReply:
        said = describe(error)[1].error
        for _ in self._output.finish("incomplete"):  # the client learns of them here
            pass
        return self._reply(
            status="failed", output=self._output.items, error=ResponseError(said.code or said.type, said.message)
        )

    def _named(self, logprobs: Sequence[TokenLogprob] | None) -> list[ChatLogprob]:
        named = chat_logprobs(self._state, logprobs)
        return [] if named is None else named.content

    def _usage(self, completion: Completion) -> ResponseUsage:
        usage = usage_of([completion], tells_cached_text=self._state.tells_cached_text)
        return ResponseUsage(
            usage.prompt_tokens,
            usage.completion_tokens,
            usage.total_tokens,
            usage.prompt_tokens_details,
            OutputTokensDetails(completion.usage.thought_tokens),
        )


def _status(completion: Completion) -> Status:
    return "incomplete" if completion.finish_reason == "length" else "completed"
