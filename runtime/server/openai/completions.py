"""`POST /v1/completions`: prompts continued as they are written, whole or as it is made."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ...chat.grammar import Grammar
from ...engine.completion import Completion, PromptLogprobs
from ...engine.request_options import require_few_reply_logprobs
from ...engine.sampling_params import SamplingParams
from ..app_state import AppState
from ..choices import Choices, params_of_choices
from ..http.disconnect import while_connected
from ..http.sse import EventStream
from ..lenient.shapes import COMPLETIONS, relaxing
from ..request_log import new_id
from ..truncation import cut_middle, require_countable
from .replies import CutPromptReply, PromptProgressReply, Reply, TextChoice, UsageReply
from .reply_parts import ChunkUsage, TextTokens, usage_of
from .requests import CompletionRequest, Prompt
from .told_prompt import ToldPrompt, joined

_LEAVE_OUT = relaxing(COMPLETIONS, CompletionRequest)
Cut = CutPromptReply | msgspec.UnsetType
"""The tokens that were cut out of a prompt; unset: the request does not allow that."""


@dataclass(frozen=True)
class FedPrompt:
    """A prompt as the engine gets it: text or ids, and whether it loses the token of a lone space at its end."""

    prompt: Prompt
    strip_suffix: bool | None
    cut: Cut = msgspec.UNSET


@dataclass(frozen=True)
class Completions:
    """The endpoint for one served model."""

    state: AppState

    async def create(self, request: Request) -> Response:
        """Answer one request; `errors.describe` knows every error that it raises."""
        body, params, content = await self.state.prepared(request, CompletionRequest, self._read, leave_out=_LEAVE_OUT)
        model, asked = self.state.models.named(body.model), body.prompts
        num_replies = len(asked) * body.num_choices
        require_few_reply_logprobs(num_replies, params, self.state.engine.context_length)
        wishes = [params] * len(asked)
        if body.num_choices > 1:
            run = partial(self.state.lanes.submission.run, request, may_hold_loop=False)
            wishes = await run(partial(params_of_choices, params, body.num_choices)) * len(asked)
        options = self.state.options(request, body).changed(token_healing=bool(body.token_healing))
        with body.naming():
            if content is not None:
                constrain = partial(self.state.constraint, request)
                held = self.state.as_far_as_followed(request, content, constrain, field="response_format")
                options = options.changed(constraint=await held)
        is_whole = options.constraint is not None or params.prompt_logprobs is not None or options.token_healing
        strip_suffix = False if is_whole else body.strip_suffix
        fed = await self._fed(request, body, asked, params, strip_suffix)
        cuts = [each.cut for each in fed]
        stream = self.state.engine.stream
        submits = [
            partial(stream, each.prompt, wish, options=options.changed(strip_suffix=each.strip_suffix))
            for each, wish in zip(fed, wishes, strict=True)
        ]
        choices = await self.state.open(request, submits, params)
        start = partial(
            Reply,
            id=new_id("cmpl-"),
            object="text_completion",
            created=int(time.time()),
            model=model,
            system_fingerprint=self.state.fingerprint,
        )
        echoes = [""] * len(fed)
        if body.echo:
            texts = await self.state.lanes.submission.run(request, lambda: [self._text(prompt) for prompt in asked])
            echoes = [text for text in texts for _ in range(body.num_choices)]
        if body.stream:
            chunks = self._chunks(choices, start, body, echoes, cuts)
            return EventStream(chunks, choices, keep_alive_s=self.state.keep_alive_s)
        async with choices:
            completions = await while_connected(request.receive, choices.results())
        parts = list(zip(completions, echoes, cuts, strict=True))
        told = [
            None if completion.prompt_logprobs is None else await self._prompt(body, completion.prompt_logprobs, echo)
            for completion, echo, _ in parts
        ]

        def make() -> Reply:
            return start(
                choices=[self._choice(index, *part, body, told[index]) for index, part in enumerate(parts)],
                usage=self._usage(completions, body.num_choices),
            )

        return await self.state.answer(completions, make)

    def _read(self, body: CompletionRequest) -> tuple[CompletionRequest, SamplingParams, Grammar | None]:
        self.state.models.named(body.model)
        params = body.sampling_params(self.state.engine.default_params)
        with body.naming():
            return body, params, body.grammar()

    async def _fed(
        self,
        request: Request,
        body: CompletionRequest,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        strip_suffix: bool | None,
    ) -> list[FedPrompt]:
        """The prompt of each choice as the engine gets it, without the middle that was cut."""
        whole = [FedPrompt(prompt, strip_suffix) for prompt in prompts]
        if self.state.truncates(body.truncation):
            cut = partial(self._cut, max_tokens=params.max_tokens)
            whole = await self.state.lanes.truncation.run(request, lambda: [cut(each) for each in whole])
        return [each for each in whole for _ in range(body.num_choices)]

    def _cut(self, whole: FedPrompt, *, max_tokens: int | None) -> FedPrompt:
        """A prompt that fits stays as it is. One that does not becomes ids, which lose the same token at their end."""
        engine, prompt = self.state.engine, whole.prompt
        if isinstance(prompt, str):
            require_countable("prompt", len(prompt.encode(errors="replace")))
        prepared = engine.prompts.completion(prompt, strip_suffix=whole.strip_suffix)
        left = cut_middle(
            list(prepared.ids),
            begins_character=self.state.begins_character,
            context_length=engine.context_length,
            max_tokens=max_tokens,
        )
        said = CutPromptReply("middle", left.start, left.num_dropped_tokens)
        if not left.num_dropped_tokens:
            return replace(whole, cut=said)
        if prepared.space_id is None:
            return FedPrompt(left.ids, False, said)
        return FedPrompt([*left.ids, prepared.space_id], True, said)

    async def _prompt(self, body: CompletionRequest, told: PromptLogprobs, echo: str) -> ToldPrompt:
        """What is said of a prompt's tokens; in a thread, for they may be very many."""
        return await asyncio.to_thread(ToldPrompt.of, self.state, body, told, echo)

    def _choice(
        self,
        index: int,
        completion: Completion,
        echo: str,
        cut: Cut,
        body: CompletionRequest,
        prompt: ToldPrompt | None,
    ) -> TextChoice:
        tokens = TextTokens(self.state, completion.num_swallowed) if prompt is None else prompt.tokens
        logprobs = tokens.logprobs(completion.logprobs)
        choice = TextChoice(echo + completion.text, completion.finish_reason, logprobs, index, truncation=cut)
        if prompt is not None:
            choice.logprobs, choice.prompt_logprobs = joined(prompt.echoed, logprobs), prompt.by_id
        choice.stop_reason = completion.stop_reason
        if body.return_token_ids:
            choice.token_ids, choice.prompt_token_ids = completion.token_ids, completion.prompt_token_ids
        return choice

    async def _chunks(
        self,
        choices: Choices,
        start: partial[Reply],
        body: CompletionRequest,
        echoes: Sequence[str],
        cuts: Sequence[Cut],
    ) -> AsyncGenerator[msgspec.Struct]:
        """The prompts and what was cut out of them, if asked for; each delta; at the end the usage, if asked for."""
        has_ids, has_guesses = bool(body.return_token_ids), bool(body.return_guesses)
        usage = ChunkUsage(choices, is_told=body.include_usage, is_running=body.has_running_usage)

        def chunk(choice: TextChoice) -> Reply:
            return start(choices=[choice], usage=usage.of(choice.index))

        for index, (echo, cut) in enumerate(zip(echoes, cuts, strict=True)):
            if (echo and not body.echoes_logprobs) or cut:
                yield chunk(TextChoice("" if body.echoes_logprobs else echo, index=index, truncation=cut))
        tokens = [TextTokens(self.state, choices.num_swallowed(index)) for index in range(len(echoes))]
        async for index, delta in choices:
            if delta.progress is not None:
                progress = chunk(TextChoice("", index=index))
                progress.prompt_progress = PromptProgressReply.of(delta.progress)
                yield progress
            if delta.prompt_logprobs is not None:
                told = await self._prompt(body, delta.prompt_logprobs, echoes[index])
                tokens[index], text = told.tokens, echoes[index] if body.echoes_logprobs else ""
                yield chunk(TextChoice(text, logprobs=told.echoed, index=index, prompt_logprobs=told.by_id))
            usage.count(index, delta)
            if delta.text or delta.logprobs or delta.finish_reason or ((has_ids or has_guesses) and delta.token_ids):
                choice = TextChoice(delta.text, delta.finish_reason, tokens[index].logprobs(delta.logprobs), index)
                if delta.finish_reason:
                    choice.stop_reason = delta.stop_reason
                if has_ids:
                    choice.token_ids = delta.token_ids
                if has_guesses:
                    choice.guessed = delta.guessed
                if has_ids and delta.finish_reason:
                    choice.prompt_token_ids = (await choices.result(index)).prompt_token_ids
                yield chunk(choice)
        if body.include_usage:
            yield start(choices=[], usage=self._usage(await choices.results(), body.num_choices))

    def _text(self, prompt: Prompt) -> str:
        return prompt if isinstance(prompt, str) else self.state.text(prompt)

    def _usage(self, completions: Sequence[Completion], num_choices: int) -> UsageReply:
        return usage_of(completions, num_choices, tells_cached_text=self.state.tells_cached_text)
