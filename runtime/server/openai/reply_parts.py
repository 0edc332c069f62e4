"""Translate the engine's results into parts of OpenAI's replies: usage, logprobs, messages, deltas.

Knows values, not endpoints or streams.
"""

from __future__ import annotations

import codecs
from collections import Counter
from collections.abc import Sequence
from typing import Protocol, get_args

import msgspec

from ...cache.why_not_more import MatchKind, WhyNotMore
from ...engine.completion import Completion, Delta, FinishReason, PromptLogprobs, TokenLogprob
from ..reply_events import PartBegin, PartText, ReplyEvent, ReplyEvents
from .replies import (
    ChangeReply,
    ChatDelta,
    ChatFinishReason,
    ChatLogprob,
    ChatLogprobs,
    CompletionTokensDetails,
    FunctionCallDelta,
    FunctionCallReply,
    PromptTokensDetails,
    ReplyMessage,
    RunningUsage,
    TextLogprobs,
    ToolCallDelta,
    ToolCallReply,
    TopLogprob,
    UsageReply,
    WhyNotMoreReply,
)

_WEAKER_AND_WEAKER: tuple[str, ...] = get_args(MatchKind)


def usage_of(completions: Sequence[Completion], num_choices: int = 1, *, tells_cached_text: bool) -> UsageReply:
    """Return the usage of all completions, ordered by prompt, with `num_choices` completions for each.

    A prompt counts once, as in OpenAI's API. Its counts are those of the choice with the fewest cached tokens, which
    computed the prompt for the others. `cache_match` is the weakest kind that any prompt used, `why_not_more` that of
    the first prompt that has one. If KV was loaded approximately, the figures are those of the worst prompt.
    """
    groups = [completions[start : start + num_choices] for start in range(0, len(completions), num_choices)]
    prompts = [min(group, key=lambda completion: completion.usage.cached_tokens) for group in groups]
    prompt_tokens = sum(prompt.usage.prompt_tokens for prompt in prompts)
    completion_tokens = sum(completion.usage.completion_tokens for completion in completions)
    usage = UsageReply(
        prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, _details(prompts, tells_cached_text)
    )
    thought_tokens = sum(completion.usage.thought_tokens for completion in completions)
    drafted = sum(completion.usage.drafted_tokens for completion in completions)
    accepted = sum(completion.usage.accepted_tokens for completion in completions)
    if thought_tokens or drafted:
        usage.completion_tokens_details = CompletionTokensDetails(thought_tokens, accepted, drafted - accepted)
    return usage


def _details(prompts: Sequence[Completion], tells_cached_text: bool) -> PromptTokensDetails:
    """Return the usage details of prompts together: cached tokens by kind and by memory or disk, and why no more."""
    by_kind: Counter[str] = Counter()
    num_from_disk = 0
    for prompt in prompts:
        by_kind.update(prompt.usage.tokens_by_kind)
        num_from_disk += sum(prompt.usage.disk_tokens_by_kind.values())
    by_tier = {"memory": by_kind.total() - num_from_disk, "disk": num_from_disk}
    whys = (why_not_more(prompt.cache_match.why_not_more, tells_cached_text=tells_cached_text) for prompt in prompts)
    kinds = [prompt.cache_match.kind for prompt in prompts if prompt.cache_match.kind is not None]
    details = PromptTokensDetails(
        cached_tokens=sum(prompt.usage.cached_tokens for prompt in prompts),
        cached_tokens_by_kind=dict(by_kind),
        cached_tokens_by_tier={tier: count for tier, count in by_tier.items() if count},
        cache_match=max(kinds, key=_WEAKER_AND_WEAKER.index, default=None),
        why_not_more=next((why for why in whys if why is not None), None),
    )
    prunings = [prompt.usage.pruning for prompt in prompts if prompt.usage.pruning is not None]
    if prunings:
        details.kv_loaded = round(min(pruning.loaded for pruning in prunings), 4)
        details.kv_dropped_mass = round(max(pruning.dropped_mass for pruning in prunings), 4)
    return details


def why_not_more(why: WhyNotMore | None, *, tells_cached_text: bool) -> WhyNotMoreReply | None:
    """Return why a cached prefix ends, without text that clients must not see; None if it could not be longer."""
    if why is None or why.kind == "complete":
        return None
    why = why if tells_cached_text else why.withheld()
    texts = why.wanted_ids, why.wanted_text, why.cached_ids, why.cached_text
    change = why.change and ChangeReply(why.change.before, why.change.was, why.change.now)
    before = msgspec.UNSET if why.before_text is None else why.before_text
    return WhyNotMoreReply(
        why.kind, why.position, *texts, message=str(why), before_text=before, change=change or msgspec.UNSET
    )


class PromptCounts(Protocol):
    """The prompt lengths of a request's choices."""

    def num_prompt_tokens(self, index: int) -> int: ...


class ChunkUsage:
    """The `usage` field in the chunks of a stream, except the last chunk.

    Args:
        prompts: the length of each choice's prompt.
        is_told: the stream ends with a chunk of usage; the other chunks then have null.
        is_running: each chunk has the counts of its choice so far.
    """

    def __init__(self, prompts: PromptCounts, *, is_told: bool, is_running: bool) -> None:
        self._prompts, self._is_told, self._is_running = prompts, is_told, is_running
        self._num_generated: Counter[int] = Counter()

    def count(self, index: int, delta: Delta) -> None:
        """Add the tokens of a delta to its choice."""
        self._num_generated[index] += len(delta.token_ids)

    def of(self, index: int) -> RunningUsage | msgspec.UnsetType | None:
        """Return the `usage` field of a choice's next chunk."""
        if not self._is_running:
            return None if self._is_told else msgspec.UNSET
        num_prompt, num_generated = self._prompts.num_prompt_tokens(index), self._num_generated[index]
        return RunningUsage(num_prompt, num_generated, num_prompt + num_generated)


