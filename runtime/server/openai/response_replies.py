"""Types of the replies of `/v1/responses`: OpenAI's response, and the events of its stream.

Knows formats, not how they are filled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from .replies import ChatLogprob, PromptProgressReply, PromptTokensDetails, TruncationReply
from .response_requests import AnyText, ConversationID, TextOptions
from .response_tools import RawChoice, RawTool

Status = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputTextPart(msgspec.Struct):
    text: str
    annotations: list[None] = []
    logprobs: list[ChatLogprob] = []
    type: Literal["output_text"] = "output_text"


class ReasoningPart(msgspec.Struct):
    text: str
    type: Literal["reasoning_text"] = "reasoning_text"


class OutputMessage(msgspec.Struct, tag_field="type", tag="message"):
    id: str
    status: Status = "in_progress"
    content: list[OutputTextPart] = []
    role: Literal["assistant"] = "assistant"


class OutputReasoning(msgspec.Struct, tag_field="type", tag="reasoning"):
    id: str
    status: Status = "in_progress"
    content: list[ReasoningPart] = []
    summary: list[None] = []
    encrypted_content: str | None = None  # the same reasoning encoded, if included


class OutputFunctionCall(msgspec.Struct, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: Status = "in_progress"
    namespace: str | msgspec.UnsetType = msgspec.UNSET


class OutputCustomCall(msgspec.Struct, tag_field="type", tag="custom_tool_call"):
    id: str
    call_id: str
    name: str
    input: str = ""
    status: Status = "in_progress"
    namespace: str | msgspec.UnsetType = msgspec.UNSET


OutputItem = OutputMessage | OutputReasoning | OutputFunctionCall | OutputCustomCall


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens_details: OutputTokensDetails


class IncompleteDetails(msgspec.Struct):
    reason: Literal["max_output_tokens"]


class ResponseError(msgspec.Struct):
    code: str
    message: str


class ReasoningReply(msgspec.Struct, frozen=True):
    effort: str | None = None
    summary: str | None = None


class ResponseReply(msgspec.Struct, kw_only=True):
    """A response: the request's parameters, the status and the output."""

    id: str
    created_at: int  # Unix time
    model: str
    status: Status
    output: list[OutputItem]
    usage: ResponseUsage | None = None  # None before the end
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    top_logprobs: int
    metadata: Mapping[str, str]
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    object: Literal["response"] = "response"
    background: bool = False
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    conversation: ConversationID | None = None
    reasoning: ReasoningReply
    service_tier: Literal["default"] = "default"
    store: bool = False  # it is stored, and can be continued
    text: TextOptions = TextOptions(AnyText())
    tool_choice: RawChoice
    tools: list[RawTool]
    truncation: Literal["auto", "disabled"] = "disabled"
    prompt_progress: PromptProgressReply | msgspec.UnsetType = msgspec.UNSET  # on request, in events before a reply
    truncated: TruncationReply | msgspec.UnsetType = msgspec.UNSET  # radixlm's: dropped input, with truncation auto
    ended_in_reasoning: bool | msgspec.UnsetType = msgspec.UNSET  # radixlm's; unset: it did not, or has not ended


class ResponseEvent(msgspec.Struct, kw_only=True):
    """One event of a stream. Its type determines which fields are set."""

    type: str
    sequence_number: int
    response: ResponseReply | msgspec.UnsetType = msgspec.UNSET
    item_id: str | msgspec.UnsetType = msgspec.UNSET
    output_index: int | msgspec.UnsetType = msgspec.UNSET
    content_index: int | msgspec.UnsetType = msgspec.UNSET
    item: OutputItem | msgspec.UnsetType = msgspec.UNSET
    part: OutputTextPart | ReasoningPart | msgspec.UnsetType = msgspec.UNSET
    delta: str | msgspec.UnsetType = msgspec.UNSET
    text: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str | msgspec.UnsetType = msgspec.UNSET
    input: str | msgspec.UnsetType = msgspec.UNSET
    name: str | msgspec.UnsetType = msgspec.UNSET
    logprobs: list[ChatLogprob] | msgspec.UnsetType = msgspec.UNSET
