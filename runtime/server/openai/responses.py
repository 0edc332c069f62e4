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

from ...engine.completion import Completion, TokenLogprob
from ...engine.sampling_params import SamplingParams
from ..app_state import AppState, json_response
from ..choices import Choices
from ..errors import HTTPError, describe
from ..http.disconnect import while_connected
from ..http.sse import EventStream, named_event
from ..request_log import RequestRecord, new_id, record_of
from ..truncation import Truncation
from .replies import ChatLogprob, PromptProgressReply, TruncationReply
from .reply_parts import chat_logprobs, usage_of
from .response_format import named_grammar
from .response_replies import (
    IncompleteDetails,
    OutputMessage,
    OutputTextPart,
    OutputTokensDetails,
    ResponseError,
    ResponseEvent,
    ResponseReply,
    ResponseUsage,
)
from .response_requests import AnyText, ResponseRequest, TextOptions

_TRUNCATION: Mapping[str | None, Truncation | None] = {"auto": "middle", "disabled": "none", None: None}


@dataclass(frozen=True)
class Responses:
    """The endpoint for one served model."""

    state: AppState

    async def create(self, request: Request) -> Response:
        """Answer one request; `errors.describe` knows every error that it raises."""
        body = await self.state.read(request, ResponseRequest)
        self.state.check_model(body.model)
        if body.previous_response_id is not None:
            message = "previous_response_id is set, and nothing is stored here; send the whole conversation as input"
            raise HTTPError(400, message, param="previous_response_id", code="previous_response_not_found")
        params = body.sampling_params(self.state.engine.default_params)
        options = self.state.options(request, body)
        with named_grammar("text.format.schema"):
            options = options.changed(constraint=await self.state.constraint(request, body.grammar()))
        messages, truncated = await self._history(request, body, params)
        ask = partial(self.state.engine.stream_chat, messages, params, options=options)
        choices = await self.state.open(request, [ask])
        response = _Response(self.state, body, params, truncated)
        if body.stream:
            keep_alive_s = self.state.keep_alive_s
            events = response.events(choices, record_of(request))
            return EventStream(events, choices, encode=named_event, done=b"", keep_alive_s=keep_alive_s)
        async with choices:
            completion = await while_connected(request.receive, choices.result(0))
        return json_response(response.ended(completion))

    async def _history(
        self, request: Request, body: ResponseRequest, params: SamplingParams
    ) -> tuple[Sequence[Mapping[str, object]], TruncationReply | msgspec.UnsetType]:
        """The messages for the template, without those that were dropped, and which ones those are."""
        messages = body.messages()
        if not self.state.truncates(_TRUNCATION[body.truncation]):
            return messages, msgspec.UNSET
        left = await self.state.truncated(request, messages, max_tokens=params.max_tokens)
        num_before = len(messages) - body.num_messages  # the instructions, which stay
        dropped = tuple(place - num_before for place in left.dropped)
        return left.messages, TruncationReply("middle", dropped, left.num_dropped_tokens)


class _Response:
    """One response while it is made; all its events have the same ids."""

    def __init__(
        self,
        state: AppState,
        body: ResponseRequest,
        params: SamplingParams,
        truncated: TruncationReply | msgspec.UnsetType,
    ) -> None:
        self._state = state
        self._item_id = new_id("msg_")
        self._logprobs: list[ChatLogprob] = []
        self._texts: list[str] = []
        self._reply = partial(
            ResponseReply,
            id=new_id("resp_"),
            created_at=int(time.time()),
            model=state.model_id,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_logprobs=body.top_logprobs or 0,
            metadata=body.metadata or {},
            user=body.user,
            safety_identifier=body.safety_identifier,
            prompt_cache_key=body.prompt_cache_key,
            tool_choice=body.tool_choice or "auto",
            text=body.text if body.text and body.text.format else TextOptions(AnyText()),
            truncation="disabled" if truncated is msgspec.UNSET else "auto",
            truncated=truncated,
            parallel_tool_calls=body.parallel_tool_calls is not False,
        )

    def ended(self, completion: Completion) -> ResponseReply:
        """The whole response."""
        logprobs = self._named(completion.logprobs)
        is_cut = completion.finish_reason == "length"
        status: Any = "incomplete" if is_cut else "completed"
        return self._reply(
            status=status,
            output=[OutputMessage(self._item_id, status, [OutputTextPart(completion.text, logprobs=logprobs)])],
            usage=self._usage(completion),
            incomplete_details=IncompleteDetails("max_output_tokens") if is_cut else None,
        )

    async def events(self, choices: Choices, record: RequestRecord) -> AsyncGenerator[msgspec.Struct]:
        """OpenAI's events, numbered. A failure is the last event, and `record` gets its name."""
        numbers = itertools.count()

        def event(name: str, **fields: Any) -> ResponseEvent:
            return ResponseEvent(type=f"response.{name}", sequence_number=next(numbers), **fields)

        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        begun = self._reply(status="in_progress", output=[])
        yield event("created", response=begun)
        yield event("in_progress", response=begun)
        try:
            yield event("output_item.added", output_index=0, item=OutputMessage(self._item_id, "in_progress", []))
            yield event("content_part.added", **place, part=OutputTextPart(""))
            async for _, delta in choices:
                if delta.progress is not None:
                    progress = PromptProgressReply.of(delta.progress)
                    yield event("in_progress", response=msgspec.structs.replace(begun, prompt_progress=progress))
                logprobs = self._named(delta.logprobs)
                self._texts.append(delta.text)
                self._logprobs += logprobs
                if delta.text or logprobs:
                    yield event("output_text.delta", **place, delta=delta.text, logprobs=logprobs)
            ended = self.ended(await choices.result(0))
            [item] = ended.output
            [part] = item.content
            yield event("output_text.done", **place, text=part.text, logprobs=part.logprobs)
            yield event("content_part.done", **place, part=part)
            yield event("output_item.done", output_index=0, item=item)
            yield event("incomplete" if ended.incomplete_details else "completed", response=ended)
        except Exception as error:  # as `EventStream` would, in the words of this endpoint
            record.error = type(error).__name__
            yield event("failed", response=self._failed(error))

    def _failed(self, error: Exception) -> ResponseReply:
        said = describe(error)[1].error
        part = OutputTextPart("".join(self._texts), logprobs=self._logprobs)
        return self._reply(
            status="failed",
            output=[OutputMessage(self._item_id, "incomplete", [part])],
            error=ResponseError(said.code or said.type, said.message),
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
            OutputTokensDetails(),
        )
