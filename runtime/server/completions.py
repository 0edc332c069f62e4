"""`POST /v1/completions`: a prompt continued as it is written, whole or as it is made."""

from __future__ import annotations

import codecs
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ..completion import TokenLogprob
from .disconnect import while_connected
from .protocol import CompletionRequest, Reply, TextChoice, TextLogprobs, UsageReply
from .reply_stream import ReplyStream
from .served import Served, json_response
from .sse import EventStream


@dataclass(frozen=True)
class Completions:
    """The endpoint for one served model."""

    served: Served

    async def create(self, request: Request) -> Response:
        """Answer one request; every error it raises is one of `errors.describe`."""
        body = await self.served.read(request, CompletionRequest)
        self.served.check_model(body.model)
        engine = self.served.engine
        params = body.sampling_params(engine.default_params)
        prompt = body.one_prompt
        stream = await ReplyStream.open(lambda wake: engine.stream(prompt, params, on_ready=wake))
        new_id = f"cmpl-{uuid.uuid4().hex}"
        start = partial(
            Reply, id=new_id, object="text_completion", created=int(time.time()), model=self.served.model_id
        )
        if body.stream:
            return EventStream(self._chunks(stream, start, body.include_usage), stream)
        async with stream:
            completion = await while_connected(request.receive, stream.result())
        logprobs = self._logprobs(completion.logprobs, 0)
        choice = TextChoice(completion.text, completion.finish_reason, logprobs)
        return json_response(start(choices=[choice], usage=UsageReply.of(completion)))

    async def _chunks(
        self, stream: ReplyStream, start: partial[Reply], include_usage: bool
    ) -> AsyncGenerator[msgspec.Struct]:
        """Each delta, and usage if asked for."""
        chunk = partial(start, usage=None if include_usage else msgspec.UNSET)
        num_characters = 0
        async for delta in stream:
            if delta.text or delta.logprobs or delta.finish_reason:
                logprobs = self._logprobs(delta.logprobs, num_characters)
                yield chunk(choices=[TextChoice(delta.text, delta.finish_reason, logprobs)])
            num_characters += len(delta.text)
        if include_usage:
            yield chunk(choices=[], usage=UsageReply.of(await stream.result()))

    def _logprobs(self, logprobs: Sequence[TokenLogprob] | None, offset: int) -> TextLogprobs | None:
        """The tokens' logprobs, the first of them `offset` characters into the reply."""
        if logprobs is None:
            return None
        reply = TextLogprobs([], [], [], [])
        characters = codecs.getincrementaldecoder("utf-8")("replace")
        for logprob in logprobs:
            reply.tokens.append(self._name(logprob.token_id))
            reply.token_logprobs.append(logprob.logprob)
            reply.top_logprobs.append({self._name(i): value for i, value in logprob.top})
            reply.text_offset.append(offset)
            offset += len(characters.decode(self.served.token_bytes(logprob.token_id)))
        return reply

    def _name(self, token_id: int) -> str:
        """A token's text, or OpenAI's `bytes:\\xf0\\x9f` for a part of a character: names must differ."""
        try:
            self.served.token_bytes(token_id).decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.served.token_bytes(token_id))
        return self.served.token_text(token_id)
