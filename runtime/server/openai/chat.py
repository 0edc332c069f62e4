"""`POST /v1/chat/completions`: the next reply of a conversation, or several, whole or streamed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from functools import cached_property, partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...engine.completion import Completion, Delta, PromptLogprobs
from ..chat_task import ChatTask, RunningChat
from ..http.connection import while_connected
from ..http.sse import EventStream
from ..lenient.shapes import CHAT, relaxing
from ..models import ModelEndpoint
from ..reply_events import ReplyEvents
from ..request_log import new_id
from ..served import Served, whole_answer
from .chat_request import ChatRequest
from .legacy_functions import legacy_delta, legacy_message, legacy_reason
from .prompt_logprobs import prompt_logprobs
from .replies import (
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatFinishReason,
    PromptLogprobsReply,
    PromptProgressReply,
    Reply,
    TruncationReply,
    UsageReply,
)
from .reply_parts import ChunkUsage, chat_logprobs, deltas_of, finish_reason_of, message_of, usage_of

Prepared = tuple[ChatRequest, ChatTask]


def _prepare(served: Served, request: Request, body: ChatRequest) -> Prepared:
    """Check the body, and translate it to the chat that the engine gets."""
    served.leave_out(request, unread=body.unread, others=body.left_out)
    chat = ChatTask(
        [message.to_template() for message in body.messages],
        body.sampling_params(served.engine.default_params),
        served.request_options(request, body).changed(template_kwargs=body.template_kwargs),
        use=body.tool_use(),
        parameters_field=body.parameters_field,
        content=body.grammar,
        naming=body.naming,
        num_choices=body.num_choices,
        truncates=served.truncates(body.truncation),
    )
    return body, chat


async def create(served: Served, request: Request, prepared: Prepared) -> Response:
    """`POST /v1/chat/completions`: return the replies, whole or as a stream."""
    body, chat = prepared
    opened = await chat.open(served, request)
    answer = _Answer(served, body, chat, opened)
    if body.stream:
        return EventStream(answer.chunks(), opened.choices, keep_alive_s=served.options.keep_alive_s)
    async with opened.choices:
        completions = await while_connected(request.receive, opened.choices.results())
    prompt = await answer.prompt(completions[0].prompt_logprobs)
    return await whole_answer(completions, lambda: answer.whole(completions, prompt))


CHAT_COMPLETIONS = ModelEndpoint(ChatRequest, _prepare, create, leave_out=relaxing(CHAT, ChatRequest))


class _Answer:
    """The response to one chat completion request, whole or as chunks."""

    def __init__(self, served: Served, body: ChatRequest, chat: ChatTask, opened: RunningChat) -> None:
        self._served = served
        self._body = body
        self._choices = opened.choices
        self._chat = chat
        self._truncation = TruncationReply.of(opened.truncated) if chat.truncates else msgspec.UNSET
        self._start = partial(
            Reply,
            id=new_id("chatcmpl-"),
            created=int(time.time()),
            model=served.called(body.model),
            system_fingerprint=served.fingerprint,
        )

    def whole(self, completions: Sequence[Completion], prompt: PromptLogprobsReply) -> Reply:
        """Return the whole response."""
        whole = self._start(
            object="chat.completion",
            choices=[self._choice(index, completion) for index, completion in enumerate(completions)],
            usage=self._usage(completions),
            prompt_token_ids=completions[0].prompt_token_ids if self._body.return_token_ids else msgspec.UNSET,
        )
        whole.truncation = self._truncation
        whole.prompt_logprobs = prompt
        return whole

    async def chunks(self) -> AsyncGenerator[msgspec.Struct]:
        """Yield each choice's role, deltas and finish reason, and at the end the usage if the client asked for it."""
        body, choices = self._body, self._choices
        usage = ChunkUsage(choices, is_told=body.include_usage, is_running=body.has_running_usage)
        start = partial(self._start, object="chat.completion.chunk")

        def chunk(choice: ChatChunkChoice) -> Reply:
            return start(choices=[choice], usage=usage.of(choice.index))

        has_begun = [False] * body.num_choices
        async for index, delta in choices:
            if not has_begun[index]:  # not earlier: benchmarks take the first chunk for the first token
                first = chunk(ChatChunkChoice(ChatDelta(content="", role="assistant"), index=index))
                first.truncation = msgspec.UNSET if any(has_begun) else self._truncation
                has_begun[index] = True
                yield first
            if delta.progress is not None:
                extra = chunk(ChatChunkChoice(ChatDelta(), index=index))
                extra.prompt_progress = PromptProgressReply.of(delta.progress)
                yield extra
            if delta.prompt_logprobs is not None:
                extra = chunk(ChatChunkChoice(ChatDelta(), index=index))
                extra.prompt_logprobs = await self.prompt(delta.prompt_logprobs)
                yield extra
            usage.count(index, delta)
            for choice in self._chunks_of(index, delta):
                yield chunk(choice)
            if delta.finish_reason:
                completion = choices.result(index)
                reason = self._reason(completion, self._replies[index])
                end = ChatChunkChoice(ChatDelta(), reason, index=index, stop_reason=delta.stop_reason)
                end.ended_in_reasoning = completion.ended_in_reasoning or msgspec.UNSET
                last = chunk(end)
                if body.return_token_ids:
                    last.prompt_token_ids = completion.prompt_token_ids
                yield last
        if body.include_usage:
            yield start(choices=[], usage=self._usage(await choices.results()))

    @cached_property
    def _replies(self) -> list[ReplyEvents]:
        return [self._chat.reply(self._served, self._choices, index) for index in range(self._body.num_choices)]

    async def prompt(self, logprobs: PromptLogprobs | None) -> PromptLogprobsReply:
        """Return the prompt's logprobs, or UNSET. Made in a thread, because there may be very many."""
        if logprobs is None:
            return msgspec.UNSET
        return await asyncio.to_thread(prompt_logprobs, self._served, logprobs, self._body.prompt_logprobs)

    def _choice(self, index: int, completion: Completion) -> ChatChoice:
        """Return one choice of the response from its completion."""
        body, reply = self._body, self._replies[index]
        message = message_of(completion, reply)
        return ChatChoice(
            legacy_message(message) if body.is_legacy else message,
            self._reason(completion, reply),
            chat_logprobs(self._served, completion.logprobs),
            index,
            token_ids=completion.token_ids if body.return_token_ids else msgspec.UNSET,
            stop_reason=completion.stop_reason,
            ended_in_reasoning=completion.ended_in_reasoning or msgspec.UNSET,
        )

    def _chunks_of(self, index: int, delta: Delta) -> list[ChatChunkChoice]:
        """Return the chunks of a delta. The first has the delta's logprobs and token ids."""
        has_ids, has_guesses = bool(self._body.return_token_ids), bool(self._body.return_guesses)
        deltas = deltas_of(self._replies[index].push(delta))
        if self._body.is_legacy:
            deltas = [legacy_delta(each) for each in deltas]
        if not (deltas or delta.logprobs or ((has_ids or has_guesses) and delta.token_ids)):
            return []
        first, *others = deltas or [ChatDelta(content="")]
        choice = ChatChunkChoice(first, logprobs=chat_logprobs(self._served, delta.logprobs), index=index)
        if has_ids:
            choice.token_ids = delta.token_ids
        if has_guesses:
            choice.guessed = delta.guessed
        return [choice, *(ChatChunkChoice(other, index=index) for other in others)]

    def _reason(self, completion: Completion, reply: ReplyEvents) -> ChatFinishReason:
        reason = finish_reason_of(completion.finish_reason, reply)
        return legacy_reason(reason) if self._body.is_legacy else reason

    def _usage(self, completions: Sequence[Completion]) -> UsageReply:
        tells = self._served.options.tells_cached_text
        return usage_of(completions, self._body.num_choices, tells_cached_text=tells)
