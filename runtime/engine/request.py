"""One request from prompt to completion: what it wants, what it has generated, and when it ends.

The token list and the KV belong to its `Sequence`; this adds the sampler's state, the text and the times.
Knows nothing of other requests, pages or threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, get_args

from ..cache.cache_uses import CacheUse, PageMark
from ..cache.prefix_match import MatchKind, PrefixMatch
from ..cache.reply_alias import ReplyAlias
from ..cache.sequence import Sequence
from ..cache.why_not_more import WhyNotMore
from ..chat.token_constraint import HeldOpen, TokenConstraint
from ..errors import ContextLengthExceeded, EmptyPrompt, InvalidParameter
from ..prefix.loaded_prefix import LoadedPrefix
from ..prefix.loaded_rows import LoadedRows
from .completion import (
    CacheMatch,
    Completion,
    Delta,
    FinishReason,
    KVPruning,
    PrefillProgress,
    StopReason,
    Timings,
    TokenLogprob,
    Usage,
)
from .sampler import Refusal, SampledToken, SamplerState
from .sampling_params import SamplingParams
from .stop_strings import StopStrings

if TYPE_CHECKING:
    from radixlm.tokenizer_fix import PreparedPrompt, SpelledPrompt


class TextDecoder(Protocol):
    """Ids in, text out; `tokenizer_fix.StreamDecoder` is the real one."""

    def push(self, token_id: int) -> str:
        """Take one token and return the text that is certain now."""
        ...

    def finish(self) -> str:
        """Return the text that was still open."""
        ...


@dataclass(frozen=True)
class RequestLimits:
    """What a request must keep to, whatever the engine is doing: checked in the caller's thread, too."""

    vocab_size: int  # tokens that the tokenizer has and the model knows
    context_length: int  # tokens of prompt and reply together

    def validate(self, prompt: PreparedPrompt, params: SamplingParams) -> None:
        """Raise if the model can never serve this.

        Raises:
            EmptyPrompt: no tokens.
            ContextLengthExceeded: the prompt leaves no room for one token of reply.
            InvalidParameter: a token id is not in the vocabulary.
        """
        if not prompt.ids:
            raise EmptyPrompt("the prompt has no tokens; it needs at least one")
        if len(prompt.ids) >= self.context_length:
            raise ContextLengthExceeded.of_prompt(len(prompt.ids), self.context_length)
        self.require_known("the prompt", prompt.ids)
        self.require_known("stop_token_ids", params.stop_token_ids)
        self.require_known("logit_bias", params.logit_bias)

    def require_known(self, where: str, token_ids: Iterable[int]) -> None:
        """Raise InvalidParameter if a token id is not in the vocabulary; `where` names its place."""
        for token_id in token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise InvalidParameter(f"{where} has token id {token_id}; the vocabulary is 0 to {self.vocab_size - 1}")


