"""Types of OpenAI's completion requests, with radixlm's own fields.

Validation is strict: a wrong type is an error that names the field, and so is an unknown field that `field_policy`
refuses. Otherwise the reply would not be what the client asked for. Knows formats and defaults, not the engine's work.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, cast

import msgspec

from ...cache.cache_namespace import MAX_LENGTH
from ...cache.why_not_more import MatchPolicy
from ...engine.sampling_params import SamplingParams
from ...errors import InvalidParameter
from ..request_fields import (
    MAX_CHOICES,
    MAX_TOKEN_ID,
    KVShare,
    MaxTokens,
    NumChoices,
    NumLogprobs,
    sampling_params,
    with_sampling_of,
)
from ..truncation import Truncation
from .response_format import GuidedRequest

Prompt = str | list[int]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKEN_ID)]
CacheText = Annotated[str, msgspec.Meta(max_length=MAX_LENGTH)]


ReturnProgress = Annotated[
    bool,
    msgspec.Meta(
        description="Stream prefill progress before the reply begins, as llama.cpp does. A chunk with prompt_progress "
        "has one empty choice; /v1/responses repeats response.in_progress."
    ),
]


ReturnGuesses = Annotated[
    bool,
    msgspec.Meta(
        description="Add `guessed` to the choices of a stream's chunks: for each token of the chunk, whether it was an "
        "accepted draft token of speculative decoding."
    ),
]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: with `include_usage`, each chunk has the usage so far
    include_obfuscation: bool | None = None  # ignored: would pad chunks to hide their lengths


@with_sampling_of("openai")
class SamplingRequest(GuidedRequest, forbid_unknown_fields=True, kw_only=True):
    """The fields that chat and text completions share, sampling parameters included."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: NumLogprobs | None = None  # vLLM's; disables prefix reuse for the request
    n: NumChoices | None = None
    cache_match: MatchPolicy | None = None  # radixlm's: match policy of the prefix cache; None: the server's default
    kv_budget: KVShare | None = None  # radixlm's: share of a stored prefix's KV rows to load
    cache_salt: CacheText | None = None  # isolates the cache: only requests with the same salt share prefixes
    prompt_cache_key: CacheText | None = None  # likewise
    speculate: bool | None = None  # radixlm's: false: no speculative decoding; the reply is the same bytes
    return_progress: ReturnProgress | None = None
    return_guesses: ReturnGuesses | None = None  # radixlm's
    truncation: Truncation | None = None  # radixlm's: policy for prompts that exceed the context; None: the server's
    return_token_ids: bool | None = None  # the ids of the prompt that were used, and those of the reply
    user: str | None = None  # ignored: for the client's own records
    metadata: dict[str, str] | None = None  # ignored

    @property
    def num_choices(self) -> int:
        """Number of replies to each prompt.

        Raises:
            InvalidParameter: it is less than one, or too large.
        """
        n = 1 if self.n is None else self.n
        if not 1 <= n <= MAX_CHOICES:
            raise InvalidParameter(f"n is {n}; it must be an integer from 1 to {MAX_CHOICES}", param="n")
        return n

    @property
    def include_usage(self) -> bool:
        """Return whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def has_running_usage(self) -> bool:
        """Return whether each chunk of a stream has the token counts so far."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        """Return `defaults` with the parameters that the request sets.

        Raises:
            InvalidParameter: a value is outside its range, or a list is too long.
        """
        if self.stream_options not in (None, StreamOptions()) and not self.stream:
            raise InvalidParameter(
                "stream_options is for streams; set stream to true or leave it out", param="stream_options"
            )
        require_stream(self.stream, "return_progress", self.return_progress)
        require_stream(self.stream, "return_guesses", self.return_guesses)
        return sampling_params("openai", self, defaults, self._own_wishes(), self._own_names())

    def _own_names(self) -> Mapping[str, str]:
        """Return the request's names for fields of `SamplingParams` whose names differ."""
        return {}

    def _own_wishes(self) -> dict[str, object]:
        """Return fields of `SamplingParams` that only one kind of completion sets."""
        return {}


