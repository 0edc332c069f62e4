"""The results of a request: deltas while it runs, a completion at its end, and what it reused from the cache.

Frozen values. `request.py` makes them, the server turns them into JSON.
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
"""`stop`: a stop token, string or expression; `length`: max_tokens or the context; `cancelled`: by the client."""

StopReason = str | int
"""The stop string, stop expression or stop token that ended a reply if the request set one, as in vLLM's API."""


@dataclass(frozen=True)
class TokenLogprob:
    """The log probability of a token, and the most likely tokens at its position.

    Natural logarithms of the model's own probabilities, before penalties, bias, temperature and truncation. `top` is
    sorted, most likely first, and has as many entries as `SamplingParams.logprobs` asks for, or `prompt_logprobs` for
    a prompt's tokens; the token itself need not be among them. `rank` is the token's own rank, from 1; on ties lower
    ids come first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0  # 0: unknown


class PromptLogprobs(Sequence[TokenLogprob | None]):
    """The logprobs of a prompt's tokens computed so far; the first is None, because nothing precedes it.

    `token_ids` has all tokens of the prompt. Numbers are stored in arrays, 12 bytes each: as Python objects they would
    take ten times as much.
    """

    def __init__(self, token_ids: Iterable[int], num_top: int) -> None:
        """Start without logprobs; each token will have the `num_top` most likely ones, or fewer if there are fewer."""
        self.num_top = num_top
        self.token_ids = array("i", token_ids)
        self._logprobs, self._ranks = array("d"), array("i")
        self._top_ids, self._top_logprobs = array("i"), array("d")

    @property
    def num_rows(self) -> int:
        """Number of rows of logits read: the row of a token has the logprobs of the token after it."""
        return len(self._logprobs)

    @property
    def is_complete(self) -> bool:
        """Return whether all rows were read. The row of the last token is not needed: the reply follows it."""
        return len(self) == len(self.token_ids)

    @property
    def next_id(self) -> int:
        """The token whose logprob comes next; raises IndexError when complete."""
        return self.token_ids[len(self)]

    def append(self, logprob: TokenLogprob) -> None:
        """Add the logprob of the prompt's next token."""
        assert logprob.token_id == self.next_id, "logprob of another token"
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
    """A marker that KV rows of the cached prefix were left out: the reply is close to the exact one, not the same."""

    loaded: float  # share of the cached tokens' KV that is used
    dropped_mass: float  # estimated share of the prompt's attention to the prefix that falls on the tokens left out


@dataclass(frozen=True)
class Usage:
    """The token counts of a request. `cached_tokens` of the `prompt_tokens` were reused and not computed."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    tokens_by_kind: Mapping[str, int] = field(default_factory=dict)  # cached tokens: {"exact": 96}
    disk_tokens_by_kind: Mapping[str, int] = field(default_factory=dict)  # of those, loaded from disk for it
    pruning: KVPruning | None = None  # None: all KV of the cached tokens is used, and the reply is exact
    drafted_tokens: int = 0  # draft tokens that were verified
    accepted_tokens: int = 0  # of those, accepted ones, which are tokens of the reply
    thought_tokens: int = 0  # of `completion_tokens`, those of reasoning, its tags included


@dataclass(frozen=True)
class Timings:
    """The timings of a request in seconds since the engine received it; None if it never got that far."""

    time_to_first_token_s: float | None
    decode_tokens_per_s: float | None  # tokens after the first, over the time after the first
    total_s: float
    queue_s: float | None = None  # until its first step: waiting for its turn, or for the disk


@dataclass(frozen=True)
class CacheMatch:
    """The prefix that a request's first admission reused, and why it was not longer."""

    kind: str | None  # the weakest kind that was used, None if nothing was
    num_cached_tokens: int
    why_not_more: WhyNotMore | None  # None: the request was never admitted; printed, it is one line for humans


@dataclass(frozen=True)
class PrefillProgress:
    """The prefill progress of a prompt: reported when its request starts, then after each step.

    It decreases only if the request is preempted.
    """

    num_prompt_tokens: int
    num_cached_tokens: int  # of these, found cached or loaded rather than computed
    num_processed_tokens: int  # of these, cached or computed so far
    elapsed_s: float  # since the start


@dataclass(frozen=True)
class Delta:
    """The part of a reply that a step added. Joined, the texts of all deltas are `Completion.text`; so for `thought`.

    `text` can be empty while `token_ids` is not (half a character, or the possible beginning of a stop
    string), and the last delta can have text without tokens. `finish_reason` is set in the last delta only.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None  # one per token of `token_ids`, if asked for
    finish_reason: FinishReason | None = None
    stop_reason: StopReason | None = None  # in the last delta only
    progress: PrefillProgress | None = None  # in deltas with nothing else, of streams that asked for progress
    thought: str = ""  # reasoning of a chat's reply
    num_thought_tokens: int = 0  # reasoning tokens of the reply so far; final once there is text
    guessed: tuple[bool, ...] = ()  # of each of `token_ids`, whether it was a draft token
    readings: tuple[object, ...] = ()  # as `Completion.readings`, in the first delta with a token or a finish reason

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """The logprobs of the prompt's tokens, if they are among the readings."""
        return _prompt_logprobs(self.readings)

    @classmethod
    def whole(cls, completion: Completion) -> Delta:
        """Return the whole text of a reply as one delta, without its tokens."""
        return cls(completion.text, (), finish_reason=completion.finish_reason, thought=completion.thought)

    @property
    def is_empty(self) -> bool:
        """Return whether the delta has nothing new: all tokens of the step may still be taken back, or were."""
        said = self.text or self.thought or self.token_ids or self.finish_reason
        return not said and self.progress is None and not self.readings


