"""What Ollama's endpoints answer, as types: replies, whole and as lines of a stream, and models.

Knows shapes, and Ollama's units; not how they are filled.
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
    """A reply, whole or a line of a stream; the last line has the figures. Durations are nanoseconds."""

    model: str
    created_at: str
    done: bool = False
    done_reason: DoneReason | msgspec.UnsetType = msgspec.UNSET
    total_duration: int | msgspec.UnsetType = msgspec.UNSET
    load_duration: int | msgspec.UnsetType = msgspec.UNSET  # until the engine began with the request
    prompt_eval_count: int | msgspec.UnsetType = msgspec.UNSET  # tokens of the prompt, cached ones included
    prompt_eval_duration: int | msgspec.UnsetType = msgspec.UNSET
    eval_count: int | msgspec.UnsetType = msgspec.UNSET
    eval_duration: int | msgspec.UnsetType = msgspec.UNSET
    logprobs: list[ChatLogprob] | msgspec.UnsetType = msgspec.UNSET
    prompt_tokens_details: PromptTokensDetails | msgspec.UnsetType = msgspec.UNSET  # ours, of the last line
    truncation: TruncationReply | msgspec.UnsetType = msgspec.UNSET  # ours, if asked for
    prompt_progress: PromptProgressReply | msgspec.UnsetType = msgspec.UNSET  # ours, if asked for


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
    """A model that can be asked for."""

    name: str
    model: str
    size: int  # bytes
    digest: str
    details: ModelDetails
    modified_at: str | msgspec.UnsetType = msgspec.UNSET  # of one that is there
    expires_at: str | msgspec.UnsetType = msgspec.UNSET  # of one that is loaded, as the next two
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
    radixlm: str  # ours


class StatusReply(msgspec.Struct):
    """What a server does with a model; where it is known, how far it is."""

    status: str
    total: int | msgspec.UnsetType = msgspec.UNSET
    completed: int | msgspec.UnsetType = msgspec.UNSET


def timestamp(unix_s: float) -> str:
    """Return a time as RFC 3339 has it, in UTC.

    >>> timestamp(0.5)
    '1970-01-01T00:00:00.500000Z'
    """
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def nanoseconds(seconds: float) -> int:
    """Return a duration in Ollama's unit."""
    return max(0, round(seconds * 1e9))
