"""`POST /v1/chat/completions`: a conversation's next reply, whole or as it is made."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ..completion import Completion, TokenLogprob
from .disconnect import while_connected
from .replies import (
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprob,
    ChatLogprobs,
    Reply,
    ReplyMessage,
    TopLogprob,
)
from .reply_stream import ReplyStream
from .requests import ChatRequest
from .served import Served, json_response
from .sse import EventStream


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
        ask = partial(engine.stream_chat, messages, params, namespace=namespace, cache_match=body.cache_match)
        stream = await ReplyStream.open(lambda wake: ask(on_ready=wake))
        new_id = f"chatcmpl-{uuid.uuid4().hex}"
        start = partial(Reply, id=new_id, created=int(time.time()), model=self.served.model_id)
        if body.stream:
            return EventStream(self._chunks(stream, start, body), stream)
        async with stream:
            completion = await while_connected(request.receive, stream.result())
        return json_response(self._whole(start, completion, bool(body.return_token_ids)))

    def _whole(self, start: partial[Reply], completion: Completion, has_ids: bool) -> Reply:
        choice = ChatChoice(
            ReplyMessage(completion.text),
            completion.finish_reason,
            self._logprobs(completion.logprobs),
            token_ids=completion.token_ids if has_ids else msgspec.UNSET,
        )
        return start(
            object="chat.completion",
            choices=[choice],
            usage=self.served.usage(completion),
            prompt_token_ids=completion.prompt_token_ids if has_ids else msgspec.UNSET,
        )

    async def _chunks(
        self, stream: ReplyStream, start: partial[Reply], body: ChatRequest
    ) -> AsyncGenerator[msgspec.Struct]:
        """The role, each delta, the finish reason, and usage if asked for."""
        has_ids = bool(body.return_token_ids)
        chunk = partial(start, object="chat.completion.chunk", usage=None if body.include_usage else msgspec.UNSET)
        yield chunk(choices=[ChatChunkChoice(ChatDelta(content="", role="assistant"))])
        async for delta in stream:
            if delta.text or delta.logprobs or (has_ids and delta.token_ids):
                choice = ChatChunkChoice(ChatDelta(content=delta.text), logprobs=self._logprobs(delta.logprobs))
                if has_ids:
                    choice.token_ids = delta.token_ids
                yield chunk(choices=[choice])
            if delta.finish_reason:
                prompt_ids = (await stream.result()).prompt_token_ids if has_ids else msgspec.UNSET
                yield chunk(choices=[ChatChunkChoice(ChatDelta(), delta.finish_reason)], prompt_token_ids=prompt_ids)
        if body.include_usage:
            yield chunk(choices=[], usage=self.served.usage(await stream.result()))

    def _logprobs(self, logprobs: Sequence[TokenLogprob] | None) -> ChatLogprobs | None:
        if logprobs is None:
            return None
        return ChatLogprobs([self._logprob(logprob) for logprob in logprobs])

    def _logprob(self, logprob: TokenLogprob) -> ChatLogprob:
        top = [self._top(token_id, value) for token_id, value in logprob.top]
        own = self._top(logprob.token_id, logprob.logprob)
        return ChatLogprob(own.token, own.logprob, own.bytes, top)

    def _top(self, token_id: int, logprob: float) -> TopLogprob:
        return TopLogprob(self.served.token_text(token_id), logprob, list(self.served.token_bytes(token_id)))
