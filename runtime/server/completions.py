"""`POST /v1/completions`: prompts continued as they are written, whole or as it is made."""

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
from .logprobs import text_logprobs
from .replies import PromptProgressReply, Reply, TextChoice
from .request_log import record_of
from .requests import CompletionRequest, Prompt
from .response_format import compiled
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
        params = body.sampling_params(self.served.engine.default_params)
        prompts = [prompt for prompt in body.prompts for _ in range(body.num_choices)]
        wishes = params_of_choices(params, body.num_choices) * len(body.prompts)
        namespace = self.served.namespace(request, body.cache_salt, body.prompt_cache_key)
        with body.naming():
            constraint = await compiled(self.served.engine, body.grammar(), request)
        ask = partial(
            self.served.engine.stream,
            namespace=namespace,
            cache_match=body.cache_match,
            kv_budget=body.kv_budget,
            constraint=constraint,
            request_id=record_of(request).request_id or None,
            with_progress=bool(body.return_progress),
        )
        submits = [partial(ask, *item) for item in zip(prompts, wishes, strict=True)]
        run = partial(self.served.lanes.submission.run, request)
        choices = await Choices.open(submits, run, record_of(request), most=self.served.engine.max_num_requests)
        new_id = f"cmpl-{uuid.uuid4().hex}"
        start = partial(
            Reply, id=new_id, object="text_completion", created=int(time.time()), model=self.served.model_id
        )
        echoes = [self._text(prompt) if body.echo else "" for prompt in prompts]
        if body.stream:
            chunks = self._chunks(choices, start, body, echoes)
            return EventStream(chunks, choices, keep_alive_s=self.served.keep_alive_s)
        async with choices:
            completions = await while_connected(request.receive, choices.results())
        return json_response(
            start(
                choices=[
                    self._choice(index, completion, echo, body)
                    for index, (completion, echo) in enumerate(zip(completions, echoes, strict=True))
                ],
                usage=self.served.usage(completions, body.num_choices),
            )
        )

    def _choice(self, index: int, completion: Completion, echo: str, body: CompletionRequest) -> TextChoice:
        logprobs = text_logprobs(self.served, completion.logprobs)
        choice = TextChoice(echo + completion.text, completion.finish_reason, logprobs, index)
        choice.stop_reason = completion.stop_reason
        if body.return_token_ids:
            choice.token_ids, choice.prompt_token_ids = completion.token_ids, completion.prompt_token_ids
        return choice

    async def _chunks(
        self, choices: Choices, start: partial[Reply], body: CompletionRequest, echoes: Sequence[str]
    ) -> AsyncGenerator[msgspec.Struct]:
        """The prompts if they are to be echoed, each delta, and usage if asked for."""
        has_ids = bool(body.return_token_ids)
        chunk = partial(start, usage=None if body.include_usage else msgspec.UNSET)
        for index, echo in enumerate(echoes):
            if echo:
                yield chunk(choices=[TextChoice(echo, index=index)])
        num_characters = [0] * len(echoes)
        async for index, delta in choices:
            if delta.progress is not None:
                progress = PromptProgressReply.of(delta.progress)
                yield chunk(choices=[TextChoice("", index=index)], prompt_progress=progress)
            if delta.text or delta.logprobs or delta.finish_reason or (has_ids and delta.token_ids):
                logprobs = text_logprobs(self.served, delta.logprobs, num_characters[index])
                choice = TextChoice(delta.text, delta.finish_reason, logprobs, index)
                if delta.finish_reason:
                    choice.stop_reason = delta.stop_reason
                if has_ids:
                    choice.token_ids = delta.token_ids
                if has_ids and delta.finish_reason:
                    choice.prompt_token_ids = (await choices.result(index)).prompt_token_ids
                yield chunk(choices=[choice])
            num_characters[index] += len(delta.text)
        if body.include_usage:
            yield chunk(choices=[], usage=self.served.usage(await choices.results(), body.num_choices))

    def _text(self, prompt: Prompt) -> str:
        return prompt if isinstance(prompt, str) else self.served.text(prompt)
