"""The body of a chat completion: OpenAI's fields, and other servers' fields for tools and reasoning.

Knows formats and defaults, not the engine's work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from ...chat.tools.tool_use import ToolUse
from ...errors import InvalidParameter
from ..request_fields import MaxTokens, NumLogprobs
from .legacy_functions import FunctionChoice, function_use, functions_field
from .messages import Conversation
from .requests import ReasoningEffort, SamplingRequest, effort_kwargs, thinking_kwargs
from .tools import AnyChoice, FunctionDefinition, FunctionTool, parameters_field, tool_use


class ChatReasoning(msgspec.Struct, forbid_unknown_fields=True):
    """OpenRouter's options for reasoning. A token budget is ignored and listed."""

    effort: ReasoningEffort | None = None
    enabled: bool | None = None


class ChatThinking(msgspec.Struct, forbid_unknown_fields=True):
    """GLM's and DeepSeek's option for reasoning."""

    type: Literal["enabled", "disabled", "auto", "adaptive"]


class ChatRequest(SamplingRequest, kw_only=True):
    """Body of `POST /v1/chat/completions`."""

    messages: Conversation
    max_completion_tokens: MaxTokens | None = None  # OpenAI's newer name of max_tokens
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: AnyChoice | None = None  # None: auto
    parallel_tool_calls: bool | None = None  # None: true
    functions: list[FunctionDefinition] | None = None  # OpenAI's older form of tools, one call per reply,
    function_call: FunctionChoice | None = None  # and of tool_choice
    reasoning_effort: ReasoningEffort | None = None  # for the chat template
    reasoning: ChatReasoning | None = None  # the same, from OpenRouter
    thinking: ChatThinking | None = None  # reasoning on or off, from GLM and DeepSeek
    enable_thinking: bool | None = None  # the same, from Qwen: a variable of the chat template
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM's: further variables of the chat template
    # Fields that OpenAI's clients send and that are not supported: only values without effect are accepted.
    modalities: list[Literal["text"]] | None = None
    audio: None = None
    prediction: None = None
    web_search_options: None = None
    service_tier: str | None = None  # all requests are served alike
    store: bool | None = None  # ignored: chats are not stored
    safety_identifier: str | None = None  # as `user`
    prompt_cache_retention: str | None = None  # ignored: prefixes stay cached as long as there is room

    @property
    def unread(self) -> set[str]:
        """Names of parts of tool results that models cannot read, which are replaced by a note."""
        return {f"messages.content.{part.type}" for message in self.messages for part in message.unread}

    @property
    def left_out(self) -> set[str]:
        """Names of dropped parts of other models' replies."""
        return {"messages.audio" for message in self.messages if message.audio}

    @property
    def is_legacy(self) -> bool:
        """Return whether the request uses `functions`, OpenAI's older form of tools."""
        return bool(self.functions) or self.function_call is not None

    @property
    def parameters_field(self) -> Callable[[int], str]:
        """A function that returns the request field with the schema of the n-th tool, for errors."""
        return functions_field if self.is_legacy else parameters_field

    def tool_use(self) -> ToolUse:
        """Return the tools for the model, and how it may use them.

        Raises:
            InvalidParameter: the fields contradict each other.
        """
        if self.is_legacy:
            if self.tools or self.tool_choice is not None:
                raise InvalidParameter("functions and tools are both set; send only tools", param="functions")
            return function_use(self.functions or (), self.function_call)
        return tool_use(self.tools, self.tool_choice, is_parallel=self.parallel_tool_calls is not False)

    @property
    def template_kwargs(self) -> Mapping[str, object] | None:
        """Additional variables for the chat template: the client's own, reasoning effort, and reasoning on or off."""
        effort = None if self.reasoning is None else self.reasoning.effort
        kwargs = effort_kwargs(self.reasoning_effort or effort, None)
        if self.reasoning is not None and self.reasoning.enabled is not None:
            kwargs = {"enable_thinking": self.reasoning.enabled} | dict(kwargs or {})
        elif self.thinking is not None and self.thinking.type in ("enabled", "disabled"):
            kwargs = {"enable_thinking": self.thinking.type == "enabled"} | dict(kwargs or {})
        kwargs = thinking_kwargs(self.enable_thinking, kwargs)
        if kwargs is None or self.chat_template_kwargs is None:
            return self.chat_template_kwargs if kwargs is None else kwargs
        return {**kwargs, **self.chat_template_kwargs}

    def _own_wishes(self) -> dict[str, object]:
        """Return the sampling parameters that only this API names.

        Raises:
            InvalidParameter: top_logprobs is set without logprobs.
        """
        if self.top_logprobs and not self.logprobs:
            raise InvalidParameter(
                "top_logprobs is set, logprobs is not; set logprobs to true as well", param="top_logprobs"
            )
        wishes: dict[str, object] = {"logprobs": (self.top_logprobs or 0) if self.logprobs else None}
        if self.max_completion_tokens is not None:
            wishes["max_tokens"] = self.max_completion_tokens
        return wishes

    def _own_names(self) -> Mapping[str, str]:
        names = {"logprobs": "top_logprobs"}
        return names if self.max_completion_tokens is None else names | {"max_tokens": "max_completion_tokens"}
