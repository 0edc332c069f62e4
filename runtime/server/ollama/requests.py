"""Types of the requests of Ollama's API, with radixlm's own fields.

Knows formats and defaults, not the engine's work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec

from ...cache.why_not_more import MatchPolicy
from ...chat.grammar import Grammar
from ...chat.tools.tool_use import ToolUse
from ...engine.sampling_params import SamplingParams
from ...errors import InvalidParameter
from ..openai.requests import CacheText, ReturnProgress, effort_kwargs, require_stream, thinking_kwargs
from ..openai.tools import FunctionTool, tool_use
from ..request_fields import KVShare, NumLogprobs, sampling_params, schema_keywords, with_sampling_of
from ..truncation import Truncation
from .conversation import OllamaMessages
from .keep_alive import keep_alive_s

_ALL_TOKENS = -1


@with_sampling_of("ollama")
class OllamaOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Sampling parameters: Ollama's options, and those of the other APIs."""

    num_predict: int | None = None  # below 0: no limit
    num_ctx: Annotated[int, schema_keywords(minimum=1)] | None = None  # ignored: the server's --context-length applies
    repeat_last_n: Annotated[int, schema_keywords(minimum=-1)] | None = None  # -1: all; 0: no penalty

    def __post_init__(self) -> None:
        if self.num_predict is not None and self.num_predict < 0:
            self.num_predict = -1

    def sampling_params(self, defaults: SamplingParams, *, logprobs: int | None, context_length: int) -> SamplingParams:
        """Return `defaults` with the parameters that the request sets.

        Raises:
            InvalidParameter: a value is outside its range, or there are too many of them.
        """
        names = {"logprobs": "top_logprobs"}
        params = sampling_params("ollama", self, defaults, {"logprobs": logprobs}, names)
        if self.repeat_last_n == 0:
            return replace(params, repetition_penalty=1.0)
        last_n = _ALL_TOKENS if self.repeat_last_n is None else self.repeat_last_n
        if last_n != _ALL_TOKENS and last_n < context_length and params.repetition_penalty != 1.0:
            raise InvalidParameter(
                f"repeat_last_n is {last_n}; remove it or send -1: repeat_penalty counts all tokens of prompt "
                "and reply",
                param="options.repeat_last_n",
            )
        return params


class ReplyRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields of both requests that generate."""

    model: str | None = None
    stream: bool | None = None  # None: true
    options: OllamaOptions | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None  # any JSON object, or a JSON schema
    think: bool | Literal["low", "medium", "high", "max"] | None = None  # None: the model's default
    keep_alive: float | str | None = None  # time that the model stays loaded: seconds, or a duration such as 5m
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    truncate: bool | None = None  # drop turns that do not fit into the context; None: the server's default
    cache_match: MatchPolicy | None = None  # radixlm's: match policy of the prefix cache; None: the server's default
    kv_budget: KVShare | None = None  # radixlm's: share of a stored prefix's KV rows to load
    cache_salt: CacheText | None = None  # radixlm's: only requests with the same salt share cached prefixes
    prompt_cache_key: CacheText | None = None  # likewise
    speculate: bool | None = None  # radixlm's: false: no speculative decoding; the reply is the same bytes
    return_progress: ReturnProgress | None = None  # radixlm's

    @property
    def streams(self) -> bool:
        """Return whether the reply is streamed."""
        return self.stream is not False

    @property
    def stays_loaded_s(self) -> float | None:
        """Seconds that the model stays loaded; None if the request does not say.

        Raises:
            InvalidParameter: it is not a duration.
        """
        return None if self.keep_alive is None else keep_alive_s(self.keep_alive)

    @property
    def truncation(self) -> Truncation | None:
        """Policy for prompts that exceed the context; None if the request sets none."""
        if self.truncate is None:
            return None
        return "middle" if self.truncate else "none"

    @property
    def template_kwargs(self) -> Mapping[str, object] | None:
        """Additional variables for the chat template."""
        if isinstance(self.think, str):
            return thinking_kwargs(True, effort_kwargs(self.think, None))
        return thinking_kwargs(self.think, None)

    def sampling_params(self, defaults: SamplingParams, *, context_length: int) -> SamplingParams:
        """Return `defaults` with the parameters that the request sets.

        Raises:
            InvalidParameter: a value is outside its range, or there are too many of them.
        """
        require_stream(self.streams, "return_progress", self.return_progress)
        options = self.options or OllamaOptions()
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return options.sampling_params(defaults, logprobs=logprobs, context_length=context_length)

    def grammar(self) -> Grammar | None:
        """Return the grammar of the reply; None for any text.

        Raises:
            InvalidGrammar: the schema is too long.
        """
        if not self.format:
            return None
        if isinstance(self.format, dict):
            return Grammar.json_schema(self.format, is_strict=False)
        return Grammar.json_object()

    def left_out(self, context_length: int) -> set[str]:
        """Return the names of ignored options, for the header of ignored fields."""
        asked = None if self.options is None else self.options.num_ctx
        return {"options.num_ctx"} if asked is not None and asked > context_length else set()


class OllamaChatRequest(ReplyRequest, kw_only=True):
    """Body of `POST /api/chat`. Without messages, it only loads or unloads the model."""

    messages: OllamaMessages | None = None
    tools: list[FunctionTool] | None = None

    def tool_use(self) -> ToolUse:
        """Return the tools for the model.

        Raises:
            InvalidParameter: a name occurs twice, or there are too many tools.
        """
        return tool_use(self.tools, None, is_parallel=True)


class OllamaGenerateRequest(ReplyRequest, kw_only=True):
    """Body of `POST /api/generate`. Without a prompt, it only loads or unloads the model."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None  # continue the prompt without the chat template
    suffix: str | None = None

    def __post_init__(self) -> None:
        if self.suffix:
            raise ValueError("suffix is not supported; remove it: text is only generated at the end")
        if self.raw and self.system:
            raise ValueError("raw and system are both set; write the system prompt into the prompt")
        if self.raw and self.think:
            raise ValueError("raw and think are both set; write the beginning of the reasoning into the prompt")


class NamedModel(msgspec.Struct, kw_only=True):
    """A body that names a model; other fields are not checked."""

    model: str | None = None
    name: str | None = None  # Ollama's older name of the field
    stream: bool | None = None  # None: true

    def __post_init__(self) -> None:
        self.model = self.model or self.name