def effort_kwargs(effort: ReasoningEffort | None, kwargs: Mapping[str, object] | None) -> Mapping[str, object] | None:
    """Add the reasoning effort to the variables of a chat template, unless they set it.

    "none" sets `enable_thinking` to false, any other effort sets `reasoning_effort`.
    """
    if effort is None:
        return kwargs
    added: dict[str, object] = {"reasoning_effort": effort} if effort != "none" else {"enable_thinking": False}
    return added | dict(kwargs or {})


def thinking_kwargs(is_thinking: bool | None, kwargs: Mapping[str, object] | None) -> Mapping[str, object] | None:
    """Add `enable_thinking` to the variables of a chat template, unless it is None or they set it."""
    return kwargs if is_thinking is None else {"enable_thinking": is_thinking} | dict(kwargs or {})


def require_stream(stream: bool | None, name: str, wanted: bool | None) -> None:
    """Raise InvalidParameter if an option for streams is set without streaming."""
    if wanted and not stream:
        raise InvalidParameter(f"{name} is for streams; set stream to true or leave it out", param=name)


class CompletionRequest(SamplingRequest, kw_only=True):
    """Body of `POST /v1/completions`: one prompt or several, each as text or as token ids."""

    prompt: str | list[str | TokenId | list[TokenId]]
    max_tokens: MaxTokens | None = 16  # OpenAI's default
    logprobs: NumLogprobs | None = None
    echo: bool | None = None
    best_of: NumChoices | None = None  # OpenAI's older way to generate more replies than are returned
    suffix: str | None = None
    strip_suffix: bool | None = None  # radixlm's: strip the token of a final space from the prompt
    token_healing: bool | None = None  # TabbyAPI's: generate the prompt's last token again, beginning with its bytes

    @property
    def echoes_logprobs(self) -> bool:
        """Return whether `logprobs` covers the tokens of the prompt, too."""
        return bool(self.echo) and self.logprobs is not None

    @property
    def prompts(self) -> list[Prompt]:
        """The list of prompts; a list of token ids is one prompt.

        Raises:
            InvalidParameter: the list mixes texts and ids, or there are too many prompts.
        """
        if isinstance(self.prompt, str):
            return [self.prompt]
        kinds = set(map(type, self.prompt))
        if kinds <= {int}:
            return [cast(list[int], self.prompt)]
        prompts = cast(list[Prompt], self.prompt)
        if len(kinds) > 1:
            raise InvalidParameter(
                "prompt mixes texts and token ids; send texts, or token ids, or lists of token ids", param="prompt"
            )
        if len(prompts) * self.num_choices > MAX_CHOICES:
            raise InvalidParameter(
                f"{len(prompts)} prompts with n={self.num_choices} are {len(prompts) * self.num_choices} replies; one "
                f"request may ask for {MAX_CHOICES}: send several",
                param="prompt",
            )
        return prompts

    @property
    def one_prompt(self) -> Prompt:
        """The only prompt.

        Raises:
            InvalidParameter: there are several, or texts and ids are mixed.
        """
        prompts = self.prompts
        if len(prompts) != 1:
            raise InvalidParameter(f"prompt is a list of {len(prompts)} prompts; it must be one", param="prompt")
        return prompts[0]

    def _own_wishes(self) -> dict[str, object]:
        """Return the sampling parameters that only this API names.

        Raises:
            InvalidParameter: a field is not supported, or two contradict each other.
        """
        if self.suffix:
            raise InvalidParameter(
                "suffix is not supported; remove it: text is only generated at the end", param="suffix"
            )
        if self.best_of not in (None, self.num_choices):
            raise InvalidParameter(
                f"best_of is {self.best_of}; remove it: all {self.num_choices} replies are returned", param="best_of"
            )
        if self.token_healing and self.strip_suffix:
            message = "token_healing and strip_suffix are both about the prompt's last token; leave one out"
            raise InvalidParameter(message, param="token_healing")
        wishes: dict[str, object] = {"logprobs": self.logprobs}
        if self.echoes_logprobs:
            wishes["prompt_logprobs"] = max(self.logprobs or 0, self.prompt_logprobs or 0)
        if self.strip_suffix and (self.echoes_logprobs or self.prompt_logprobs is not None):
            raise InvalidParameter(
                "strip_suffix would strip a token whose logprob is requested; remove strip_suffix or the prompt's "
                "logprobs",
                param="strip_suffix",
            )
        return wishes
