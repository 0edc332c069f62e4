"""What clients send, as types: OpenAI's requests, and the fields that are ours.

Validation is strict: a wrong type is an error that names the field, and so is an unknown field that `field_policy`
refuses. Else the reply would answer a question that was not asked. Knows shapes and defaults, not the engine's work.
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
        description="Of a stream: say how far the prompt is before the reply begins, as llama.cpp does. A chunk with "
        "prompt_progress has one choice, which is empty; /v1/responses repeats response.in_progress."
    ),
]


ReturnGuesses = Annotated[
    bool,
    msgspec.Meta(
        description="Of a stream: each choice of a chunk has guessed, which says of each token that the chunk brings "
        "whether it was guessed before the model said it."
    ),
]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: with `include_usage`, each chunk has the usage so far
    include_obfuscation: bool | None = None  # would hide lengths from observers of the network: nothing is added here


@with_sampling_of("openai")
class SamplingRequest(GuidedRequest, forbid_unknown_fields=True, kw_only=True):
    """The fields that both kinds of completion share, beside sampling parameters."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: NumLogprobs | None = None  # vLLM's: all tokens of the prompt are computed then
    n: NumChoices | None = None
    cache_match: MatchPolicy | None = None  # ours: how cached prefixes may be found, instead of the server's way
    kv_budget: KVShare | None = None  # ours: of a prefix on disk, the share of keys and values that is enough
    cache_salt: CacheText | None = None  # what only requests with the same salt may reuse
    prompt_cache_key: CacheText | None = None  # likewise
    speculate: bool | None = None  # ours: false: nothing is guessed; the reply is the same bytes
    return_progress: ReturnProgress | None = None
    return_guesses: ReturnGuesses | None = None  # ours
    truncation: Truncation | None = None  # ours: what becomes of what does not fit; None: as the server has it
    return_token_ids: bool | None = None  # the ids of the prompt that were really used, and those of the reply
    user: str | None = None  # for the client's own books: nothing is done with it
    metadata: dict[str, str] | None = None  # likewise

    @property
    def num_choices(self) -> int:
        """How many replies to each prompt are asked for.

        Raises:
            InvalidParameter: none, or too many.
        """
        n = 1 if self.n is None else self.n
        if not 1 <= n <= MAX_CHOICES:
            raise InvalidParameter(f"n is {n}; it must be an integer from 1 to {MAX_CHOICES}", param="n")
        return n

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def has_running_usage(self) -> bool:
        """Whether each chunk of a stream says how many tokens there are so far."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        """`defaults` with what the request says instead.

        Raises:
            InvalidParameter: a value is outside its range, or there are too many of them.
        """
        if self.stream_options not in (None, StreamOptions()) and not self.stream:
            raise InvalidParameter(
                "stream_options is for streams; set stream to true or leave it out", param="stream_options"
            )
        require_stream(self.stream, "return_progress", self.return_progress)
        require_stream(self.stream, "return_guesses", self.return_guesses)
        return sampling_params("openai", self, defaults, self._own_wishes(), self._own_names())

    def _own_names(self) -> Mapping[str, str]:
        """The request's names of fields of `SamplingParams`, where they are others."""
        return {}

    def _own_wishes(self) -> dict[str, object]:
        """Fields of `SamplingParams` that only one kind of completion sets."""
        return {}


def effort_kwargs(effort: ReasoningEffort | None, kwargs: Mapping[str, object] | None) -> Mapping[str, object] | None:
    """Variables of a chat template, and the effort under the names that templates know.

    No effort is `enable_thinking` set to false, any other is `reasoning_effort`.
    """
    if effort is None:
        return kwargs
    told: dict[str, object] = {"reasoning_effort": effort} if effort != "none" else {"enable_thinking": False}
    return told | dict(kwargs or {})


def thinking_kwargs(is_thinking: bool | None, kwargs: Mapping[str, object] | None) -> Mapping[str, object] | None:
    """Variables of a chat template, and whether the model thinks, if that is said."""
    return kwargs if is_thinking is None else {"enable_thinking": is_thinking} | dict(kwargs or {})


def require_stream(stream: bool | None, name: str, wanted: bool | None) -> None:
    """Raise InvalidParameter if what streams alone have is asked for in a reply that is not streamed."""
    if wanted and not stream:
        raise InvalidParameter(f"{name} is for streams; set stream to true or leave it out", param=name)


class CompletionRequest(SamplingRequest, kw_only=True):
    """Body of `POST /v1/completions`: one prompt or several, each as text or as token ids."""

    prompt: str | list[str | TokenId | list[TokenId]]
    max_tokens: MaxTokens | None = 16  # OpenAI's default
    logprobs: NumLogprobs | None = None
    echo: bool | None = None
    best_of: NumChoices | None = None  # OpenAI's old way to ask for more than is sent
    suffix: str | None = None
    strip_suffix: bool | None = None  # ours: feed a prompt, be it text or ids, without the token of its last space
    token_healing: bool | None = None  # TabbyAPI's: the prompt's last token is chosen anew, with the bytes that it has

    @property
    def echoes_logprobs(self) -> bool:
        """Whether the tokens of the prompt have logprobs beside those of the reply."""
        return bool(self.echo) and self.logprobs is not None

    @property
    def prompts(self) -> list[Prompt]:
        """Every prompt; a list of token ids is one.

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
        """The prompt, where there may be only one.

        Raises:
            InvalidParameter: there are several, or they are mixed.
        """
        prompts = self.prompts
        if len(prompts) != 1:
            raise InvalidParameter(f"prompt is a list of {len(prompts)} prompts; it must be one", param="prompt")
        return prompts[0]

    def _own_wishes(self) -> dict[str, object]:
        if self.suffix:
            raise InvalidParameter("suffix is set; leave it out: text is only written at the end", param="suffix")
        if self.best_of not in (None, self.num_choices):
            raise InvalidParameter(
                f"best_of is {self.best_of}; leave it out: all {self.num_choices} are sent", param="best_of"
            )
        if self.token_healing and self.strip_suffix:
            message = "token_healing and strip_suffix are both about the prompt's last token; leave one out"
            raise InvalidParameter(message, param="token_healing")
        wishes: dict[str, object] = {"logprobs": self.logprobs}
        if self.echoes_logprobs:
            wishes["prompt_logprobs"] = max(self.logprobs or 0, self.prompt_logprobs or 0)
        if self.strip_suffix and (self.echoes_logprobs or self.prompt_logprobs is not None):
            raise InvalidParameter(
                "strip_suffix is set, and logprobs of the prompt are asked for: all of its tokens have some; leave "
                "strip_suffix out",
                param="strip_suffix",
            )
        return wishes
