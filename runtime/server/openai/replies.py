"""What clients get, as types: OpenAI's replies, chunks and errors, and the fields that are ours.

Knows shapes, not how they are filled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from ...cache.why_not_more import WhyNotMore
from ...engine.completion import FinishReason, PrefillProgress, StopReason


class ErrorBody(msgspec.Struct):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorReply(msgspec.Struct):
    error: ErrorBody


class WhyNotMoreReply(msgspec.Struct):
    kind: str
    position: int
    wanted_ids: tuple[int, ...]
    wanted_text: str | None
    cached_ids: tuple[int, ...]
    cached_text: str | None
    message: str

    @classmethod
    def of(cls, why: WhyNotMore) -> WhyNotMoreReply:
        """The same, with the line that a human wants."""
        texts = why.wanted_ids, why.wanted_text, why.cached_ids, why.cached_text
        return cls(why.kind, why.position, *texts, message=str(why))

    @classmethod
    def told(cls, why: WhyNotMore | None, *, tells_cached_text: bool) -> WhyNotMoreReply | None:
        """What a client may know of it; None if all that may be reused was."""
        if why is None or why.kind == "complete":
            return None
        return cls.of(why if tells_cached_text else why.withheld())


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


class UsageReply(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


TokenIds = tuple[int, ...] | msgspec.UnsetType  # unset: nobody asked for them


StopReasonReply = StopReason | msgspec.UnsetType | None
"""vLLM's: the stop string or token of the request's own that ended the reply, else None; unset: it has not ended."""


class TruncationReply(msgspec.Struct):
    """What of a history was left out, because a request or the server said that it may be."""

    strategy: str
    dropped_messages: tuple[int, ...]  # their places in what was sent
    num_dropped_tokens: int


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
    choices: list[ChatChoice] | list[ChatChunkChoice] | list[TextChoice]
    usage: UsageReply | msgspec.UnsetType | None = msgspec.UNSET  # unset: a chunk of a stream without usage
    prompt_token_ids: TokenIds = msgspec.UNSET  # of a chat; in the last choice's chunk of a stream
    truncation: TruncationReply | msgspec.UnsetType = msgspec.UNSET  # ours, if asked for; in a stream's first chunk
    prompt_progress: PromptProgressReply | msgspec.UnsetType = msgspec.UNSET  # in chunks before a reply, if asked for


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


ChatFinishReason = FinishReason | Literal["tool_calls"]


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


class ChatChoice(msgspec.Struct):
    message: ReplyMessage
    finish_reason: ChatFinishReason
    logprobs: ChatLogprobs | None = None
    index: int = 0
    token_ids: TokenIds = msgspec.UNSET
    stop_reason: StopReasonReply = None


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


class ChatChunkChoice(msgspec.Struct):
    delta: ChatDelta
    finish_reason: ChatFinishReason | None = None
    logprobs: ChatLogprobs | None = None
    index: int = 0
    token_ids: TokenIds = msgspec.UNSET
    stop_reason: StopReasonReply = msgspec.UNSET


class TextLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]  # characters of the reply before the token


class TextChoice(msgspec.Struct):
    text: str
    finish_reason: FinishReason | None = None
    logprobs: TextLogprobs | None = None
    index: int = 0
    token_ids: TokenIds = msgspec.UNSET
    prompt_token_ids: TokenIds = msgspec.UNSET  # in the last chunk of a stream
    stop_reason: StopReasonReply = msgspec.UNSET
    truncation: CutPromptReply | msgspec.UnsetType = msgspec.UNSET  # ours, if asked for; in a stream's first chunk


class ChatReply(Reply, kw_only=True):
    """A whole chat completion."""

    choices: list[ChatChoice]


class TextReply(Reply, kw_only=True):
    """A completion, whole or a chunk of one."""

    choices: list[TextChoice]


class CachedRunReply(msgspec.Struct, kw_only=True):
    parent: int | None  # the place in `runs` of what it goes on from
    start: int  # tokens before it
    num_tokens: int
    num_generated: int  # tokens that the model made
    num_pages: int
    num_users: int  # running requests that use it
    num_children: int
    unused_s: float
    begins: str | None  # a few tokens


class CacheUseReply(msgspec.Struct, kw_only=True):
    id: str
    state: str  # waiting, running or ended
    run: int | None  # the place in `runs` of what its keys and values end in, if that is there
    num_prompt_tokens: int
    num_cached_tokens: int  # of these, found when it was admitted
    cached_tokens_by_kind: Mapping[str, int]
    num_generated_tokens: int
    running_s: float  # since it arrived, until it ended
    ended_s: float | None  # since it ended
    finish_reason: FinishReason | None
    why_not_more: WhyNotMoreReply | None


class CacheReply(msgspec.Struct, kw_only=True):
    num_runs: int
    num_tokens: int
    num_pages: int
    num_used_pages: int
    num_aliases: int
    runs: list[CachedRunReply]
    is_whole: bool  # all runs are there
    is_counted: bool  # all runs are in the sums
    requests: list[CacheUseReply]  # those that run, and the last that ended; the newest first
    object: str = "cache"


class ClearedReply(msgspec.Struct):
    num_freed_pages: int
    num_kept_pages: int  # running requests use them
    num_discarded_pages: int = 0  # taken off the disk
    object: str = "cache.cleared"


class ModelReply(msgspec.Struct):
    id: str
    created: int
    object: str = "model"
    owned_by: str = "radixlm"
    max_model_len: int | msgspec.UnsetType = msgspec.UNSET  # vLLM's: tokens of prompt and reply together


class ModelList(msgspec.Struct):
    data: list[ModelReply]
    object: str = "list"


class TokenizeReply(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | msgspec.UnsetType = msgspec.UNSET  # unset: nobody asked for them


class DetokenizeReply(msgspec.Struct):
    prompt: str


class VersionReply(msgspec.Struct):
    version: str
