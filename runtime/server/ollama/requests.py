"""What clients send to Ollama's endpoints, as types, and the fields that are ours.

Knows shapes and defaults, not the engine's work.
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
from ..request_fields import KVShare, MaxTokens, NumLogprobs, said, sampling_params, with_sampling_of
from ..truncation import Truncation
from .conversation import OllamaMessages
from .keep_alive import keep_alive_s

_ALL_TOKENS = -1


@with_sampling_of("ollama")
class OllamaOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """How tokens are chosen; beside Ollama's options all sampling parameters of the other APIs."""

    num_predict: MaxTokens | None = None  # below 0: no limit
    num_ctx: Annotated[int, said(minimum=1)] | None = None  # the server's --context-length is the context
    repeat_last_n: Annotated[int, said(minimum=-1)] | None = None  # -1: all; 0: no penalty

    def __post_init__(self) -> None:
        if self.num_predict is not None and self.num_predict < 0:
            self.num_predict = -1

    def sampling_params(self, defaults: SamplingParams, *, logprobs: int | None, context_length: int) -> SamplingParams:
        """Return `defaults` with what the request says instead.

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
                f"repeat_last_n is {last_n}; repeat_penalty counts all tokens of prompt and reply here: send -1, or "
                "leave it out",
                param="options.repeat_last_n",
            )
        return params


class ReplyRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields that both endpoints of replies have."""

    model: str | None = None
    stream: bool | None = None  # None: true
    options: OllamaOptions | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None  # any JSON object, or a JSON schema
    think: bool | Literal["low", "medium", "high", "max"] | None = None  # None: as the model has it
    keep_alive: float | str | None = None  # how long the model stays loaded: seconds, or a duration such as 5m
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    truncate: bool | None = None  # leave out what does not fit; None: as the server has it
    cache_match: MatchPolicy | None = None  # ours: how cached prefixes may be found, instead of the server's way
    kv_budget: KVShare | None = None  # ours: of a prefix on disk, the share of keys and values that is enough
    cache_salt: CacheText | None = None  # ours: what only requests with the same salt may reuse
    prompt_cache_key: CacheText | None = None  # likewise
    speculate: bool | None = None  # ours: false: nothing is drafted; the reply is the same bytes
    return_progress: ReturnProgress | None = None  # ours

    @property
    def streams(self) -> bool:
        """Whether the reply is sent while it is made."""
        return self.stream is not False

    @property
    def stays_loaded_s(self) -> float | None:
        """How long the model is to stay loaded; None: the request does not say.

        Raises:
            InvalidParameter: it is no duration.
        """
        return None if self.keep_alive is None else keep_alive_s(self.keep_alive)

    @property
    def truncation(self) -> Truncation | None:
        """What becomes of what does not fit; None: the request does not say."""
        if self.truncate is None:
            return None
        return "middle" if self.truncate else "none"

    @property
    def template_kwargs(self) -> Mapping[str, object] | None:
        """More variables of the chat template."""
        if isinstance(self.think, str):
            return thinking_kwargs(True, effort_kwargs(self.think, None))
        return thinking_kwargs(self.think, None)

    def sampling_params(self, defaults: SamplingParams, *, context_length: int) -> SamplingParams:
        """Return `defaults` with what the request says instead.

        Raises:
            InvalidParameter: a value is outside its range, or there are too many of them.
        """
        require_stream(self.streams, "return_progress", self.return_progress)
        options = self.options or OllamaOptions()
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return options.sampling_params(defaults, logprobs=logprobs, context_length=context_length)

    def grammar(self) -> Grammar | None:
        """Return what the reply must keep to; None for any text.

        Raises:
            InvalidGrammar: it is too long.
        """
        if not self.format:
            return None
        if isinstance(self.format, dict):
            return Grammar.json_schema(self.format, is_strict=False)
        return Grammar.json_object()

    def left_out(self, context_length: int) -> set[str]:
        """Return the names of options that ask for what the server does not do, and no reply depends on."""
        asked = None if self.options is None else self.options.num_ctx
        return {"options.num_ctx"} if asked is not None and asked > context_length else set()


class OllamaChatRequest(ReplyRequest, kw_only=True):
    """Body of `POST /api/chat`. Without messages the model is loaded, or unloaded."""

    messages: OllamaMessages | None = None
    tools: list[FunctionTool] | None = None

    def tool_use(self) -> ToolUse:
        """Return what the model is told of tools.

        Raises:
            InvalidParameter: a tool is there twice, or there are too many.
        """
        return tool_use(self.tools, None, is_parallel=True)


class OllamaGenerateRequest(ReplyRequest, kw_only=True):
    """Body of `POST /api/generate`. Without a prompt the model is loaded, or unloaded."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None  # the prompt is fed as it is, without the chat template
    suffix: str | None = None

    def __post_init__(self) -> None:
        if self.suffix:
            raise ValueError("suffix is set; leave it out: text is only written at the end")
        if self.raw and self.system:
            raise ValueError("raw and system are both set; write the system prompt into the prompt")
        if self.raw and self.think:
            raise ValueError("raw and think are both set; write the beginning of the reasoning into the prompt")


class NamedModel(msgspec.Struct, kw_only=True):
    """A body that names a model; other fields are not looked at."""

    model: str | None = None
    name: str | None = None  # Ollama's older word for it
    stream: bool | None = None  # None: true

    def __post_init__(self) -> None:
        self.model = self.model or self.name
