"""Types of the replies of Ollama's API: generated replies, whole and as lines of a stream, and models.

Knows formats and Ollama's units, not how they are filled.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from ..openai.replies import ChatLogprob, PromptProgressReply, PromptTokensDetails, TruncationReply

NEVER = "9999-12-31T23:59:59Z"
"""When a model is unloaded that stays."""

DoneReason = Literal["stop", "length", "load", "unload"]


class CalledFunctionReply(msgspec.Struct):
    name: str
    arguments: Mapping[str, Any]
    index: int


class CallReply(msgspec.Struct):
    id: str
    function: CalledFunctionReply


class OllamaMessageReply(msgspec.Struct):
    role: Literal["assistant"] = "assistant"
    content: str = ""
    thinking: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[CallReply] | msgspec.UnsetType = msgspec.UNSET


class OllamaReply(msgspec.Struct, kw_only=True):
    """A whole reply, or a line of a stream, of which the last has the counts and times. Durations are nanoseconds."""

    model: str
    created_at: str
    done: bool = False
    done_reason: DoneReason | msgspec.UnsetType = msgspec.UNSET
    total_duration: int | msgspec.UnsetType = msgspec.UNSET
    load_duration: int | msgspec.UnsetType = msgspec.UNSET  # time in the queue
    prompt_eval_count: int | msgspec.UnsetType = msgspec.UNSET  # tokens of the prompt, cached ones included
    prompt_eval_duration: int | msgspec.UnsetType = msgspec.UNSET
    eval_count: int | msgspec.UnsetType = msgspec.UNSET
    eval_duration: int | msgspec.UnsetType = msgspec.UNSET
    logprobs: list[ChatLogprob] | msgspec.UnsetType = msgspec.UNSET
    prompt_tokens_details: PromptTokensDetails | msgspec.UnsetType = msgspec.UNSET  # radixlm's, in the last line
    truncation: TruncationReply | msgspec.UnsetType = msgspec.UNSET  # radixlm's, on request
    prompt_progress: PromptProgressReply | msgspec.UnsetType = msgspec.UNSET  # radixlm's, on request


class OllamaChatReply(OllamaReply, kw_only=True):
    message: OllamaMessageReply


class OllamaGenerateReply(OllamaReply, kw_only=True):
    response: str = ""
    thinking: str | msgspec.UnsetType = msgspec.UNSET


class ModelDetails(msgspec.Struct, kw_only=True):
    parent_model: str = ""
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(msgspec.Struct, kw_only=True):
    """A model in a list."""

    name: str
    model: str
    size: int  # bytes
    digest: str
    details: ModelDetails
    modified_at: str | msgspec.UnsetType = msgspec.UNSET  # in `/api/tags`
    expires_at: str | msgspec.UnsetType = msgspec.UNSET  # in `/api/ps`, as the next two
    size_vram: int | msgspec.UnsetType = msgspec.UNSET
    context_length: int | msgspec.UnsetType = msgspec.UNSET


class OllamaModelList(msgspec.Struct):
    models: list[OllamaModel]


class OllamaShowReply(msgspec.Struct, kw_only=True):
    modelfile: str
    parameters: str
    template: str
    details: ModelDetails
    model_info: Mapping[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaVersionReply(msgspec.Struct):
    version: str
    radixlm: str  # version of radixlm


class StatusReply(msgspec.Struct):
    """The status of a pull, with its progress if known."""

    status: str
    total: int | msgspec.UnsetType = msgspec.UNSET
    completed: int | msgspec.UnsetType = msgspec.UNSET


def timestamp(unix_s: float) -> str:
    """Return a Unix time in RFC 3339 format, in UTC.

    >>> timestamp(0.5)
    '1970-01-01T00:00:00.500000Z'
    """
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def nanoseconds(seconds: float) -> int:
    """Return a duration in Ollama's unit."""
    return max(0, round(seconds * 1e9))
