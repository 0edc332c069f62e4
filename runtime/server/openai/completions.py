"""`POST /v1/completions`: continuations of prompts without a chat template, whole or streamed."""

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
from ..choices import Choices, params_of_choices
from ..http.connection import while_connected
from ..http.sse import EventStream
from ..lenient.shapes import COMPLETIONS as SHAPES
from ..lenient.shapes import relaxing
from ..models import ModelEndpoint
from ..request_log import new_id
from ..served import Served, whole_answer
from ..truncation import cut_middle, require_countable
from .prompt_logprobs import PromptLogprobFields, joined
from .replies import CutPromptReply, PromptProgressReply, Reply, TextChoice, UsageReply
from .reply_parts import ChunkUsage, TextTokens, usage_of
from .requests import CompletionRequest, Prompt

Cut = CutPromptReply | msgspec.UnsetType
"""The tokens that were cut out of a prompt; unset if the request does not truncate."""
Prepared = tuple[CompletionRequest, SamplingParams, Grammar | None]


@dataclass(frozen=True)
class PreparedPrompt:
    """A prompt for the engine: text or token ids, and whether to strip the token of a final space."""

    prompt: Prompt
    strip_suffix: bool | None
    cut: Cut = msgspec.UNSET


def _prepare(served: Served, request: Request, body: CompletionRequest) -> Prepared:
    """Check the body; return it with its sampling parameters and grammar."""
    params = body.sampling_params(served.engine.default_params)
    with body.naming():
        return body, params, body.grammar()


async def create(served: Served, request: Request, prepared: Prepared) -> Response:
    """`POST /v1/completions`: return the continuations, whole or as a stream."""
    body, params, content = prepared
    prompts, work_queues = body.prompts, served.work_queues
    require_few_reply_logprobs(len(prompts) * body.num_choices, params, served.engine.context_length)
    wishes = [params] * len(prompts)
    if body.num_choices > 1:
        several = partial(params_of_choices, params, body.num_choices)
        wishes = await work_queues.submission.run(request, several, may_hold_loop=False) * len(prompts)
    options = served.request_options(request, body).changed(token_healing=bool(body.token_healing))
    with body.naming():
        if content is not None:
            constrain = partial(served.constraint, request)
            held = served.as_far_as_followed(request, content, constrain, field="response_format")
            options = options.changed(constraint=await held)
    is_whole = options.constraint is not None or params.prompt_logprobs is not None or options.token_healing
    fed = await _prepared_prompts(served, request, body, params, False if is_whole else body.strip_suffix)
    asks = [
        partial(served.engine.stream, each.prompt, wish, options=options.changed(strip_suffix=each.strip_suffix))
        for each, wish in zip(fed, wishes, strict=True)
    ]
    choices = await served.open(request, asks, params)
    echoes = [""] * len(fed)
    if body.echo:
        texts = await work_queues.submission.run(request, lambda: [_text(served, prompt) for prompt in prompts])
        echoes = [text for text in texts for _ in range(body.num_choices)]
    answer = _Answer(served, body, choices, echoes, [each.cut for each in fed])
    if body.stream:
        return EventStream(answer.chunks(), choices, keep_alive_s=served.options.keep_alive_s)
    async with choices:
        completions = await while_connected(request.receive, choices.results())
    prompt_fields = [
        None if completion.prompt_logprobs is None else await answer.prompt(completion.prompt_logprobs, echo)
        for completion, echo in zip(completions, echoes, strict=True)
    ]
    return await whole_answer(completions, lambda: answer.whole(completions, prompt_fields))


COMPLETIONS = ModelEndpoint(CompletionRequest, _prepare, create, leave_out=relaxing(SHAPES, CompletionRequest))


async def _prepared_prompts(
    served: Served, request: Request, body: CompletionRequest, params: SamplingParams, strip_suffix: bool | None
) -> list[PreparedPrompt]:
    """Return the prompt of each choice, truncated if the request allows it."""
    whole = [PreparedPrompt(prompt, strip_suffix) for prompt in body.prompts]
    if served.truncates(body.truncation):
        cut = partial(_cut, served, max_tokens=params.max_tokens)
        whole = await served.work_queues.truncation.run(request, lambda: [cut(each) for each in whole])
    return [each for each in whole for _ in range(body.num_choices)]