class Request:
    """A request and all that is remembered of it. `sequence` is None until the scheduler admits it."""

    def __init__(
        self,
        request_id: str,
        prompt: PreparedPrompt,
        params: SamplingParams,
        *,
        decoder: TextDecoder,
        vocab_size: int,
        eos_token_ids: Iterable[int] = (),
        namespace: bytes | None = b"",
        arrived_at: float = 0.0,
        spelled: Callable[[], SpelledPrompt] | None = None,
        render_reply: Callable[[str], str] | None = None,
        explain: Callable[[WhyNotMore], WhyNotMore] = lambda why: why,
        constraint: TokenConstraint | None = None,
        kv_budget: float = 1.0,
        name: str | None = None,
    ) -> None:
        """A request that waits.

        Args:
            decoder: fresh, and told of the prompt.
            eos_token_ids: the model's own, which end the reply unless `params.ignore_eos`.
            namespace: whose cache it uses; None: it reuses nothing, and nothing is kept of it.
            arrived_at: seconds, on the engine's clock.
            spelled: what the prompt spells, if it may be matched by text.
            render_reply: how a reply stands in the prompts of later turns, for a chat whose template is known.
            explain: adds the texts to why no more of the prompt was cached.
            constraint: what the reply must keep to, at its beginning and this request's own.
            kv_budget: of a prefix on disk, the share of its keys and values that is enough.
            name: the caller's own of it, of which there may be others; None: its id.
        """
        self.request_id = request_id
        self.name = request_id if name is None else name
        self.prompt = prompt
        self.params = params
        self.namespace = namespace
        self.arrived_at = arrived_at
        self.spelled = spelled
        self.kv_budget = kv_budget
        self.rows: LoadedRows | None = None  # that its sequence is to begin with, while it waits to be admitted
        self.candidate: PrefixMatch | None = None  # what was found while it waits,
        self.is_candidate_final = False  # and whether by all kinds of match
        self.loaded: LoadedPrefix | None = None  # from disk, before it was admitted,
        self._loaded_later: Mapping[MatchKind, int] = {}  # and while it computed what is before
        self._pruning: KVPruning | None = None
        self._render_reply = render_reply
        self._explain = explain
        self.sequence: Sequence | None = None
        self.num_preemptions = 0
        self._match: PrefixMatch | None = None
        self._max_length = 0  # of the sequence, known when it is admitted
        self._vocab_size = vocab_size
        self._own_end_ids = frozenset(() if params.ignore_eos else eos_token_ids)
        self._stop_ids = params.end_ids(eos_token_ids)
        if params.min_tokens:
            constraint = HeldOpen(params.min_tokens, self._stop_ids, vocab_size, constraint)
        self._constraint = constraint
        self._sampler = SamplerState(params, prompt.ids, vocab_size, constraint)
        self._decoder = decoder
        self._stops = StopStrings(params.stop)
        self._text: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._finish_reason: FinishReason | None = None
        self._started_at: float | None = None
        self._first_token_at: float | None = None
        self._last_token_at: float | None = None

    def __repr__(self) -> str:
        name = repr(self.request_id) if self.name == self.request_id else f"{self.request_id!r} = {self.name!r}"
        return f"Request({name}, {len(self.prompt.ids)} + {self.num_generated} tokens)"

    @property
    def admitted(self) -> Sequence:
        """The sequence; there must be one."""
        assert self.sequence is not None, f"request {self.request_id} was never admitted"
        return self.sequence

    @property
    def num_reused_tokens(self) -> int:
        """Tokens of the prompt that were found when it was admitted, or loaded while it computed."""
        return 0 if self._match is None else sum(self._match.tokens_by_kind.values())

    @property
    def num_generated(self) -> int:
        """Tokens of the reply so far."""
        return len(self.sequence) - len(self.prompt.ids) if self.sequence else 0

    @property
    def num_swallowed(self) -> int:
        """Characters that the reply's ids begin with, and that end the prompt's text."""
        return int(self.prompt.space_id is not None)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens of the reply so far, the stop token included."""
        return tuple(self.sequence.token_ids[len(self.prompt.ids) :]) if self.sequence else ()

    @property
    def sampler(self) -> SamplerState:
        """The state that `sample` draws with."""
        return self._sampler

    @property
    def last_token_at(self) -> float | None:
        """When the newest token of the reply came, in seconds on the engine's clock."""
        return self._last_token_at

    @property
    def is_finished(self) -> bool:
        """Whether the reply has ended."""
        return self._finish_reason is not None

    def admit(self, sequence: Sequence, match: PrefixMatch) -> None:
        """Take the sequence that the scheduler opened on a match of the prompt."""
        assert self.sequence is None, "admitted twice"
        rows, self.rows = self.rows, None  # they are in the pool now
        if rows is not None:
            match, self.loaded = rows.reuse(match)
            self._pruning = KVPruning(rows.share, rows.dropped_attention)
        self.sequence, self._match = sequence, match
        if tuple(self.prompt.ids) != match.prompt_ids:  # penalties are by the ids that are used
            self._sampler = SamplerState(self.params, match.prompt_ids, self._vocab_size, self._constraint)
        self.prompt = replace(self.prompt, ids=match.prompt_ids, num_match=match.num_match)
        self._max_length = self._longest(len(self.prompt.ids), sequence.context_length)

    def max_length_of(self, num_prompt_tokens: int, context_length: int) -> int:
        """Tokens that its sequence ends with at the latest; of a prompt so long if it was not admitted yet."""
        return self._longest(num_prompt_tokens, context_length) if self.sequence is None else self._max_length

    def start(self, now: float) -> float | None:
        """Note that it takes part in a step: the seconds that it waited for its first one, None if that was earlier."""
        if self._started_at is not None:
            return None
        self._started_at = now
        return now - self.arrived_at

    def progress(self, now: float) -> PrefillProgress:
        """How far its prompt is; it must have started."""
        assert self._started_at is not None, f"request {self.request_id} never started"
        num_prompt_tokens = len(self.prompt.ids)
        return PrefillProgress(
            num_prompt_tokens=num_prompt_tokens,
            num_cached_tokens=self.num_reused_tokens,
            num_processed_tokens=min(self.admitted.num_computed, num_prompt_tokens),
            elapsed_s=now - self._started_at,
        )

    def preempted(self) -> None:
        """Note that it gave its pages back, with those of a sparse span: what it computes from here on is exact. If it
        has generated nothing so far, all of its reply is."""
        self.num_preemptions += 1
        if self.num_generated == 0:
            self._pruning = None

    def count_loaded(self, by_kind: Mapping[MatchKind, int], why_not_more: WhyNotMore) -> None:
        """Note tokens of the prompt that came from disk after it was admitted, and why not more did."""
        assert self._match is not None, f"request {self.request_id} was never admitted"
        self._loaded_later = _sum(self._loaded_later, by_kind)
        tokens_by_kind = _sum(self._match.tokens_by_kind, by_kind)
        self._match = replace(self._match, tokens_by_kind=tokens_by_kind, why_not_more=why_not_more)

    def accept(self, sampled: SampledToken | Refusal, now: float) -> Delta:
        """Append a sampled token to the sequence, and end the reply if it says so, its constraint is complete, or
        there is room for no more.

        Raises:
            ConstraintFailed: the token may not come here, or none could be chosen.
        """
        assert self._finish_reason is None
        if isinstance(sampled, Refusal):
            raise sampled.error
        token_id = sampled.token_id
        self.admitted.append((token_id,))
        self._sampler.record(token_id)
        if self._first_token_at is None:
            self._first_token_at = now
        self._last_token_at = now
        text, reason = self._advance(token_id)
        if sampled.logprob is None:
            return self._delta(text, (token_id,), None, reason)
        self._logprobs.append(sampled.logprob)
        return self._delta(text, (token_id,), (sampled.logprob,), reason)

    def cancel(self) -> Delta:
        """End the reply where it is."""
        assert not self.is_finished
        return self._delta(self._flush(), (), None, "cancelled")

    def alias(self) -> ReplyAlias | None:
        """The finished reply and how it will be rendered, where that is another text."""
        if self._render_reply is None or self._stops.matched is not None:  # it cut the text within its ids
            return None
        ids = self.token_ids
        ids = ids[:-1] if ids and ids[-1] in self._stop_ids else ids
        text = "".join(self._text)
        return ReplyAlias.of(ids, text, self._render_reply(text)) if self._spells(ids, text) else None

    def cache_use(self, now: float) -> CacheUse:
        """What it found cached, and where its keys and values end: between two steps, before its sequence is closed."""
        usage = self._usage()
        pages = self.sequence if self.sequence is not None and self.sequence.page_ids else None
        return CacheUse(
            request_id=self.request_id,
            state="ended" if self.is_finished else "waiting" if pages is None else "running",
            num_prompt_tokens=usage.prompt_tokens,
            tokens_by_kind=usage.tokens_by_kind,
            num_generated=usage.completion_tokens,
            arrived_at=self.arrived_at,
            ended_at=now if self.is_finished else None,
            finish_reason=self._finish_reason,
            why_not_more=self._cache_match().why_not_more,
            mark=None if pages is None else PageMark.of(pages),
        )

    def completion(self, now: float) -> Completion:
        """The finished reply."""
        assert self._finish_reason is not None, "not finished"
        return Completion(
            text="".join(self._text),
            token_ids=self.token_ids,
            prompt_token_ids=tuple(self.prompt.ids),
            logprobs=None if self.params.logprobs is None else tuple(self._logprobs),
            finish_reason=self._finish_reason,
            usage=self._usage(),
            timings=self._timings(now),
            cache_match=self._cache_match(),
            stop_reason=self._stop_reason(),
            request_id=self.name,
            num_swallowed=self.num_swallowed,
        )

    def _longest(self, num_prompt_tokens: int, context_length: int) -> int:
        if self.params.max_tokens is None:
            return context_length
        return min(context_length, num_prompt_tokens + self.params.max_tokens)

    def _spells(self, ids: Iterable[int], text: str) -> bool:
        """Whether ids are `text` but for white space around it: special tokens and half characters are not in it."""
        if self.spelled is None:
            return False
        try:
            return b"".join(map(self.spelled().spell, ids)).decode().strip() == text.strip()
        except UnicodeDecodeError:
            return False

    def _advance(self, token_id: int) -> tuple[str, FinishReason | None]:
        """The text that the token releases, and whether it ends the reply."""
        if token_id in self._stop_ids:
            return self._flush(), "stop"
        text = self._push(self._decoder.push(token_id))
        if self._stops.matched is not None:
            return text, "stop"
        if self._constraint is not None and self._constraint.is_finished:
            return text + self._flush(), "stop"
        if len(self.admitted) == self._max_length:
            text += self._flush()
            return text, "length" if self._stops.matched is None else "stop"
        return text, None

    def _flush(self) -> str:
        """What decoder and stop strings still held back."""
        return self._push(self._decoder.finish()) + self._stops.finish()

    def _push(self, text: str) -> str:
        """What of the newest token's text can be sent."""
        return self._stops.push(text, may_stop=self.num_generated > self.params.min_tokens)

    def _stop_reason(self) -> StopReason | None:
        """What the request named, and ended the reply."""
        if self._finish_reason != "stop":
            return None
        if self._stops.matched is not None:
            return self._stops.matched
        last = self.admitted.token_ids[-1]
        return last if last in self._stop_ids - self._own_end_ids else None

    def _delta(
        self,
        text: str,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprob, ...] | None,
        reason: FinishReason | None,
    ) -> Delta:
        self._text.append(text)
        self._finish_reason = reason
        return Delta(text, token_ids, logprobs, reason, None if reason is None else self._stop_reason())

    def _usage(self) -> Usage:
        by_kind: Mapping[MatchKind, int] = self._match.tokens_by_kind if self._match else {}
        num_cached = sum(by_kind.values())
        disk_by_kind = {} if self.loaded is None else self.loaded.by_kind(by_kind, num_cached)
        disk_by_kind = _sum(disk_by_kind, self._loaded_later)
        return Usage(
            prompt_tokens=len(self.prompt.ids),
            completion_tokens=self.num_generated,
            cached_tokens=num_cached,
            tokens_by_kind={kind: count for kind, count in by_kind.items()},
            disk_tokens_by_kind={kind: count for kind, count in disk_by_kind.items()},
            pruning=self._pruning,
        )

    def _cache_match(self) -> CacheMatch:
        match = self._match
        if match is None:
            return CacheMatch(kind=None, num_cached_tokens=0, why_not_more=None)
        kinds = [kind for kind, count in match.tokens_by_kind.items() if count]
        return CacheMatch(
            kind=kinds[-1] if kinds else None,
            num_cached_tokens=match.num_tokens,
            why_not_more=self._explain(match.why_not_more),
        )

    def _timings(self, now: float) -> Timings:
        first, last = self._first_token_at, self._last_token_at
        speed = None
        if first is not None and last is not None and last > first:
            speed = (self.num_generated - 1) / (last - first)
        return Timings(
            time_to_first_token_s=None if first is None else first - self.arrived_at,
            decode_tokens_per_s=speed,
            total_s=now - self.arrived_at,
            queue_s=None if self._started_at is None else self._started_at - self.arrived_at,
        )


def _sum(left: Mapping[MatchKind, int], right: Mapping[MatchKind, int]) -> dict[MatchKind, int]:
    """Counts by kind, strongest first."""
    kinds: tuple[MatchKind, ...] = get_args(MatchKind)
    return {kind: count for kind in kinds if (count := left.get(kind, 0) + right.get(kind, 0))}
