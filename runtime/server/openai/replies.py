"""Types of OpenAI's completions, whole and as chunks of a stream, with some of vLLM's fields and radixlm's own.

Knows formats, not how they are filled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from ...engine.completion import FinishReason, PrefillProgress, StopReason
from ..truncation import TruncatedHistory


class ChangeReply(msgspec.Struct):
    before: str  # common text before the difference
    was: str  # cached text
    now: str  # the prompt's text


class WhyNotMoreReply(msgspec.Struct):
    kind: str
    position: int
    wanted_ids: tuple[int, ...]
    wanted_text: str | None
    cached_ids: tuple[int, ...]
    cached_text: str | None
    message: str  # one line for people
    before_text: str | msgspec.UnsetType = msgspec.UNSET  # text of the tokens before `position`
    change: ChangeReply | msgspec.UnsetType = msgspec.UNSET  # if two texts differ


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int
    cached_tokens_by_kind: Mapping[str, int]  # radixlm's: by kind of match
    cached_tokens_by_tier: Mapping[str, int]  # radixlm's: in memory or on disk
    cache_match: str | None  # radixlm's: the weakest kind of match
    why_not_more: WhyNotMoreReply | None  # radixlm's: why the cached prefix ends; None if it could not be longer
    # radixlm's: loaded share of the cached tokens' KV rows, and estimated attention to the rest; unset if the reply is
    # exact
    kv_loaded: float | msgspec.UnsetType = msgspec.UNSET
    kv_dropped_mass: float | msgspec.UnsetType = msgspec.UNSET


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int  # its tags included
    accepted_prediction_tokens: int = 0  # accepted draft tokens, which are tokens of the reply
    rejected_prediction_tokens: int = 0  # rejected draft tokens, which are not


class UsageReply(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET  # unset if all are 0


class RunningUsage(msgspec.Struct):
    """Token counts of one choice so far, in a chunk of its stream."""

    prompt_tokens: int
    completion_tokens: int  # so far
    total_tokens: int


TokenIds = tuple[int, ...] | msgspec.UnsetType  # unset: not asked for


Guessed = tuple[bool, ...] | msgspec.UnsetType
"""radixlm's: for each token of a chunk, whether it was an accepted draft token; unset if not requested."""


StopReasonReply = StopReason | msgspec.UnsetType | None
"""vLLM's: the request's stop string or token that ended the reply, else None; unset before the end."""


class TruncationReply(msgspec.Struct):
    """The messages of a history that were dropped because it did not fit into the context."""

    strategy: str
    dropped_messages: tuple[int, ...]  # indices in the request's messages
    num_dropped_tokens: int

    @classmethod
    def of(cls, truncated: TruncatedHistory) -> TruncationReply:
        """Return the field for a truncated history whose messages are those of the request."""
        return cls("middle", tuple(truncated.dropped), truncated.num_dropped_tokens)


class PromptProgressReply(msgspec.Struct):
    """Prefill progress, in llama.cpp's format, in a chunk of its own.

    `processed / total` is the progress overall, `(processed - cache) / (total - cache)` that of the computed part.
    """

    total: int  # tokens of the prompt
    cache: int  # found in the cache
    processed: int  # found in the cache or computed so far
    time_ms: int  # since the request left the queue

    @classmethod
    def of(cls, progress: PrefillProgress) -> PromptProgressReply:
        """Return the field for an engine's progress."""
        return cls(
            progress.num_prompt_tokens,
            progress.num_cached_tokens,
            progress.num_processed_tokens,
            time_ms=round(1000 * progress.elapsed_s),
        )


class CutPromptReply(msgspec.Struct):
    """The tokens of a prompt that were cut out because it did not fit into the context."""

    strategy: str
    start: int  # tokens before them
    num_dropped_tokens: int


class Reply(msgspec.Struct, kw_only=True):
    """The fields of all replies and chunks."""

    id: str
    object: str
    created: int  # Unix time
    model: str
    system_fingerprint: str  # of artifact, version and options
    choices: list[ChatChoice] | list[ChatChunkChoice] | list[TextChoice]
    # unset in a chunk without usage
    usage: UsageReply | RunningUsage | msgspec.UnsetType | None = msgspec.UNSET
    prompt_token_ids: TokenIds = msgspec.UNSET  # of a chat; in the last choice's chunk of a stream
    truncation: TruncationReply | msgspec.UnsetType = msgspec.UNSET  # radixlm's, on request; in a stream's first chunk
    prompt_progress: PromptProgressReply | msgspec.UnsetType = msgspec.UNSET  # on request, in chunks before a reply
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
    refusal: None = None


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
    tool_calls: list[ToolCallReply] | msgspec.UnsetType = msgspec.UNSET  # unset if none
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET  # unset if none
    function_call: FunctionCallReply | msgspec.UnsetType = msgspec.UNSET  # replaces `tool_calls` for `functions`


class ChatChoice(msgspec.Struct):
    message: ReplyMessage
    finish_reason: ChatFinishReason
    logprobs: ChatLogprobs | None = None
    index: int = 0
    token_ids: TokenIds = msgspec.UNSET
    stop_reason: StopReasonReply = None
    ended_in_reasoning: bool | msgspec.UnsetType = msgspec.UNSET  # radixlm's; unset: it did not


class FunctionCallDelta(msgspec.Struct):
    arguments: str
    name: str | msgspec.UnsetType = msgspec.UNSET


class ToolCallDelta(msgspec.Struct):
    """A piece of a tool call: the first has id, type and name, later ones a piece of the arguments."""

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
    ended_in_reasoning: bool | msgspec.UnsetType = msgspec.UNSET  # radixlm's; unset: it did not, or has not ended


class TextLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]  # None for a prompt's first token
    top_logprobs: list[dict[str, float] | None]  # likewise
    text_offset: list[int]  # index of the token's first character in the text


class PromptLogprobReply(msgspec.Struct):
    """vLLM's: a prompt token, or a likely alternative to it."""

    logprob: float
    rank: int  # by likelihood, from 1
    decoded_token: str


PromptLogprobsReply = list[dict[str, PromptLogprobReply] | None] | msgspec.UnsetType
"""For each prompt token, the most likely tokens and the token itself, by id; None for the first token."""


class TextChoice(msgspec.Struct):
    text: str
    finish_reason: FinishReason | None = None
    logprobs: TextLogprobs | None = None
    index: int = 0
    token_ids: TokenIds = msgspec.UNSET
    prompt_token_ids: TokenIds = msgspec.UNSET  # in the last chunk of a stream
    stop_reason: StopReasonReply = msgspec.UNSET
    truncation: CutPromptReply | msgspec.UnsetType = msgspec.UNSET  # radixlm's, on request; in a stream's first chunk
    prompt_logprobs: PromptLogprobsReply = msgspec.UNSET  # in a stream's chunk before the reply
    guessed: Guessed = msgspec.UNSET


class ChatReply(Reply, kw_only=True):
    """A whole chat completion."""

    choices: list[ChatChoice]
    usage: UsageReply


class TextReply(Reply, kw_only=True):
    """A whole completion."""

    choices: list[TextChoice]
    usage: UsageReply
