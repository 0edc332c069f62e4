"""Make requests from what callers pass: text, ids or a conversation, with options.

Fills in the engine's defaults and validates everything, in the caller's thread. Knows prompts and
limits, not how a request is served.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache, partial

from radixlm.tokenizer_fix import PreparedPrompt

from ..artifact.manifest import Manifest
from ..cache.cache_namespace import adapted_namespace
from ..chat.follow_up_turns import FollowUpTurns
from ..errors import InvalidParameter, InvalidRequest
from ..lora.adapters import Adapters
from ..prefix.expected_prompts import ExpectedPrompt
from .engine_options import EngineOptions
from .engine_queue import EngineQueue
from .prompts import Prompts
from .reply import Reply
from .request import Request
from .request_options import Message, Prompt, RequestLimits, RequestOptions, RequestSpec
from .sampling_params import SamplingParams
from .step.readers import Reader

_NOTHING = SamplingParams(max_tokens=0, temperature=0.0)
Renderings = Callable[[str, str], Sequence[str]]  # (reply, reasoning) -> how later prompts may render them
NextIds = Callable[[str, str], Sequence[int]]  # (reply, reasoning) -> ids of the prompt that follows


class RequestMaker:
    """Makes the requests of one engine, in any thread."""

    def __init__(
        self,
        prompts: Prompts,
        manifest: Manifest,
        options: EngineOptions,
        limits: RequestLimits,
        queue: EngineQueue,
        adapters: Adapters,
    ) -> None:
        self._adapters = adapters
        self._prompts, self._model, self._options, self._limits = prompts, manifest.model, options, limits
        self._name, self._writes = manifest.name, manifest.writes_text
        self._does, self._calls = "makes embeddings", "/v1/embeddings, embed"
        if manifest.pairs is not None:
            self._does, self._calls = "scores documents", "/v1/rerank, rerank"
        self._queue = queue
        self._default_params = SamplingParams.recommended(manifest.sampling)
        self._later = FollowUpTurns(prompts)
        self._numbers = itertools.count()

    def completion(self, prompt: Prompt, params: SamplingParams | None, options: RequestOptions) -> Request:
        """Make a request to continue text or ids.

        The prompt keeps its suffix with a grammar, which may not allow a space, and with prompt logprobs.

        Raises:
            EngineOverloaded: too many requests are waiting.
            EmptyPrompt, ContextLengthExceeded, InvalidParameter, InvalidRequest, InvalidGrammar: it cannot be served.
        """
        self._require_generates_text()
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
        """Make a request to answer a conversation.

        Raises:
            EngineOverloaded: too many requests are waiting.
            InvalidRequest: the artifact has no chat template, or the template refuses the messages.
            EmptyPrompt, ContextLengthExceeded, InvalidParameter, InvalidGrammar: as `completion`.
        """
        self._require_generates_text()
        if options.strip_suffix is not None:
            raise InvalidParameter("strip_suffix is for prompts that are no conversation", param="strip_suffix")
        if options.token_healing:
            raise InvalidParameter("token_healing is for prompts that are no conversation", param="token_healing")
        self._queue.require_room(options.turn_of)
        options = self.decided(options)
        messages = self.as_generated(messages, options)
        tools, kwargs, seam_of = options.tools, options.template_kwargs, options.seam_of
        prepared = self._continue_earlier(messages, options) or self._prompts.chat(
            messages, tools, kwargs, seam_of=seam_of, context_length=self._limits.context_length
        )
        next_ids = partial(self._later.next_ids, messages, tools, kwargs, seam_of=seam_of)
        return self._request(prepared, params, options, partial(self._later.renderings, tools=tools), next_ids)

    def reading(
        self, prepare: Callable[[], PreparedPrompt], reads: Callable[[PreparedPrompt], Reader], options: RequestOptions
    ) -> Request:
        """Make a request that computes a prompt for a reader of its rows, and generates nothing.

        Only pages of equal token ids are reused, whatever the engine's default; none if the model's tokens attend to
        later ones.

        Raises:
            EngineOverloaded: too many requests are waiting.
            EmptyPrompt, ContextLengthExceeded, InvalidParameter, InvalidRequest: it cannot be served.
        """
        self._queue.require_room(options.turn_of)
        if options.cache_match in (None, "text", "seam") or self._model.is_bidirectional:
            is_off = self._options.match == "off" or self._model.is_bidirectional
            options = options.changed(cache_match="off" if is_off else "exact")
        prompt = prepare()
        return self._request(prompt, _NOTHING, self.decided(options), reads=lambda: reads(prompt))

    def prepared(self, prompt: PreparedPrompt, reply: Reply, params: SamplingParams) -> Request:
        """Make a request from a prompt and a reply that exist already; only pages of equal ids are reused.

        Raises:
            EmptyPrompt, ContextLengthExceeded, InvalidParameter: it cannot be served.
        """
        self._limits.validate(prompt, params)
        options = self.decided(RequestOptions(cache_match="exact"))
        request_id = f"request-{next(self._numbers)}"
        return Request(RequestSpec(request_id, prompt, params, options, self._options.clock()), reply)

    def decided(self, options: RequestOptions) -> RequestOptions:
        """Return the options with the engine's defaults for those that are unset, and with the LoRA adapter.

        An adapter has a part of the namespace of its own.

        Raises:
            InvalidParameter: there is no such adapter, or an option is not allowed.
        """
        decided = self._options.decide(options, self._model)
        if not isinstance(decided.lora, str):
            return decided
        adapter = self._adapters.named(decided.lora)
        return decided.changed(lora=adapter, namespace=adapted_namespace(decided.namespace, adapter.digest))

    def as_generated(self, messages: Sequence[Message], options: RequestOptions) -> Sequence[Message]:
        """Return the conversation with the tool calls of this namespace as the model wrote them."""
        namespace = self.decided(options).calls_of
        return messages if namespace is None else self._prompts.call_history.respelled(namespace, messages)

    def _continue_earlier(self, messages: Sequence[Message], options: RequestOptions) -> PreparedPrompt | None:
        """Return the prompt that continues the ids of earlier turns; None if there are none that it can continue."""
        earlier, length = options.earlier, self._limits.context_length
        if earlier is None or not 0 < earlier.num_messages < len(messages):
            return None
        return earlier.continued(self._prompts, messages, options.tools, options.template_kwargs, context_length=length)

    def _request(
        self,
        prompt: PreparedPrompt,
        params: SamplingParams | None,
        options: RequestOptions,
        renderings: Renderings | None = None,
        next_ids: NextIds | None = None,
        reads: Callable[[], Reader] | None = None,
    ) -> Request:
        """Make a request from a prepared prompt.

        Args:
            renderings: ways in which later prompts may render the reply; None: it will not come back as text.
            next_ids: ids that begin the next prompt, for a chat; None: the prompt is no chat.
            reads: makes a reader of the prompt's rows besides the sampler; None: there is none.

        Raises:
            InvalidRequest: it can never be served, or its grammar is invalid.
        """
        prompts, params = self._prompts, self._default_params if params is None else params
        self._limits.validate(prompt, params)
        recorder = self._options.recorder
        drawn = params if recorder is None else recorder.sampled_with(params)
        reply = prompts.reply(prompt, drawn, options.constraint, is_chat=next_ids is not None)
        by_text = options.cache_match == "text"
        spelled = cache(lambda: prompts.tokenizer.spelled(prompt.ids)) if by_text else None
        expects: Callable[[str, str], ExpectedPrompt] | None = None
        if next_ids is not None:
            spell = prompts.tokenizer.spelled if by_text else None
            adapter = options.adapter_index
            expects = lambda *said: ExpectedPrompt(options.namespace, lambda: next_ids(*said), spell, adapter)  # noqa: E731
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
            reads,
        )
        return Request(spec, reply)

    def _require_generates_text(self) -> None:
        """Raise InvalidRequest if the model generates no text."""
        if not self._writes:
            raise InvalidRequest(f"model {self._name} {self._does}, and writes no text; ask for these ({self._calls})")


def _require_healable(params: SamplingParams | None, options: RequestOptions) -> None:
    """Raise InvalidParameter if the last token of the prompt cannot be healed."""
    for other, is_set in (
        ("a grammar, which says how the reply itself begins", options.constraint is not None),
        ("logprobs of the prompt, all of whose tokens have some", params and params.prompt_logprobs is not None),
        ("strip_suffix: both are about the last token", bool(options.strip_suffix)),
    ):
        if is_set:
            raise InvalidParameter(f"token_healing does not go with {other}; leave one out", param="token_healing")