@dataclass(frozen=True)
class Completion:
    """A finished request.

    Text between the tags that the chat template gives for reasoning is `thought`; the tags are in neither text.
    Stop strings and expressions end the answer only. `text` is the decoding of the other `token_ids` without the stop
    token, the stop string or the match of the stop expression that ended it. If the prompt ends in a space that was not
    computed, the ids begin with that space, and `text` does not.
    """

    text: str
    token_ids: tuple[int, ...]  # all tokens that the model generated, the stop token included
    prompt_token_ids: tuple[int, ...]  # as they were computed
    logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: FinishReason
    usage: Usage
    timings: Timings
    cache_match: CacheMatch
    stop_reason: StopReason | None = None  # None: an end-of-sequence token, a complete grammar, or no stop at all
    request_id: str = ""  # the caller's own id of the request, or the engine's
    num_swallowed: int = 0  # of a raw prompt: characters that the ids begin with, and that end the prompt's text
    thought: str = ""
    readings: tuple[object, ...] = ()  # results of logit readers other than the sampler, of their own types

    def __repr__(self) -> str:
        """Return the beginning of the text, the finish reason and the token counts, in one line."""
        text = self.text if len(self.text) <= MAX_SHOWN else f"{self.text[:MAX_SHOWN]}..."
        counts = self.usage
        return (
            f"<Completion {text!r}: {self.finish_reason}, {counts.completion_tokens} tokens after "
            f"{counts.prompt_tokens}, of which {counts.cached_tokens} were cached>"
        )

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """The logprobs of the prompt's tokens; None if not requested, or if the request was cancelled before."""
        return _prompt_logprobs(self.readings)

    @property
    def ended_in_reasoning(self) -> bool:
        """Return whether the reply ended by itself and consists of reasoning only, even if it is just a tag."""
        has_thought = bool(self.thought or self.usage.thought_tokens)
        return self.finish_reason == "stop" and has_thought and not self.text.strip()


class RequestOutput(NamedTuple):
    """The output of a step for one request. The last one has a `completion` or an `error`."""

    request_id: str
    delta: Delta | None = None
    completion: Completion | None = None
    error: RadixLMError | None = None


@dataclass(frozen=True)
class PrefixReuse:
    """The number of a prompt's tokens that were reused, by the kind of match that found them, strongest kind first."""

    tokens_by_kind: Mapping[MatchKind, int] = field(default_factory=dict)
    disk_tokens_by_kind: Mapping[MatchKind, int] = field(default_factory=dict)  # of those, loaded from disk for it
    why_not_more: WhyNotMore | None = None  # None: the request was never admitted
    pruning: KVPruning | None = None  # None: all KV of the reused tokens is present

    @property
    def num_tokens(self) -> int:
        """Number of tokens that were not computed."""
        return sum(self.tokens_by_kind.values())

    def with_loaded(self, by_kind: Mapping[MatchKind, int], why_not_more: WhyNotMore) -> PrefixReuse:
        """Return a copy with the tokens that were loaded from disk while the request computed those before them."""
        return replace(
            self,
            tokens_by_kind=_sum(self.tokens_by_kind, by_kind),
            disk_tokens_by_kind=_sum(self.disk_tokens_by_kind, by_kind),
            why_not_more=why_not_more,
        )

    def usage(self, num_prompt_tokens: int, num_generated: int) -> Usage:
        """Return the usage of a request with this many tokens."""
        return Usage(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=num_generated,
            cached_tokens=self.num_tokens,
            tokens_by_kind={kind: count for kind, count in self.tokens_by_kind.items()},
            disk_tokens_by_kind={kind: count for kind, count in self.disk_tokens_by_kind.items()},
            pruning=self.pruning,
        )

    def cache_match(self, why_not_more: WhyNotMore | None) -> CacheMatch:
        """Return the weakest kind of match that was used, and the given reason why it was not more."""
        kinds = [kind for kind, count in self.tokens_by_kind.items() if count]
        return CacheMatch(kinds[-1] if kinds else None, self.num_tokens, why_not_more)


def _prompt_logprobs(readings: Iterable[object]) -> PromptLogprobs | None:
    return next((reading for reading in readings if isinstance(reading, PromptLogprobs)), None)


def _sum(left: Mapping[MatchKind, int], right: Mapping[MatchKind, int]) -> dict[MatchKind, int]:
    return {kind: count for kind in _KINDS if (count := left.get(kind, 0) + right.get(kind, 0))}
