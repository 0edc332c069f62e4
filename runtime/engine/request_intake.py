"""Make of what a caller asks a request that the engine can compute, in the caller's own thread.

Knows prompts, parameters and grammars; not pages, steps or who waits for the reply.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from radixlm.tokenizer_fix import PreparedPrompt

from ..artifact.manifest import Manifest
from ..cache.prefix_match import MatchPolicy
from ..chat.grammar import Grammar
from ..chat.token_constraint import TokenConstraint
from ..chat.tool_format import Tool
from ..errors import InvalidParameter, InvalidRequest
from .prompts import Message, Prompt, Prompts
from .reply import Reply
from .request import Request, RequestLimits, RequestSpec
from .request_options import RequestOptions, checked_budget, checked_match
from .sampling_params import SamplingParams
from .space_first import SpaceTokens

if TYPE_CHECKING:
    from ..chat.grammars import Grammars

_FROM_SEAMS: tuple[MatchPolicy, ...] = ("seam", "text")  # a prompt goes on from an earlier one's encoding


class RequestIntake:
    """Prepares, checks and numbers the requests of one model; any thread may ask.

    Args:
        context_length: tokens of prompt and reply together.
        match: how cached prefixes may be found, where a request does not say.
        kv_budget: likewise, the share of a stored prefix's keys and values that is enough; None: no request may ask for
            less than all.
        clock: seconds; only differences count.

    Attributes:
        limits: what every request keeps to.
        default_params: what the model's makers recommend, for requests that say nothing.
        match: how cached prefixes may be found, likewise.

    Raises:
        InvalidParameter: there is no such `match`, or the budget is no share.
    """

    def __init__(
        self,
        manifest: Manifest,
        prompts: Prompts,
        *,
        context_length: int,
        match: MatchPolicy,
        kv_budget: float | None = None,
        clock: Callable[[], float],
    ) -> None:
        vocab_size = min(manifest.model.vocab_size, prompts.tokenizer.vocab_size)  # embeddings may be padded
        self.limits = RequestLimits(vocab_size, context_length)
        self.default_params = SamplingParams(
            temperature=manifest.sampling.temperature,
            top_p=manifest.sampling.top_p,
            top_k=manifest.sampling.top_k,
            repetition_penalty=manifest.sampling.repetition_penalty,
        )
        self._model_name, self._eos_token_ids = manifest.name, manifest.tokenizer.eos_token_ids
        self._prompts = prompts
        self._space_tokens = SpaceTokens(prompts.tokenizer, vocab_size)
        self.match = checked_match(match)
        self._kv_budget = None if kv_budget is None else checked_budget(kv_budget)
        self._clock = clock
        self._numbers = itertools.count()
        self._grammars: Grammars | None = None
        self._opening_grammars = threading.Lock()

    def completion(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        options: RequestOptions,
        *,
        strip_suffix: bool | None = None,
    ) -> Request:
        """A request to continue text or ids. With a grammar, which may want no space, a prompt keeps its suffix.

        Raises:
            EmptyPrompt, ContextLengthExceeded, InvalidParameter, InvalidRequest, InvalidGrammar: it cannot be served.
        """
        options = self._decided(options)
        prepared = self._prompts.completion(
            prompt,
            seam_of=_seam_of(options),
            context_length=self.limits.context_length,
            strip_suffix=strip_suffix if options.constraint is None else False,
        )
        return self._request(prepared, params, options, render_reply=None)

    def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        params: SamplingParams | None,
        options: RequestOptions,
    ) -> Request:
        """A request to answer a conversation.

        Raises:
            EmptyPrompt, ContextLengthExceeded, InvalidParameter, InvalidRequest, InvalidGrammar: it cannot be served.
        """
        options, context_length = self._decided(options), self.limits.context_length
        prepared = self._prompts.chat(messages, tools, seam_of=_seam_of(options), context_length=context_length)
        return self._request(prepared, params, options, render_reply=self._prompts.render_reply)

    @property
    def grammars(self) -> Grammars:
        """Compiles what replies are to keep to; nothing is spent on it before the first use.

        Raises:
            InvalidRequest: the model has no token that ends a reply.
        """
        with self._opening_grammars:
            if self._grammars is None:
                self._grammars = self._open_grammars()
            return self._grammars

    def close(self) -> None:
        """Free what compiles grammars. May be called twice."""
        if self._grammars is not None:
            self._grammars.close()

    def _request(
        self,
        prompt: PreparedPrompt,
        params: SamplingParams | None,
        options: RequestOptions,
        *,
        render_reply: Callable[[str], str] | None,
    ) -> Request:
        params = self.default_params if params is None else params
        tokenizer = self._prompts.tokenizer
        self.limits.validate(prompt, params)
        constraint = options.constraint
        if isinstance(constraint, Grammar):
            constraint = self.grammars.compile(constraint)
        begun: TokenConstraint | None = None if constraint is None else constraint.start()
        if prompt.space_id is not None:
            begun = self._space_tokens.start(params.end_ids(self._eos_token_ids))
        is_by_text = options.cache_match == "text"
        spec = RequestSpec(
            f"request-{next(self._numbers)}",
            prompt,
            params,
            options,
            arrived_at=self._clock(),
            spelled=functools.cache(lambda: tokenizer.spelled(prompt.ids)) if is_by_text else None,
            render_reply=render_reply if is_by_text else None,
            explain=self._prompts.explain,
        )
        reply = Reply(
            params,
            prompt.ids,
            decoder=tokenizer.stream(prompt_ids=prompt.ids, swallow_leading_space=prompt.swallow_leading_space),
            vocab_size=self.limits.vocab_size,
            eos_token_ids=self._eos_token_ids,
            constraint=begun,
        )
        return Request(spec, reply)

    def _decided(self, options: RequestOptions) -> RequestOptions:
        """The options, with the engine's choices where a request makes none."""
        cache_match = self.match if options.cache_match is None else options.cache_match
        kv_budget = self._kv_budget if options.kv_budget is None else options.kv_budget
        if kv_budget is not None and kv_budget < 1 and self._kv_budget is None:
            raise InvalidParameter(
                f"kv_budget is {kv_budget}, and all of a prefix is loaded here; leave it out, or open the engine with "
                f"a kv_budget (radixlm serve --kv-budget)",
                param="kv_budget",
            )
        return options.changed(cache_match=cache_match, kv_budget=kv_budget)

    def _open_grammars(self) -> Grammars:
        from ..chat.grammar_vocabulary import GrammarVocabulary
        from ..chat.grammars import Grammars  # loads a native library

        tokenizer, vocab_size, eos_token_ids = self._prompts.tokenizer, self.limits.vocab_size, self._eos_token_ids
        if not eos_token_ids:
            raise InvalidRequest(f"model {self._model_name} has no end of replies, so none can be structured")
        return Grammars(
            lambda: GrammarVocabulary(tokenizer, vocab_size=vocab_size, eos_token_ids=eos_token_ids), eos_token_ids
        )


def _seam_of(options: RequestOptions) -> bytes | None:
    """The namespace whose earlier encodings a prompt may go on from; None: it is encoded whole."""
    return options.namespace if options.cache_match in _FROM_SEAMS else None