class TokenNames(Protocol):
    """Returns the text and bytes of single tokens."""

    def token_text(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...


def chat_logprobs(names: TokenNames, logprobs: Sequence[TokenLogprob] | None) -> ChatLogprobs | None:
    """Return `choices[].logprobs` of a chat; None if the request does not ask for them."""
    if logprobs is None:
        return None
    content = []
    for logprob in logprobs:
        top = [_top(names, token_id, value) for token_id, value in logprob.top]
        own = _top(names, logprob.token_id, logprob.logprob)
        content.append(ChatLogprob(own.token, own.logprob, own.bytes, top))
    return ChatLogprobs(content)


class TextTokens:
    """Converts the logprobs of one completion, and counts the offset of each token in the text.

    Offsets are counted by the tokens' own text, because text that may become a stop string is sent after its tokens.

    Args:
        num_swallowed: characters at the beginning of the tokens that are not in the text. Tokens that begin there have
            the offset 0.
    """

    def __init__(self, names: TokenNames, num_swallowed: int = 0) -> None:
        self._names = names
        self._offset = -num_swallowed
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def logprobs(self, logprobs: Sequence[TokenLogprob] | None) -> TextLogprobs | None:
        """Return `choices[].logprobs` of the next tokens; None if the request does not ask for them."""
        if logprobs is None:
            return None
        reply = TextLogprobs([], [], [], [])
        for logprob in logprobs:
            self._add(reply, logprob.token_id, logprob, len(logprob.top))
        return reply

    def prompt(self, logprobs: PromptLogprobs, num_top: int) -> TextLogprobs:
        """Return `choices[].logprobs` of a prompt's tokens, the first of which has no logprob."""
        reply = TextLogprobs([], [], [], [])
        for token_id, logprob in zip(logprobs.token_ids, logprobs, strict=True):
            self._add(reply, token_id, logprob, num_top)
        return reply

    def _add(self, reply: TextLogprobs, token_id: int, logprob: TokenLogprob | None, num_top: int) -> None:
        """Add a token, its logprob and the likeliest ones to a reply's lists, with its offset in the text."""
        reply.tokens.append(_name(self._names, token_id))
        reply.token_logprobs.append(None if logprob is None else logprob.logprob)
        reply.top_logprobs.append(None if logprob is None else _top_by_name(self._names, logprob, num_top))
        reply.text_offset.append(max(self._offset, 0))
        self._offset += len(self._characters.decode(self._names.token_bytes(token_id)))


def _top(names: TokenNames, token_id: int, logprob: float) -> TopLogprob:
    return TopLogprob(names.token_text(token_id), logprob, list(names.token_bytes(token_id)))


def _top_by_name(names: TokenNames, logprob: TokenLogprob, num_top: int) -> dict[str, float]:
    """Return the logprobs of the `num_top` most likely tokens by name.

    A token with the same name as another one is called `token_id:ID`, as in vLLM. Byte tokens and letters may have the
    same name. The generated token keeps its own name, by which clients look it up.
    """
    id_of = {_name(names, logprob.token_id): logprob.token_id}
    top: dict[str, float] = {}
    for token_id, value in logprob.top[:num_top]:
        name = _name(names, token_id)
        top[name if id_of.setdefault(name, token_id) == token_id else f"token_id:{token_id}"] = value
    return top


def _name(names: TokenNames, token_id: int) -> str:
    """Return a token's text, or OpenAI's `bytes:\\xf0\\x9f` for a part of a character, so that names differ."""
    try:
        names.token_bytes(token_id).decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in names.token_bytes(token_id))
    return names.token_text(token_id)


def message_of(completion: Completion, reply: ReplyEvents) -> ReplyMessage:
    """Return a completion as a message. Its content is null if it only calls tools."""
    reply.push(Delta.whole(completion))
    content = "".join(part.text for part in reply.parts if part.kind == "text")
    calls = [
        ToolCallReply(part.call.call_id, FunctionCallReply(part.call.name, part.text))
        for part in reply.parts
        if part.call is not None
    ]
    message = ReplyMessage(content)
    if calls:
        message = ReplyMessage(content or None, tool_calls=calls)
    if completion.thought:
        message.reasoning_content = completion.thought
    return message


def deltas_of(events: Sequence[ReplyEvent]) -> list[ChatDelta]:
    """Return the deltas of a stream for a reply's events: text, and for tool calls first the name, then arguments."""
    deltas: list[ChatDelta] = []
    for event in events:
        call = event.part.call
        match event:
            case PartText(part, text) if call is None:
                deltas.append(ChatDelta(content=text) if part.kind == "text" else ChatDelta(reasoning_content=text))
            case PartText(_, text) if call is not None:
                deltas.append(ChatDelta(tool_calls=[ToolCallDelta(call.index, FunctionCallDelta(text))]))
            case PartBegin() if call is not None:
                begun = ToolCallDelta(call.index, FunctionCallDelta("", call.name), call.call_id, "function")
                deltas.append(ChatDelta(tool_calls=[begun]))
    return deltas


def finish_reason_of(reason: FinishReason, reply: ReplyEvents) -> ChatFinishReason:
    """Return OpenAI's finish reason: `tool_calls` if the reply ends with complete tool calls."""
    return "tool_calls" if reason == "stop" and reply.has_calls else reason
