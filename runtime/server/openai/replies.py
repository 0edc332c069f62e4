"""OpenAI's completions as types, whole and as chunks of a stream, with fields of vLLM's and of ours.

Knows shapes, not how they are filled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from ...engine.completion import FinishReason, PrefillProgress, StopReason
from ..truncation import Truncated


class ChangeReply(msgspec.Struct):
    before: str  # what both sides end with there
    was: str  # what is cached
    now: str  # what the prompt says


class WhyNotMoreReply(msgspec.Struct):
    kind: str
    position: int
    wanted_ids: tuple[int, ...]
    wanted_text: str | None
    cached_ids: tuple[int, ...]
    cached_text: str | None
    message: str  # a line for humans
    before_text: str | msgspec.UnsetType = msgspec.UNSET  # what ends at `position`, in whole tokens, as the other texts
    change: ChangeReply | msgspec.UnsetType = msgspec.UNSET  # of two texts that differ


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int
    cached_tokens_by_kind: Mapping[str, int]  # ours: how the cached tokens were found
    cached_tokens_by_tier: Mapping[str, int]  # ours: where they lay, in memory or on disk
    cache_match: str | None  # ours: the weakest kind among them
    why_not_more: WhyNotMoreReply | None  # ours: None if all that may be reused was
    # ours: the share of the cached tokens' keys and values that was loaded, and an estimate of the attention that the
    # rest would have got; unset: all was there, and the reply is exact
    kv_loaded: float | msgspec.UnsetType = msgspec.UNSET
    kv_dropped_mass: float | msgspec.UnsetType = msgspec.UNSET


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int  # of a thought, with its tags
    accepted_prediction_tokens: int = 0  # guesses that were right: tokens of the reply
    rejected_prediction_tokens: int = 0  # guesses that were not: no tokens of the reply


class UsageReply(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET  # unset: all are 0


class RunningUsage(msgspec.Struct):
    """Of one choice, in a chunk of its stream."""

    prompt_tokens: int
    completion_tokens: int  # so far
    total_tokens: int


TokenIds = tuple[int, ...] | msgspec.UnsetType  # unset: not asked for


Guessed = tuple[bool, ...] | msgspec.UnsetType
"""Ours: of each token that a chunk of a stream brings, whether it was guessed; unset: not asked for."""


StopReasonReply = StopReason | msgspec.UnsetType | None
"""vLLM's: the stop string or token of the request's own that ended the reply, else None; unset: it has not ended."""


class TruncationReply(msgspec.Struct):
    """What of a history was left out, because a request or the server said that it may be."""

    strategy: str
    dropped_messages: tuple[int, ...]  # their places in what was sent
    num_dropped_tokens: int

    @classmethod
    def of(cls, truncated: Truncated) -> TruncationReply:
        """The same of a history whose messages are those that were sent."""
        return cls("middle", tuple(truncated.dropped), truncated.num_dropped_tokens)


class PromptProgressReply(msgspec.Struct):
    """How far a prompt is, in llama.cpp's words; a choice's chunk that has it says nothing else.

    `processed / total` is there; of what had to be computed, `(processed - cache) / (total - cache)`.
    """

    total: int  # tokens of the prompt
    cache: int  # of these, found cached
    processed: int  # of these, cached or computed
    time_ms: int  # since the request left the queue

    @classmethod
    def of(cls, progress: PrefillProgress) -> PromptProgressReply:
        """The same of a request."""
        return cls(
            progress.num_prompt_tokens,
            progress.num_cached_tokens,
            progress.num_processed_tokens,
            time_ms=round(1000 * progress.elapsed_s),
        )


class CutPromptReply(msgspec.Struct):
    """Which tokens of a prompt were left out, because a request or the server said that some may be."""

    strategy: str
    start: int  # tokens before them
    num_dropped_tokens: int


class Reply(msgspec.Struct, kw_only=True):
    """What every reply and every chunk of one begins with."""

    id: str
    object: str
    created: int  # Unix time
    model: str
    system_fingerprint: str  # of artifact, version and options
    choices: list[ChatChoice] | list[ChatChunkChoice] | list[TextChoice]
    # unset: a chunk of a stream without usage
    usage: UsageReply | RunningUsage | msgspec.UnsetType | None = msgspec.UNSET
    prompt_token_ids: TokenIds = msgspec.UNSET  # of a chat; in the last choice's chunk of a stream
    truncation: TruncationReply | msgspec.UnsetType = msgspec.UNSET  # ours, if asked for; in a stream's first chunk
    prompt_progress: PromptProgressReply | msgspec.UnsetType = msgspec.UNSET  # in chunks before a reply, if asked for
    prompt_logprobs: PromptLogprobsReply = msgspec.UNSET  # of a chat; in a chunk before each reply of a stream


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ChatLogprob]
    refusal: None = None  # nor its tokens


ChatFinishReason = FinishReason | Literal["tool_calls", "function_call"]


class FunctionCallReply(msgspec.Struct):
    name: str
    arguments: str


class ToolCallReply(msgspec.Struct):
    id: str
    function: FunctionCallReply
    type: str = "function"


class ReplyMessage(msgspec.Struct):
    content: str | None
    role: str = "assistant"
    refusal: None = None
    tool_calls: list[ToolCallReply] | msgspec.UnsetType = msgspec.UNSET  # unset: none
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET  # unset: no thought
    function_call: FunctionCallReply | msgspec.UnsetType = msgspec.UNSET  # instead of `tool_calls`, if asked for so


class ChatChoice(msgspec.Struct):
    message: ReplyMessage
    finish_reason: ChatFinishReason
    logprobs: ChatLogprobs | None = None
    index: int = 0
    token_ids: TokenIds = msgspec.UNSET
    stop_reason: StopReasonReply = None
    ended_in_reasoning: bool | msgspec.UnsetType = msgspec.UNSET  # ours; unset: it did not


class FunctionCallDelta(msgspec.Struct):
    arguments: str
    name: str | msgspec.UnsetType = msgspec.UNSET


class ToolCallDelta(msgspec.Struct):
    """The first of a call has id, type and name, those after it a piece of the arguments."""

    index: int
    function: FunctionCallDelta
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: str | msgspec.UnsetType = msgspec.UNSET


class ChatDelta(msgspec.Struct):
    content: str | msgspec.UnsetType = msgspec.UNSET
    role: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCallDelta] | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    function_call: FunctionCallDelta | msgspec.UnsetType = msgspec.UNSET


class ChatChunkChoice(msgspec.Struct):
    delta: ChatDelta
    finish_reason: ChatFinishReason | None = None
    logprobs: ChatLogprobs | None = None
    index: int = 0
    token_ids: TokenIds = msgspec.UNSET
    stop_reason: StopReasonReply = msgspec.UNSET
    guessed: Guessed = msgspec.UNSET
    ended_in_reasoning: bool | msgspec.UnsetType = msgspec.UNSET  # ours; unset: it did not, or goes on


class TextLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]  # None: of a prompt's first token
    top_logprobs: list[dict[str, float] | None]  # likewise
    text_offset: list[int]  # characters of the text before the token


class PromptLogprobReply(msgspec.Struct):
    """vLLM's: a token that stands in a prompt, or might."""

    logprob: float
    rank: int  # by likelihood, from 1
    decoded_token: str


PromptLogprobsReply = list[dict[str, PromptLogprobReply] | None] | msgspec.UnsetType
"""For each token of a prompt the likely ones by id, and the token itself; None for the first; unset: not asked for."""


class TextChoice(msgspec.Struct):
    text: str
    finish_reason: FinishReason | None = None
    logprobs: TextLogprobs | None = None
    index: int = 0
    token_ids: TokenIds = msgspec.UNSET
    prompt_token_ids: TokenIds = msgspec.UNSET  # in the last chunk of a stream
    stop_reason: StopReasonReply = msgspec.UNSET
    truncation: CutPromptReply | msgspec.UnsetType = msgspec.UNSET  # ours, if asked for; in a stream's first chunk
    prompt_logprobs: PromptLogprobsReply = msgspec.UNSET  # in the chunk of a stream before the reply
    guessed: Guessed = msgspec.UNSET


class ChatReply(Reply, kw_only=True):
    """A whole chat completion."""

    choices: list[ChatChoice]
    usage: UsageReply


class TextReply(Reply, kw_only=True):
    """A whole completion."""

    choices: list[TextChoice]
    usage: UsageReply
