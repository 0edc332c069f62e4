"""Make requests of what callers pass: text, ids or a conversation, with options.

Decides what a request leaves open as the engine has it, and checks all of it; in the caller's thread. Knows prompts and
limits, not how a request is served.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache, partial

from radixlm.tokenizer_fix import PreparedPrompt

from ..artifact.manifest import Manifest
from ..chat.follow_up_turns import FollowUpTurns
from ..errors import InvalidParameter
from ..prefix.expected_prompts import ExpectedPrompt
from .engine_options import EngineOptions
from .engine_queue import EngineQueue
from .prompts import Prompts
from .request import Request
from .request_options import Message, Prompt, RequestLimits, RequestOptions, RequestSpec
from .sampling_params import SamplingParams

Said = Callable[[str, str], Sequence[str]]  # of a reply and its thought: how later prompts may render it
NextIds = Callable[[str, str], Sequence[int]]  # of a reply and its thought: the prompt that comes after it


class RequestMaker:
    """Makes the requests of one engine; any thread may."""

    def __init__(
        self, prompts: Prompts, manifest: Manifest, options: EngineOptions, limits: RequestLimits, queue: EngineQueue
    ) -> None:
        self._prompts, self._model, self._options, self._limits = prompts, manifest.model, options, limits
        self._queue = queue
        self._default_params = SamplingParams.recommended(manifest.sampling)
        self._later = FollowUpTurns(prompts)
        self._numbers = itertools.count()

    def completion(self, prompt: Prompt, params: SamplingParams | None, options: RequestOptions) -> Request:
        """A request to continue text or ids. A prompt keeps its suffix with a grammar, which may want no space, and
        where all of its tokens have logprobs.

        Raises:
            EngineOverloaded: too many requests wait.
            EmptyPrompt, ContextLengthExceeded, InvalidParameter, InvalidRequest, InvalidGrammar: it cannot be served.
        """
        if options.tools:
            raise InvalidParameter("tools are for conversations; use chat", param="tools")
        if options.template_kwargs:
            raise InvalidParameter("template_kwargs are for conversations; use chat", param="chat_template_kwargs")
        if options.token_healing:
            _require_healable(params, options)
        self._queue.require_room(options.turn_of)
        options = self.decided(options)
        is_whole = options.constraint is not None or (params is not None and params.prompt_logprobs is not None)
        prepared = self._prompts.completion(
            prompt,
            seam_of=options.seam_of,
            context_length=self._limits.context_length,
            strip_suffix=False if is_whole else options.strip_suffix,
            heals=options.token_healing,
        )
        return self._request(prepared, params, options)

    def chat(self, messages: Sequence[Message], params: SamplingParams | None, options: RequestOptions) -> Request:
        """A request to answer a conversation.

        Raises:
            EngineOverloaded: too many requests wait.
            InvalidRequest: the artifact has no chat template, or the template refuses the messages.
            EmptyPrompt, ContextLengthExceeded, InvalidParameter, InvalidGrammar: as `completion`.
        """
        if options.strip_suffix is not None:
            raise InvalidParameter("strip_suffix is for prompts that are no conversation", param="strip_suffix")
        if options.token_healing:
            raise InvalidParameter("token_healing is for prompts that are no conversation", param="token_healing")
        self._queue.require_room(options.turn_of)
        options = self.decided(options)
        messages = self.as_generated(messages, options)
        tools, kwargs, seam_of = options.tools, options.template_kwargs, options.seam_of
        prepared = self._prompts.chat(
            messages, tools, kwargs, seam_of=seam_of, context_length=self._limits.context_length
        )
        next_ids = partial(self._later.next_ids, messages, tools, kwargs, seam_of=seam_of)
        return self._request(prepared, params, options, partial(self._later.renderings, tools=tools), next_ids)

    def decided(self, options: RequestOptions) -> RequestOptions:
        """The options with the engine's own where a request leaves them open."""
        return self._options.decide(options, self._model)

    def as_generated(self, messages: Sequence[Message], options: RequestOptions) -> Sequence[Message]:
        """A conversation in which the calls that this namespace was given are written as the model wrote them."""
        namespace = self.decided(options).calls_of
        return messages if namespace is None else self._prompts.call_history.respelled(namespace, messages)

    def _request(
        self,
        prompt: PreparedPrompt,
        params: SamplingParams | None,
        options: RequestOptions,
        renderings: Said | None = None,
        next_ids: NextIds | None = None,
    ) -> Request:
        prompts, params = self._prompts, self._default_params if params is None else params
        self._limits.validate(prompt, params)
        reply = prompts.reply(prompt, params, options.constraint, is_chat=next_ids is not None)
        by_text = options.cache_match == "text"
        spelled = cache(lambda: prompts.tokenizer.spelled(prompt.ids)) if by_text else None
        expects: Callable[[str, str], ExpectedPrompt] | None = None
        if next_ids is not None:
            spell = prompts.tokenizer.spelled if by_text else None
            expects = lambda *said: ExpectedPrompt(options.namespace, lambda: next_ids(*said), spell)  # noqa: E731
        spec = RequestSpec(
            f"request-{next(self._numbers)}",
            prompt,
            params,
            options,
            self._options.clock(),
            spelled,
            renderings if by_text else None,
            expects,
            prompts.explain,
        )
        return Request(spec, reply)


def _require_healable(params: SamplingParams | None, options: RequestOptions) -> None:
    """Raise InvalidParameter where the last token of a prompt cannot be chosen anew."""
    for other, is_set in (
        ("a grammar, which says how the reply itself begins", options.constraint is not None),
        ("logprobs of the prompt, all of whose tokens have some", params and params.prompt_logprobs is not None),
        ("strip_suffix: both are about the last token", bool(options.strip_suffix)),
    ):
        if is_set:
            raise InvalidParameter(f"token_healing does not go with {other}; leave one out", param="token_healing")
