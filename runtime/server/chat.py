"""`POST /v1/chat/completions`: a conversation's next reply, or several, whole or as they are made."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ..completion import Completion
from .choices import Choices, params_of_choices
from .disconnect import while_connected
from .logprobs import chat_logprobs
from .replies import ChatChoice, ChatChunkChoice, ChatDelta, Reply, ReplyMessage
from .request_log import record_of
from .requests import ChatRequest
from .response_format import compiled
from .served import Served, json_response
from .sse import EventStream
from .tool_calls import ToolCallReader, read_whole
from .tool_replies import deltas_of, finish_reason_of, message_of
from .tools import ToolUse


@dataclass(frozen=True)
class ChatCompletions:
    """The endpoint for one served model."""

    served: Served

    async def create(self, request: Request) -> Response:
        """Answer one request; every error it raises is one of `errors.describe`."""
        body = await self.served.read(request, ChatRequest)
        self.served.check_model(body.model)
        engine = self.served.engine
        params = body.sampling_params(engine.default_params)
        messages = [message.to_template() for message in body.messages]
        namespace = self.served.namespace(request, body.cache_salt, body.prompt_cache_key)
        use = body.tool_use()
        constraint = await compiled(engine, use.grammar(engine.tool_format, body.grammar()))
        ask = partial(
            engine.stream_chat,
            messages,
            namespace=namespace,
            cache_match=body.cache_match,
            tools=use.tools,
            constraint=constraint,
        )
        wishes = params_of_choices(params, body.num_choices)
        choices = await Choices.open([partial(ask, wish) for wish in wishes], record_of(request))
        new_id = f"chatcmpl-{uuid.uuid4().hex}"
        start = partial(Reply, id=new_id, created=int(time.time()), model=self.served.model_id)
        if body.stream:
            chunks = self._chunks(choices, start, body, use)
            return EventStream(chunks, choices, keep_alive_s=self.served.keep_alive_s)
        async with choices:
            completions = await while_connected(request.receive, choices.results())
        return json_response(self._whole(start, completions, use, bool(body.return_token_ids)))

    def _whole(self, start: partial[Reply], completions: Sequence[Completion], use: ToolUse, has_ids: bool) -> Reply:
        return start(
            object="chat.completion",
            choices=[self._choice(index, completion, use, has_ids) for index, completion in enumerate(completions)],
            usage=self.served.usage(completions, len(completions)),
            prompt_token_ids=completions[0].prompt_token_ids if has_ids else msgspec.UNSET,
        )

    def _choice(self, index: int, completion: Completion, use: ToolUse, has_ids: bool) -> ChatChoice:
        reader = self._reader(use)
        return ChatChoice(
            ReplyMessage(completion.text) if reader is None else message_of(read_whole(completion.text, reader)),
            finish_reason_of(completion.finish_reason, reader),
            chat_logprobs(self.served, completion.logprobs),
            index,
            token_ids=completion.token_ids if has_ids else msgspec.UNSET,
        )

    async def _chunks(
        self, choices: Choices, start: partial[Reply], body: ChatRequest, use: ToolUse
    ) -> AsyncGenerator[msgspec.Struct]:
        """Of each choice the role, the deltas and the finish reason; at the end usage if asked for."""
        has_ids = bool(body.return_token_ids)
        chunk = partial(start, object="chat.completion.chunk", usage=None if body.include_usage else msgspec.UNSET)
        for index in range(body.num_choices):
            yield chunk(choices=[ChatChunkChoice(ChatDelta(content="", role="assistant"), index=index)])
        readers = [self._reader(use) for _ in range(body.num_choices)]
        async for index, delta in choices:
            said = deltas_of(delta, readers[index])
            if said or delta.logprobs or (has_ids and delta.token_ids):
                first, *others = said or [ChatDelta(content="")]
                choice = ChatChunkChoice(first, logprobs=chat_logprobs(self.served, delta.logprobs), index=index)
                if has_ids:
                    choice.token_ids = delta.token_ids
                yield chunk(choices=[choice])
                for other in others:
                    yield chunk(choices=[ChatChunkChoice(other, index=index)])
            if delta.finish_reason:
                prompt_ids = (await choices.result(index)).prompt_token_ids if has_ids else msgspec.UNSET
                reason = finish_reason_of(delta.finish_reason, readers[index])
                choice = ChatChunkChoice(ChatDelta(), reason, index=index)
                yield chunk(choices=[choice], prompt_token_ids=prompt_ids)
        if body.include_usage:
            yield chunk(choices=[], usage=self.served.usage(await choices.results(), body.num_choices))

    def _reader(self, use: ToolUse) -> ToolCallReader | None:
        return use.reader(self.served.engine.tool_format)
