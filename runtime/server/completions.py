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
from .replies import Reply, TextChoice, TextLogprobs
from .reply_stream import ReplyStream
from .requests import CompletionRequest
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
        namespace = self.served.namespace(request, body.cache_salt, body.prompt_cache_key)
        ask = partial(engine.stream, body.one_prompt, params, namespace=namespace, cache_match=body.cache_match)
        stream = await ReplyStream.open(lambda wake: ask(on_ready=wake))
        new_id = f"cmpl-{uuid.uuid4().hex}"
        start = partial(
            Reply, id=new_id, object="text_completion", created=int(time.time()), model=self.served.model_id
        )
        if body.stream:
            return EventStream(self._chunks(stream, start, body), stream)
        async with stream:
            completion = await while_connected(request.receive, stream.result())
        choice = TextChoice(completion.text, completion.finish_reason, self._logprobs(completion.logprobs, 0))
        if body.return_token_ids:
            choice.token_ids, choice.prompt_token_ids = completion.token_ids, completion.prompt_token_ids
        return json_response(start(choices=[choice], usage=self.served.usage(completion)))

    async def _chunks(
        self, stream: ReplyStream, start: partial[Reply], body: CompletionRequest
    ) -> AsyncGenerator[msgspec.Struct]:
        """Each delta, and usage if asked for."""
        has_ids = bool(body.return_token_ids)
        chunk = partial(start, usage=None if body.include_usage else msgspec.UNSET)
        num_characters = 0
        async for delta in stream:
            if delta.text or delta.logprobs or delta.finish_reason or (has_ids and delta.token_ids):
                logprobs = self._logprobs(delta.logprobs, num_characters)
                choice = TextChoice(delta.text, delta.finish_reason, logprobs)
                if has_ids:
                    choice.token_ids = delta.token_ids
                if has_ids and delta.finish_reason:
                    choice.prompt_token_ids = (await stream.result()).prompt_token_ids
                yield chunk(choices=[choice])
            num_characters += len(delta.text)
        if body.include_usage:
            yield chunk(choices=[], usage=self.served.usage(await stream.result()))

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