def _cut(served: Served, whole: PreparedPrompt, *, max_tokens: int | None) -> PreparedPrompt:
    """Cut the middle out of a prompt that does not fit into the context. The result is token ids, with the suffix to
    strip if the original had one.
    """
    engine, prompt = served.engine, whole.prompt
    if isinstance(prompt, str):
        require_countable("prompt", len(prompt.encode(errors="replace")))
    prepared = engine.prompts.completion(prompt, strip_suffix=whole.strip_suffix)
    left = cut_middle(
        list(prepared.ids),
        begins_character=served.begins_character,
        context_length=engine.context_length,
        max_tokens=max_tokens,
    )
    truncation = CutPromptReply("middle", left.start, left.num_dropped_tokens)
    if not left.num_dropped_tokens:
        return replace(whole, cut=truncation)
    if prepared.space_id is None:
        return PreparedPrompt(left.ids, False, truncation)
    return PreparedPrompt([*left.ids, prepared.space_id], True, truncation)


def _text(served: Served, prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else served.text(prompt)


class _Answer:
    """The response to one completion request, whole or as chunks.

    Args:
        echoes: for each choice, the prompt's text that its own text begins with.
        cuts: for each choice, the tokens that were cut out of its prompt.
    """

    def __init__(
        self, served: Served, body: CompletionRequest, choices: Choices, echoes: Sequence[str], cuts: Sequence[Cut]
    ) -> None:
        self._served = served
        self._body = body
        self._choices = choices
        self._echoes = echoes
        self._cuts = cuts
        self._start = partial(
            Reply,
            id=new_id("cmpl-"),
            object="text_completion",
            created=int(time.time()),
            model=served.called(body.model),
            system_fingerprint=served.fingerprint,
        )

    def whole(self, completions: Sequence[Completion], prompts: Sequence[PromptLogprobFields | None]) -> Reply:
        """Return the whole response, with the prompt's logprobs of each choice."""
        return self._start(
            choices=[self._choice(index, *each) for index, each in enumerate(zip(completions, prompts, strict=True))],
            usage=self._usage(completions),
        )

    async def chunks(self) -> AsyncGenerator[msgspec.Struct]:
        """Yield echoed prompts and truncations, each delta, and at the end the usage if the client asked for it."""
        body, choices = self._body, self._choices
        has_ids, has_guesses = bool(body.return_token_ids), bool(body.return_guesses)
        usage = ChunkUsage(choices, is_told=body.include_usage, is_running=body.has_running_usage)

        def chunk(choice: TextChoice) -> Reply:
            return self._start(choices=[choice], usage=usage.of(choice.index))

        for index, (echo, cut) in enumerate(zip(self._echoes, self._cuts, strict=True)):
            if (echo and not body.echoes_logprobs) or cut:
                yield chunk(TextChoice("" if body.echoes_logprobs else echo, index=index, truncation=cut))
        tokens = [TextTokens(self._served, choices.num_swallowed(index)) for index in range(len(self._echoes))]
        async for index, delta in choices:
            if delta.progress is not None:
                progress = chunk(TextChoice("", index=index))
                progress.prompt_progress = PromptProgressReply.of(delta.progress)
                yield progress
            if delta.prompt_logprobs is not None:
                fields = await self.prompt(delta.prompt_logprobs, self._echoes[index])
                tokens[index], text = fields.tokens, self._echoes[index] if body.echoes_logprobs else ""
                yield chunk(TextChoice(text, logprobs=fields.echoed, index=index, prompt_logprobs=fields.by_id))
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
                    choice.prompt_token_ids = choices.result(index).prompt_token_ids
                yield chunk(choice)
        if body.include_usage:
            yield self._start(choices=[], usage=self._usage(await choices.results()))

    async def prompt(self, logprobs: PromptLogprobs, echo: str) -> PromptLogprobFields:
        """Return the logprobs of a prompt. Made in a thread, because there may be very many."""
        return await asyncio.to_thread(PromptLogprobFields.of, self._served, self._body, logprobs, echo)

    def _choice(self, index: int, completion: Completion, prompt: PromptLogprobFields | None) -> TextChoice:
        """Return one choice of the response from its completion.

        `prompt` has the prompt's logprobs; None if they were not asked for.
        """
        body = self._body
        tokens = TextTokens(self._served, completion.num_swallowed) if prompt is None else prompt.tokens
        logprobs = tokens.logprobs(completion.logprobs)
        text, reason = self._echoes[index] + completion.text, completion.finish_reason
        choice = TextChoice(text, reason, logprobs, index, truncation=self._cuts[index])
        if prompt is not None:
            choice.logprobs, choice.prompt_logprobs = joined(prompt.echoed, logprobs), prompt.by_id
        choice.stop_reason = completion.stop_reason
        if body.return_token_ids:
            choice.token_ids, choice.prompt_token_ids = completion.token_ids, completion.prompt_token_ids
        return choice

    def _usage(self, completions: Sequence[Completion]) -> UsageReply:
        tells = self._served.options.tells_cached_text
        return usage_of(completions, self._body.num_choices, tells_cached_text=tells)
