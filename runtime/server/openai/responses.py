"""`POST /v1/responses`: OpenAI's Responses API, whole or as events.

A conversation continues a stored response, or is sent again in full, which the prefix cache makes cheap.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...engine.completion import Completion, Delta, TokenLogprob
from ...engine.sampling_params import SamplingParams
from ..chat_task import ChatTask
from ..choices import Choices
from ..errors import ErrorBody, describe
from ..field_policy import IgnoredFields
from ..http.connection import while_connected
from ..http.sse import EventStream, named_event
from ..lenient.shapes import RESPONSES as SHAPES
from ..lenient.shapes import relax, relaxing
from ..lenient.values import relax_values
from ..models import ModelEndpoint
from ..request_fields import require_small
from ..request_log import RequestRecord, new_id, record_of
from ..served import Served, whole_answer
from ..truncation import Truncation
from .kept_responses import Continuation
from .replies import ChatLogprob, PromptProgressReply, TruncationReply
from .reply_parts import chat_logprobs, usage_of
from .response_format import named_grammar
from .response_items import History, leave_out_foreign
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
from .response_requests import AnyText, ConversationID, ReasoningOptions, ResponseRequest, TextOptions
from .response_tools import FunctionOfResponses, OfferedTool, offered, response_tool_use

Prepared = tuple[ResponseRequest, History, Sequence[OfferedTool], ChatTask]
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
"""Values that clear the fields of a response which repeat the request."""


def _prepare(served: Served, request: Request, body: ResponseRequest) -> Prepared:
    """Check the body, and translate it to the chat that the engine gets."""
    require_small("metadata", body.metadata)
    history = body.history()
    served.leave_out(request, unread=history.unread, others=body.left_out)
    ignored = record_of(request).ignored or IgnoredFields()
    is_strict = served.options.is_strict
    raw: dict[str, Any] = {"tools": body.tools, "tool_choice": body.tool_choice}  # not converted to a type yet
    if not is_strict:
        ignored.harmless |= relax(raw, SHAPES)
        for tool in raw.get("tools") or ():
            if tool.get("type") == "function":
                ignored.harmless |= {f"tools.{name}" for name in relax_values(tool, FunctionOfResponses)}
    tools = offered(raw.get("tools"), ignored, is_strict=is_strict)
    chat = ChatTask(
        history.messages,
        body.sampling_params(served.engine.default_params),
        served.request_options(request, body).changed(template_kwargs=body.template_kwargs),
        use=response_tool_use(tools, raw.get("tool_choice"), is_parallel=body.parallel_tool_calls is not False),
        parameters_field=lambda place: tools[place].field,
        content=body.grammar,
        naming=partial(named_grammar, "text.format.schema"),
        content_field="text.format.schema",
        truncates=served.truncates(_TRUNCATION[body.truncation]),
    )
    return body, history, tools, chat


async def create(served: Served, request: Request, prepared: Prepared) -> Response:
    """`POST /v1/responses`: return the response, whole or as a stream, and store it."""
    body, history, tools, chat = prepared
    continuation = await Continuation.of(served, request, body, history, chat)
    history, chat = continuation.history, continuation.chat
    opened = await chat.open(served, request)
    choices = opened.choices
    truncated: TruncationReply | msgspec.UnsetType = msgspec.UNSET
    if chat.truncates:
        dropped = [place for each in opened.truncated.dropped for place in history.places[each]]
        places = sorted(place for place in dropped if place >= 0)
        truncated = TruncationReply("middle", tuple(places), opened.truncated.num_dropped_tokens)
    reply = chat.reply(served, choices)
    output = ResponseOutput(reply, {each.tool.name: each for each in tools}, seals=body.seals_reasoning)
    response = _Response(
        served, body, chat.params, output, truncated, continuation, is_truncated=bool(opened.truncated.dropped)
    )
    if body.stream:
        keep_alive_s = served.options.keep_alive_s
        events = response.events(choices, record_of(request))
        return EventStream(events, choices, encode=named_event, done=b"", keep_alive_s=keep_alive_s)
    async with choices:
        [completion] = await while_connected(request.receive, choices.results())
    answer = await whole_answer([completion], lambda: response.whole(completion))
    if continuation.is_kept and not await response.keep(completion, bytes(answer.body)):
        unstored = {**msgspec.json.decode(answer.body), "store": False}
        return Response(msgspec.json.encode(unstored), media_type="application/json")
    return answer


RESPONSES = ModelEndpoint(
    ResponseRequest, _prepare, create, leave_out=relaxing(SHAPES, ResponseRequest, leave_out_foreign)
)


class _Response:
    """One response in OpenAI's format, whole or as events, all with the same id."""

    def __init__(
        self,
        served: Served,
        body: ResponseRequest,
        params: SamplingParams,
        output: ResponseOutput,
        truncated: TruncationReply | msgspec.UnsetType,
        continuation: Continuation,
        *,
        is_truncated: bool,
    ) -> None:
        self._served, self._output, self._continuation = served, output, continuation
        self._id, self._is_truncated = new_id("resp_"), is_truncated
        conversation = body.conversation_id
        reasoning = body.reasoning or ReasoningOptions()
        self._reply = partial(
            ResponseReply,
            id=self._id,
            created_at=int(time.time()),
            model=served.called(body.model),
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
            store=continuation.is_kept,
            previous_response_id=body.previous_response_id or None,
            conversation=None if conversation is None else ConversationID(conversation),
            truncation="disabled" if truncated is msgspec.UNSET else "auto",
            truncated=truncated,
            parallel_tool_calls=body.parallel_tool_calls is not False,
        )

    def whole(self, completion: Completion) -> ResponseReply:
        """Return the whole response."""
        logprobs = self._named(completion.logprobs)[completion.usage.thought_tokens :]
        for _ in self._output.push(Delta.whole(completion), logprobs):
            pass
        for _ in self._output.finish(_status(completion)):
            pass
        return self._ended(completion)

    async def keep(self, completion: Completion, response: bytes) -> bool:
        """Store the response, which has ended. Returns whether it is stored."""
        return await self._continuation.keep(self._id, response, completion, is_truncated=self._is_truncated)

    async def events(self, choices: Choices, record: RequestRecord) -> AsyncGenerator[msgspec.Struct]:
        """Yield OpenAI's numbered events. An error becomes the last event, and `record` gets its name."""
        numbers = itertools.count()

        def event(name: str, /, **fields: Any) -> ResponseEvent:
            return ResponseEvent(type=f"response.{name}", sequence_number=next(numbers), **fields)

        begun = self._reply(status="in_progress", output=[])
        yield event("created", response=begun)
        yield event("in_progress", response=begun)
        # for progress events: without the fields that repeat the request, which may have megabytes
        bare = msgspec.structs.replace(begun, **_NOTHING_ASKED)
        try:
            logprobs: list[ChatLogprob] = []  # of all tokens
            num_sent = 0
            async for _, delta in choices:
                if delta.progress is not None:
                    progress = PromptProgressReply.of(delta.progress)
                    yield event("in_progress", response=msgspec.structs.replace(bare, prompt_progress=progress))
                logprobs += self._named(delta.logprobs)
                text_logprobs: list[ChatLogprob] = []
                if delta.text or delta.finish_reason:
                    text_logprobs = logprobs[max(num_sent, delta.num_thought_tokens) :]
                    num_sent = len(logprobs)
                for name, fields in self._output.push(delta, text_logprobs):
                    yield event(name, **fields)
            completion = choices.result(0)
            for name, fields in self._output.finish(_status(completion)):
                yield event(name, **fields)
            ended = self._ended(completion)
            if ended.store:
                ended.store = await self.keep(completion, msgspec.json.encode(ended))
            yield event("incomplete" if ended.incomplete_details else "completed", response=ended)
        except Exception as error:  # as in `EventStream`, in this API's format
            status, reply = describe(error)
            record.fail(status, reply.error.name)
            yield event("failed", response=self._failed(reply.error))

    def _ended(self, completion: Completion) -> ResponseReply:
        """Return the whole response after its reply has ended."""
        status = _status(completion)
        return self._reply(
            status=status,
            output=self._output.items,
            usage=self._usage(completion),
            incomplete_details=IncompleteDetails("max_output_tokens") if status == "incomplete" else None,
            ended_in_reasoning=completion.ended_in_reasoning or msgspec.UNSET,
        )

    def _failed(self, error: ErrorBody) -> ResponseReply:
        """Return the response that failed, with the items so far."""
        for _ in self._output.finish("incomplete"):  # the failed response has the items
            pass
        return self._reply(status="failed", output=self._output.items, error=ResponseError(error.name, error.message))

    def _named(self, logprobs: Sequence[TokenLogprob] | None) -> list[ChatLogprob]:
        named = chat_logprobs(self._served, logprobs)
        return [] if named is None else named.content

    def _usage(self, completion: Completion) -> ResponseUsage:
        """Return the usage of the finished reply, with cached and reasoning tokens."""
        usage = usage_of([completion], tells_cached_text=self._served.options.tells_cached_text)
        return ResponseUsage(
            usage.prompt_tokens,
            usage.completion_tokens,
            usage.total_tokens,
            usage.prompt_tokens_details,
            OutputTokensDetails(completion.usage.thought_tokens),
        )


def _status(completion: Completion) -> Status:
    return "incomplete" if completion.finish_reason == "length" else "completed"
