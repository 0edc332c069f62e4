"""Make of what a caller asks a request that the engine can compute, in the caller's own thread.

Knows prompts, parameters and grammars; not pages, steps or who waits for the reply.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, get_args

from radixlm.tokenizer_fix import PreparedPrompt

from ..artifact.manifest import Manifest
from ..cache.prefix_match import MatchPolicy
from ..chat.grammar import Grammar
from ..chat.token_constraint import ConstraintSource, TokenConstraint
from ..chat.tool_format import Tool
from ..errors import InvalidParameter, InvalidRequest
from .prompts import Message, Prompt, Prompts
from .request import Request, RequestLimits
from .sampling_params import SamplingParams
from .space_first import SpaceTokens

if TYPE_CHECKING:
    from ..chat.grammars import Grammars

MAX_ID_LENGTH = 256  # characters of a caller's own name of a request
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
        self.match = _checked_match(match)
        self._kv_budget = None if kv_budget is None else _checked_budget(kv_budget)
        self._clock = clock
        self._numbers = itertools.count()
        self._grammars: Grammars | None = None
        self._opening_grammars = threading.Lock()

    def completion(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        namespace: bytes,
        *,
        cache_match: MatchPolicy | None,
        kv_budget: float | None,
        constraint: Grammar | ConstraintSource | None,
        strip_suffix: bool | None = None,
        request_id: str | None = None,
    ) -> Request:
        """A request to continue text or ids. With a grammar, which may want no space, a prompt keeps its suffix.

        Raises:
            EmptyPrompt, ContextLengthExceeded, InvalidParameter, InvalidRequest, InvalidGrammar: it cannot be served.
        """
        _check_id(request_id)
        policy = self.match if cache_match is None else _checked_match(cache_match)
        seam_of = namespace if policy in _FROM_SEAMS else None
        prepared = self._prompts.completion(
            prompt,
            seam_of=seam_of,
            context_length=self.limits.context_length,
            strip_suffix=strip_suffix if constraint is None else False,
        )
        budget = self._budget(kv_budget)
        return self._request(prepared, params, namespace, policy, budget, constraint, request_id, render_reply=None)

    def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        params: SamplingParams | None,
        namespace: bytes,
        *,
        cache_match: MatchPolicy | None,
        kv_budget: float | None,
        constraint: Grammar | ConstraintSource | None,
        request_id: str | None = None,
    ) -> Request:
        """A request to answer a conversation.

        Raises:
            EmptyPrompt, ContextLengthExceeded, InvalidParameter, InvalidRequest, InvalidGrammar: it cannot be served.
        """
        _check_id(request_id)
        policy = self.match if cache_match is None else _checked_match(cache_match)
        seam_of = namespace if policy in _FROM_SEAMS else None
        prepared = self._prompts.chat(messages, tools, seam_of=seam_of, context_length=self.limits.context_length)
        budget, render_reply = self._budget(kv_budget), self._prompts.render_reply
        return self._request(
            prepared, params, namespace, policy, budget, constraint, request_id, render_reply=render_reply
        )

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
        namespace: bytes,
        policy: MatchPolicy,
        kv_budget: float,
        constraint: Grammar | ConstraintSource | None,
        request_id: str | None,
        *,
        render_reply: Callable[[str], str] | None,
    ) -> Request:
        params = self.default_params if params is None else params
        tokenizer = self._prompts.tokenizer
        self.limits.validate(prompt, params)
        if isinstance(constraint, Grammar):
            constraint = self.grammars.compile(constraint)
        begun: TokenConstraint | None = None if constraint is None else constraint.start()
        if prompt.space_id is not None:
            begun = self._space_tokens.start(params.end_ids(self._eos_token_ids))
        return Request(
            f"request-{next(self._numbers)}",
            prompt,
            params,
            decoder=tokenizer.stream(prompt_ids=prompt.ids, swallow_leading_space=prompt.swallow_leading_space),
            vocab_size=self.limits.vocab_size,
            eos_token_ids=self._eos_token_ids,
            namespace=None if policy == "off" else namespace,
            arrived_at=self._clock(),
            spelled=functools.cache(lambda: tokenizer.spelled(prompt.ids)) if policy == "text" else None,
            render_reply=render_reply if policy == "text" else None,
            explain=self._prompts.explain,
            constraint=begun,
            kv_budget=kv_budget,
            name=request_id,
        )

    def _budget(self, kv_budget: float | None) -> float:
        """The request's own, or everybody's."""
        if kv_budget is None:
            return 1.0 if self._kv_budget is None else self._kv_budget
        if _checked_budget(kv_budget) < 1 and self._kv_budget is None:
            raise InvalidParameter(
                f"kv_budget is {kv_budget}, and all of a prefix is loaded here; leave it out, or open the engine with "
                f"a kv_budget (radixlm serve --kv-budget)",
                param="kv_budget",
            )
        return kv_budget

    def _open_grammars(self) -> Grammars:
        from ..chat.grammar_vocabulary import GrammarVocabulary
        from ..chat.grammars import Grammars  # loads a native library

        tokenizer, vocab_size, eos_token_ids = self._prompts.tokenizer, self.limits.vocab_size, self._eos_token_ids
        if not eos_token_ids:
            raise InvalidRequest(f"model {self._model_name} has no end of replies, so none can be structured")
        return Grammars(
            lambda: GrammarVocabulary(tokenizer, vocab_size=vocab_size, eos_token_ids=eos_token_ids), eos_token_ids
        )


def _check_id(request_id: str | None) -> None:
    if request_id is None:
        return
    if not isinstance(request_id, str) or not 0 < len(request_id) <= MAX_ID_LENGTH:
        raise InvalidParameter(
            f"request_id is {request_id!r:.60}; it must be a string of 1 to {MAX_ID_LENGTH} characters",
            param="request_id",
        )


def _checked_budget(kv_budget: float) -> float:
    if not 0 < kv_budget <= 1:  # which NaN is not
        raise InvalidParameter(f"kv_budget is {kv_budget}; it must be above 0 and at most 1", param="kv_budget")
    return kv_budget


def _checked_match(match: MatchPolicy) -> MatchPolicy:
    if match not in get_args(MatchPolicy):
        raise InvalidParameter(f"match is {match!r}; use one of {', '.join(get_args(MatchPolicy))}")
    return match
