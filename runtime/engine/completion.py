"""What comes back from a request: deltas while it runs, a completion at its end, and what it reused.

Frozen values; `request.py` makes them, the server turns them into JSON.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, get_args, overload

from ..cache.why_not_more import MatchKind, WhyNotMore
from ..errors import RadixLMError

_KINDS: tuple[MatchKind, ...] = get_args(MatchKind)

MAX_SHOWN = 60  # characters of a text in its repr

FinishReason = Literal["stop", "length", "cancelled"]
"""`stop`: a stop token, string or expression; `length`: max_tokens or the context; `cancelled`: the client left."""

StopReason = str | int
"""The stop string, stop expression or stop token of the request's own that ended a reply, as vLLM has it."""


@dataclass(frozen=True)
class TokenLogprob:
    """The natural logarithm of a token's probability, and of the most likely tokens in its place.

    They are those of the model, before penalties, bias, temperature and truncation. `top` is sorted, most
    likely first, and has as many entries as `SamplingParams.logprobs` asks for, or `prompt_logprobs` for a prompt's
    tokens; the token itself need not be among them. `rank` is its own place, from 1; among equals lower ids come first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0  # 0: not told


class PromptLogprobs(Sequence[TokenLogprob | None]):
    """Those of a prompt's tokens, as far as they are known; the first is None, because nothing comes before it.

    `token_ids` are all of the prompt's. Numbers lie in arrays, 12 bytes for each: as values of their own they would
    take ten times as much.
    """

    def __init__(self, token_ids: Iterable[int], num_top: int) -> None:
        """None of a prompt's yet; each will have the `num_top` most likely tokens in its place, if so many are."""
        self.num_top = num_top
        self.token_ids = array("i", token_ids)
        self._logprobs, self._ranks = array("d"), array("i")
        self._top_ids, self._top_logprobs = array("i"), array("d")

    @property
    def num_rows(self) -> int:
        """Rows of logits that were read: those of the first tokens, each of which says what comes behind it."""
        return len(self._logprobs)

    @property
    def is_complete(self) -> bool:
        """Whether no row is missing. That of the last token is not asked for: the reply comes behind it."""
        return len(self) == len(self.token_ids)

    @property
    def next_id(self) -> int:
        """The token that comes next; it must not be complete."""
        return self.token_ids[len(self)]

    def append(self, logprob: TokenLogprob) -> None:
        """Add that of the next token."""
        assert logprob.token_id == self.next_id, "of another token"
        self._logprobs.append(logprob.logprob)
        self._ranks.append(logprob.rank)
        self._top_ids.extend(token_id for token_id, _ in logprob.top)
        self._top_logprobs.extend(value for _, value in logprob.top)

    def __len__(self) -> int:
        return self.num_rows + 1

    @overload
    def __getitem__(self, index: int) -> TokenLogprob | None: ...

    @overload
    def __getitem__(self, index: slice) -> list[TokenLogprob | None]: ...

    def __getitem__(self, index: int | slice) -> TokenLogprob | list[TokenLogprob | None] | None:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        if place == 0:
            return None
        row, num_top = place - 1, len(self._top_ids) // self.num_rows
        each = slice(row * num_top, row * num_top + num_top)
        top = tuple(zip(self._top_ids[each], self._top_logprobs[each], strict=True))
        return TokenLogprob(self.token_ids[place], self._logprobs[row], top, self._ranks[row])


@dataclass(frozen=True)
class KVPruning:
    """Some of the cached prefix's KV rows were left out: the reply is close to the exact one, but not the same."""

    loaded: float  # the share of the cached tokens' keys and values that is used
    dropped_mass: float  # estimated share of the prompt's attention to the prefix that falls on the others


@dataclass(frozen=True)
class Usage:
    """Tokens of a request. `cached_tokens` of the `prompt_tokens` were reused and not computed."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    tokens_by_kind: Mapping[str, int] = field(default_factory=dict)  # cached tokens: {"exact": 96}
    disk_tokens_by_kind: Mapping[str, int] = field(default_factory=dict)  # of those, the ones loaded from disk for it
    pruning: KVPruning | None = None  # None: all keys and values of the cached tokens are used, and the reply is exact
    drafted_tokens: int = 0  # guesses of the reply's tokens that were checked
    accepted_tokens: int = 0  # of those, the ones that were right, and are tokens of the reply
    thought_tokens: int = 0  # of `completion_tokens`, those of the thought, its tags among them


@dataclass(frozen=True)
class Timings:
    """Seconds since the engine took the request; None where it never came so far."""

    time_to_first_token_s: float | None
    decode_tokens_per_s: float | None  # tokens after the first, over the time after the first
    total_s: float
    queue_s: float | None = None  # until it first took part in a step: for its turn, or for the disk


@dataclass(frozen=True)
class CacheMatch:
    """What the request's first admission reused, and why it was not more."""

    kind: str | None  # the weakest kind that was used, None if nothing was
    num_cached_tokens: int
    why_not_more: WhyNotMore | None  # None: the request never came so far; printed, it is one line for humans


@dataclass(frozen=True)
class PrefillProgress:
    """How much of a prompt has its keys and values: told when its request starts, then after each step.

    It falls only where a request gave its pages back.
    """

    num_prompt_tokens: int
    num_cached_tokens: int  # of these, found or loaded rather than computed
    num_processed_tokens: int  # likewise, there: cached or computed
    elapsed_s: float  # since the start


