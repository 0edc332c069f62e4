"""`POST /v1/chat/completions`: a conversation's next reply, or several, whole or as they are made."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...engine.completion import Completion, PromptLogprobs
from ..app_state import AppState
from ..asked_chat import AskedChat
from ..choices import Choices
from ..http.disconnect import while_connected
from ..http.sse import EventStream
from ..lenient.shapes import CHAT, relaxing
from ..reply_events import ReplyEvents
from ..request_log import new_id
from .chat_request import ChatRequest
from .legacy_functions import legacy_delta, legacy_message, legacy_reason
from .replies import (
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    PromptLogprobsReply,
    PromptProgressReply,
    Reply,
    TruncationReply,
    UsageReply,
)
from .reply_parts import ChunkUsage, chat_logprobs, deltas_of, finish_reason_of, message_of, usage_of
from .told_prompt import prompt_logprobs

_LEAVE_OUT = relaxing(CHAT, ChatRequest)


@dataclass(frozen=True)
class ChatCompletions:
    """The endpoint of one served model."""

    state: AppState

    async def create(self, request: Request) -> Response:
        """Answer one request; `errors.describe` knows every error that it raises."""
        read = partial(self._asked, request)
        body, asked = await self.state.prepared(request, ChatRequest, read, leave_out=_LEAVE_OUT)
        model = self.state.models.named(body.model)
        opened = await asked.open(self.state, request)
        choices = opened.choices
        truncation = TruncationReply.of(opened.truncated) if asked.truncates else msgspec.UNSET
        start = partial(
            Reply,
            id=new_id("chatcmpl-"),
            created=int(time.time()),
            model=model,
            system_fingerprint=self.state.fingerprint,
        )
        if body.stream:
            chunks = self._chunks(choices, start, body, asked, truncation)
            return EventStream(chunks, choices, keep_alive_s=self.state.keep_alive_s)
        async with choices:
            completions = await while_connected(request.receive, choices.results())
        prompt = await self._prompt(body, completions[0].prompt_logprobs)

        def make() -> Reply:
            whole = self._whole(start, choices, completions, asked, body)
            whole.truncation, whole.prompt_logprobs = truncation, prompt
            return whole

        return await self.state.answer(completions, make)

    def _asked(self, request: Request, body: ChatRequest) -> tuple[ChatRequest, AskedChat]:
        self.state.models.named(body.model)
        self.state.leave_out(request, unread=body.unread, others=body.left_out)
        asked = AskedChat(
            [message.to_template() for message in body.messages],
            body.sampling_params(self.state.engine.default_params),
            self.state.options(request, body).changed(template_kwargs=body.template_kwargs),
            use=body.tool_use(),
            parameters_field=body.parameters_field,
            content=body.grammar,
            naming=body.naming,
            num_choices=body.num_choices,
            truncates=self.state.truncates(body.truncation),
        )
        return body, asked

    def _whole(
        self,
        start: partial[Reply],
        choices: Choices,
        completions: Sequence[Completion],
        asked: AskedChat,
        body: ChatRequest,
    ) -> Reply:
        has_ids = bool(body.return_token_ids)
        return start(
            object="chat.completion",
            choices=[
                self._choice(index, completion, asked.reply(self.state, choices, index), body)
                for index, completion in enumerate(completions)
            ],
            usage=self._usage(completions, len(completions)),
            prompt_token_ids=completions[0].prompt_token_ids if has_ids else msgspec.UNSET,
        )

    def _choice(self, index: int, completion: Completion, reply: ReplyEvents, body: ChatRequest) -> ChatChoice:
        message = message_of(completion, reply)
        reason = finish_reason_of(completion.finish_reason, reply)
        return ChatChoice(
            legacy_message(message) if body.is_legacy else message,
            legacy_reason(reason) if body.is_legacy else reason,
            chat_logprobs(self.state, completion.logprobs),
            index,
            token_ids=completion.token_ids if body.return_token_ids else msgspec.UNSET,
            stop_reason=completion.stop_reason,
            ended_in_reasoning=completion.ended_in_reasoning or msgspec.UNSET,
        )

    async def _chunks(
        self,
        choices: Choices,
        start: partial[Reply],
        body: ChatRequest,
        asked: AskedChat,
        truncation: TruncationReply | msgspec.UnsetType,
    ) -> AsyncGenerator[msgspec.Struct]:
        """For each choice its role, its deltas and its finish reason; at the end the usage, if asked for."""
        has_ids, has_guesses = bool(body.return_token_ids), bool(body.return_guesses)
        usage = ChunkUsage(choices, is_told=body.include_usage, is_running=body.has_running_usage)
        start = partial(start, object="chat.completion.chunk")

        def chunk(choice: ChatChunkChoice) -> Reply:
            return start(choices=[choice], usage=usage.of(choice.index))

        has_begun = [False] * body.num_choices
        replies = [asked.reply(self.state, choices, index) for index in range(body.num_choices)]
        async for index, delta in choices:
            if not has_begun[index]:  # not before: benches take the first chunk for the first token
                first = chunk(ChatChunkChoice(ChatDelta(content="", role="assistant"), index=index))
                first.truncation = msgspec.UNSET if any(has_begun) else truncation
                has_begun[index] = True
                yield first
            if delta.progress is not None:
                told = chunk(ChatChunkChoice(ChatDelta(), index=index))
                told.prompt_progress = PromptProgressReply.of(delta.progress)
                yield told
            if delta.prompt_logprobs is not None:
                told = chunk(ChatChunkChoice(ChatDelta(), index=index))
                told.prompt_logprobs = await self._prompt(body, delta.prompt_logprobs)
                yield told
            usage.count(index, delta)
            said = deltas_of(replies[index].push(delta))
            if body.is_legacy:
                said = [legacy_delta(each) for each in said]
            if said or delta.logprobs or ((has_ids or has_guesses) and delta.token_ids):
                delta_said, *others = said or [ChatDelta(content="")]
                choice = ChatChunkChoice(delta_said, logprobs=chat_logprobs(self.state, delta.logprobs), index=index)
                if has_ids:
                    choice.token_ids = delta.token_ids
                if has_guesses:
                    choice.guessed = delta.guessed
                yield chunk(choice)
                for other in others:
                    yield chunk(ChatChunkChoice(other, index=index))
            if delta.finish_reason:
                reason = finish_reason_of(delta.finish_reason, replies[index])
                reason = legacy_reason(reason) if body.is_legacy else reason
                completion = await choices.result(index)
                end = ChatChunkChoice(ChatDelta(), reason, index=index, stop_reason=delta.stop_reason)
                end.ended_in_reasoning = completion.ended_in_reasoning or msgspec.UNSET
                last = chunk(end)
                if has_ids:
                    last.prompt_token_ids = completion.prompt_token_ids
                yield last
        if body.include_usage:
            yield start(choices=[], usage=self._usage(await choices.results(), body.num_choices))

    async def _prompt(self, body: ChatRequest, told: PromptLogprobs | None) -> PromptLogprobsReply:
        """What is said of the prompt's tokens, if anything is; in a thread, for they may be very many."""
        if told is None:
            return msgspec.UNSET
        return await asyncio.to_thread(prompt_logprobs, self.state, told, body.prompt_logprobs)

    def _usage(self, completions: Sequence[Completion], num_choices: int) -> UsageReply:
        return usage_of(completions, num_choices, tells_cached_text=self.state.tells_cached_text)