@dataclass(frozen=True)
class Delta:
    """What a step added to a reply. Joined, the texts of all deltas are `Completion.text`; of thoughts, likewise.

    `text` may be empty while `token_ids` is not (half a character, or the possible beginning of a stop
    string), and the last delta may bring text without tokens. `finish_reason` is set in the last delta only.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None  # one per token of `token_ids`, if asked for
    finish_reason: FinishReason | None = None
    stop_reason: StopReason | None = None  # in the last delta only
    progress: PrefillProgress | None = None  # in deltas that say nothing else, of streams that asked for them
    thought: str = ""  # of a chat's reply
    num_thought_tokens: int = 0  # of the reply's tokens so far; certain when there is text
    guessed: tuple[bool, ...] = ()  # of each of `token_ids`, whether it was guessed before the model said it
    readings: tuple[object, ...] = ()  # as `Completion.readings`, in the first delta with a token or a finish reason

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """Those of the prompt's tokens, if they are among the readings."""
        return _prompt_logprobs(self.readings)

    @classmethod
    def whole(cls, completion: Completion) -> Delta:
        """All of a reply's text as one delta, without its tokens."""
        return cls(completion.text, (), finish_reason=completion.finish_reason, thought=completion.thought)

    @property
    def is_empty(self) -> bool:
        """Whether it says nothing: all that a step brought may still be taken back, or was."""
        said = self.text or self.thought or self.token_ids or self.finish_reason
        return not said and self.progress is None and not self.readings


@dataclass(frozen=True)
class Completion:
    """A finished request.

    What a chat's reply thinks before it answers is `thought`, where the chat template says how thoughts are written;
    the tags around it are in neither text. Stop strings and expressions end the answer only. `text` is the decoding of
    the other `token_ids` up to, and without, the stop token, the stop string or the match of the stop expression that
    ended it; a space that ends the prompt's text and is not fed begins the decoding of the ids, and not `text`.
    `token_ids` are all tokens that the model generated, the stop token included.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]  # those that were really used
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    cache_match: CacheMatch
    stop_reason: StopReason | None = None  # None: the model's own end, a complete grammar, or nothing stopped it
    request_id: str = ""  # the caller's own name of the request, or the engine's
    num_swallowed: int = 0  # of a raw prompt: characters that the ids begin with, and that end the prompt's text
    thought: str = ""
    readings: tuple[object, ...] = ()  # what readers of logits other than the sampler made, of types of their own

    def __repr__(self) -> str:
        """The beginning of its text, how it ended and how many tokens it has, in one line."""
        text = self.text if len(self.text) <= MAX_SHOWN else f"{self.text[:MAX_SHOWN]}..."
        counts = self.usage
        return (
            f"<Completion {text!r}: {self.finish_reason}, {counts.completion_tokens} tokens after "
            f"{counts.prompt_tokens}, of which {counts.cached_tokens} were cached>"
        )

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """Those of the prompt's tokens; None: not asked for, or the request was cancelled before."""
        return _prompt_logprobs(self.readings)

    @property
    def ended_in_reasoning(self) -> bool:
        """Whether the reply ended by itself and is nothing but reasoning, be it a tag alone."""
        has_thought = bool(self.thought or self.usage.thought_tokens)
        return self.finish_reason == "stop" and has_thought and not self.text.strip()


class RequestOutput(NamedTuple):
    """What a step brought for one request. The last one has a `completion` or an `error`."""

    request_id: str
    delta: Delta | None = None
    completion: Completion | None = None
    error: RadixLMError | None = None


@dataclass(frozen=True)
class PrefixReuse:
    """How many of a prompt's tokens were reused, by the kind of match that found them, strongest kind first."""

    tokens_by_kind: Mapping[MatchKind, int] = field(default_factory=dict)
    disk_tokens_by_kind: Mapping[MatchKind, int] = field(default_factory=dict)  # of those, loaded from disk for it
    why_not_more: WhyNotMore | None = None  # None: the request was never admitted
    pruning: KVPruning | None = None  # None: all keys and values of the reused tokens are there

    @property
    def num_tokens(self) -> int:
        """Tokens that were not computed."""
        return sum(self.tokens_by_kind.values())

    def with_loaded(self, by_kind: Mapping[MatchKind, int], why_not_more: WhyNotMore) -> PrefixReuse:
        """The same with tokens that came from disk while the request computed what is before them."""
        return replace(
            self,
            tokens_by_kind=_sum(self.tokens_by_kind, by_kind),
            disk_tokens_by_kind=_sum(self.disk_tokens_by_kind, by_kind),
            why_not_more=why_not_more,
        )

    def usage(self, num_prompt_tokens: int, num_generated: int) -> Usage:
        """The usage of a request with so many tokens."""
        return Usage(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=num_generated,
            cached_tokens=self.num_tokens,
            tokens_by_kind={kind: count for kind, count in self.tokens_by_kind.items()},
            disk_tokens_by_kind={kind: count for kind, count in self.disk_tokens_by_kind.items()},
            pruning=self.pruning,
        )

    def cache_match(self, why_not_more: WhyNotMore | None) -> CacheMatch:
        """The weakest kind that was used, and why it was not more, with its texts."""
        kinds = [kind for kind, count in self.tokens_by_kind.items() if count]
        return CacheMatch(kinds[-1] if kinds else None, self.num_tokens, why_not_more)


def _prompt_logprobs(readings: Iterable[object]) -> PromptLogprobs | None:
    return next((reading for reading in readings if isinstance(reading, PromptLogprobs)), None)


def _sum(left: Mapping[MatchKind, int], right: Mapping[MatchKind, int]) -> dict[MatchKind, int]:
    return {kind: count for kind in _KINDS if (count := left.get(kind, 0) + right.get(kind, 0))}
