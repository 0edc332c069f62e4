"""One request from prompt to completion: its specification, its reply, and what it reused.

The token list and the KV belong to its `Sequence`. Knows nothing of other requests, pages or threads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..cache.cache_uses import CacheUse, PageMark
from ..cache.prefix_match import PrefixMatch
from ..cache.sequence import Sequence
from ..cache.why_not_more import MatchKind, WhyNotMore
from ..prefix.expected_prompts import ExpectedPrompt
from ..speculation.draft import MAX_AGAIN, Draft
from ..speculation.drafter import Drafter
from .completion import CacheMatch, Completion, Delta, PrefillProgress, PrefixReuse, Timings
from .reply import Reply
from .request_options import RequestSpec
from .step.prompt_logprobs import PromptLogprobsReader
from .step.readers import Reader, ReplySampler


class Request:
    """A request that is queued, running or finished.

    Attributes:
        spec: what the caller requested.
        prompt: the prompt that is computed: the spec's, or the ids that were found cached once the request is admitted.
        is_idle: whether it is computed only while there is no other request.
        adapter_index: the place of its LoRA adapter; `NO_ADAPTER` if it has none.
        reply: the reply so far.
        reuse: the part of the prompt that was not computed.
        sampler: gives the reply its tokens.
        readers: readers of the rows of its logits; the last one is the sampler.
        sequence: tokens and KV; None until the scheduler admits the request.
        drafter: drafts tokens of the reply; None: nothing has been drafted so far.
        num_drafted: number of draft tokens.
        cannot_draft: whether drafting for it failed, so that it is not tried again.
    """

    def __init__(self, spec: RequestSpec, reply: Reply) -> None:
        self.spec, self.reply, self.reuse = spec, reply, PrefixReuse()
        self.request_id, self.namespace = spec.request_id, spec.namespace
        self.client, self.is_idle = spec.options.turn_of, spec.options.idle
        self.adapter_index = spec.options.adapter_index
        self.prompt = spec.prompt
        self.sampler = ReplySampler(reply)
        self.readers = (*_readers_of(spec), self.sampler)
        if (num_reusable := self.num_reusable) is not None:
            self.prompt = replace(spec.prompt, num_match=min(num_reusable, spec.prompt.num_match))
        self.sequence: Sequence | None = None
        self.num_preemptions = 0
        self.drafter: Drafter | None = None
        self.num_drafted = 0
        self.cannot_draft = False
        self._has_sent_readings = False
        self._max_length = 0  # of the sequence, known once it is admitted
        self._started_at: float | None = None

    def __repr__(self) -> str:
        name = repr(self.request_id)
        if self.spec.name != self.request_id:
            name += f" = {self.spec.name!r}"
        return f"Request({name}, {len(self.prompt.ids)} + {self.num_generated} tokens)"

    @property
    def admitted(self) -> Sequence:
        """The sequence of an admitted request."""
        assert self.sequence is not None, f"request {self.request_id} was never admitted"
        return self.sequence

    @property
    def num_generated(self) -> int:
        """Number of tokens of the reply so far."""
        return len(self.reply.token_ids)

    @property
    def num_swallowed(self) -> int:
        """Number of characters that the reply's ids spell first, and that end the prompt's text.

        Those of a healed token, or one for a space.
        """
        return len(self.prompt.healed.decode(errors="replace")) or int(self.prompt.space_id is not None)

    @property
    def is_finished(self) -> bool:
        """Return whether the reply has ended."""
        return self.reply.finish_reason is not None

    @property
    def num_reusable(self) -> int | None:
        """The most first tokens that can be taken from the cache: readers need the rows of those after them. None: any
        number."""
        numbers = [number for reader in self.readers if (number := reader.num_reusable) is not None]
        return min(numbers, default=None)

    def num_logits(self, num_tokens: int) -> int:
        """Return the number of last tokens whose logits readers want, if the next `num_tokens` are computed."""
        sequence = self.admitted
        start, length = sequence.num_computed, len(sequence)
        stop = start + num_tokens
        first = stop
        for reader in self.readers:
            wanted = reader.wanted(start, stop, length)
            if wanted and wanted.start < first:
                first = wanted.start
        return stop - first

    def admit(self, sequence: Sequence, match: PrefixMatch, reuse: PrefixReuse) -> None:
        """Take a sequence that was opened for a match of the prompt, and a record of what it reuses."""
        assert self.sequence is None, "admitted twice"
        self.sequence, self.reuse = sequence, reuse
        if tuple(self.prompt.ids) != match.prompt_ids:
            self.reply.follow(match.prompt_ids)
        self.prompt = replace(self.prompt, ids=match.prompt_ids, num_match=match.num_match)
        self._max_length = self._longest(len(self.prompt.ids), sequence.context_length)
        self.sampler.max_tokens = self._max_length - len(self.prompt.ids)

    def max_length_of(self, num_prompt_tokens: int, context_length: int) -> int:
        """Return the most tokens that its sequence can have; before admission, for a prompt of `num_prompt_tokens`."""
        return self._longest(num_prompt_tokens, context_length) if self.sequence is None else self._max_length

    def start(self, now: float) -> float | None:
        """Record a step that it takes part in. Return the seconds until the first one, None for later ones."""
        if self._started_at is not None:
            return None
        self._started_at = now
        return now - self.spec.arrived_at

    def progress(self, now: float) -> PrefillProgress:
        """Return the prefill progress of its prompt; it must have started."""
        assert self._started_at is not None, f"request {self.request_id} never started"
        num_prompt_tokens = len(self.prompt.ids)
        return PrefillProgress(
            num_prompt_tokens=num_prompt_tokens,
            num_cached_tokens=self.reuse.num_tokens,
            num_processed_tokens=min(self.admitted.num_computed, num_prompt_tokens),
            elapsed_s=now - self._started_at,
        )

    def preempted(self) -> None:
        """Record a preemption, which also drops offered rows: what is computed from now on is exact.

        If nothing was generated so far, the whole reply is exact.
        """
        self.num_preemptions += 1
        if self.num_generated == 0:
            self.reuse = replace(self.reuse, pruning=None)

    def count_loaded(self, by_kind: Mapping[MatchKind, int], why_not_more: WhyNotMore) -> None:
        """Record prompt tokens that were loaded from disk after admission, and why there were no more."""
        assert self.sequence is not None, f"request {self.request_id} was never admitted"
        self.reuse = self.reuse.with_loaded(by_kind, why_not_more)

    def with_readings(self, delta: Delta) -> Delta:
        """Return a delta of its reply; the first one gets the readings of the other readers."""
        if len(self.readers) == 1 or self._has_sent_readings or delta.is_empty:
            return delta
        self._has_sent_readings = True
        return replace(delta, readings=self._readings)

    def drop_taken_back(self, *, has_no_next: bool = False) -> None:
        """Remove the tokens that the reply has taken back from the sequence, with their KV.

        The token before them must be computed once more, because its logits are needed again, unless the reply ended.
        So must the last one, if none was taken back and it `has_no_next` token yet.
        """
        sequence = self.admitted
        number = len(sequence) - len(self.prompt.ids) - self.num_generated
        if number < 0 or (number == 0 and (self.is_finished or not has_no_next)):
            return
        if self.is_finished:
            sequence.pop(number)
            return
        last = len(sequence) - number - 1
        token_id, is_generated = sequence.token_ids[last], bool(sequence.generated[last])
        sequence.pop(number + 1)
        sequence.append((token_id,), generated=is_generated)
        self.drafter = None  # it has read the removed tokens

    @property
    def num_certain(self) -> int | None:
        """Number of tokens of its sequence that are never taken back; None: none is ever taken back."""
        number = self.reply.num_certain
        return None if number is None else len(self.prompt.ids) + number

    def drafted(self, draft: Draft, num_right: int) -> None:
        """Record how many tokens of a draft were accepted."""
        assert self.drafter is not None, "there is a draft, and no drafter"
        self.drafter.observe(draft, num_right)
        self.num_drafted += len(draft.token_ids)

    @property
    def may_draft(self) -> bool:
        """Return whether tokens can be drafted: the reply has begun, and all of it is exact."""
        return (
            bool(self.num_generated)
            and self.spec.options.speculate
            and not self.cannot_draft
            and len(self.readers) == 1  # the rows of a draft are the sampler's alone
            and self.reuse.pruning is None
            and self.admitted.num_recomputed <= MAX_AGAIN
        )

    @property
    def num_left(self) -> int:
        """Number of tokens that the reply can still have."""
        return self._max_length - len(self.admitted)

    def next_prompt(self) -> ExpectedPrompt | None:
        """Return the expected prompt that follows the finished reply; None if it is unknown."""
        expects = self.spec.expects
        if expects is None or self.namespace is None or self.reuse.pruning is not None or not self.num_generated:
            return None
        return expects(self.reply.text, self.reply.thought)

    def cache_use(self, now: float) -> CacheUse:
        """Return a record of what it reused and where its KV is: between two steps, before its sequence is closed."""
        pages = self.sequence if self.sequence is not None and self.sequence.page_ids else None
        return CacheUse(
            request_id=self.request_id,
            state="ended" if self.is_finished else "waiting" if pages is None else "running",
            num_prompt_tokens=len(self.prompt.ids),
            tokens_by_kind={kind: count for kind, count in self.reuse.tokens_by_kind.items()},
            num_generated=self.num_generated,
            arrived_at=self.spec.arrived_at,
            ended_at=now if self.is_finished else None,
            finish_reason=self.reply.finish_reason,
            why_not_more=self._cache_match().why_not_more,
            mark=None if pages is None else PageMark.of(pages),
        )

    def completion(self, now: float) -> Completion:
        """Return the completion of the finished reply."""
        reply = self.reply
        assert reply.finish_reason is not None, "not finished"
        return Completion(
            text=reply.text,
            token_ids=tuple(reply.token_ids),
            prompt_token_ids=tuple(self.prompt.ids),
            logprobs=None if self.spec.params.logprobs is None else tuple(reply.logprobs),
            finish_reason=reply.finish_reason,
            usage=replace(
                self.reuse.usage(len(self.prompt.ids), self.num_generated),
                drafted_tokens=self.num_drafted,
                accepted_tokens=reply.num_accepted_drafts,
                thought_tokens=reply.num_thought_tokens,
            ),
            timings=self._timings(now),
            cache_match=self._cache_match(),
            stop_reason=reply.stop_reason,
            request_id=self.spec.name,
            num_swallowed=self.num_swallowed,
            thought=reply.thought,
            readings=self._readings,
        )

    @property
    def _readings(self) -> tuple[object, ...]:
        return tuple(reading for reader in self.readers if (reading := reader.reading) is not None)

    def _longest(self, num_prompt_tokens: int, context_length: int) -> int:
        max_tokens = self.spec.params.max_tokens
        return context_length if max_tokens is None else min(context_length, num_prompt_tokens + max_tokens)

    def _cache_match(self) -> CacheMatch:
        why = self.reuse.why_not_more
        return self.reuse.cache_match(None if why is None else self.spec.explain(why))

    def _timings(self, now: float) -> Timings:
        """Return the timings of the finished reply; `now` is its end."""
        arrived_at, first_token_at = self.spec.arrived_at, self.reply.first_token_at
        return Timings(
            time_to_first_token_s=None if first_token_at is None else first_token_at - arrived_at,
            decode_tokens_per_s=self.reply.tokens_per_s,
            total_s=now - arrived_at,
            queue_s=None if self._started_at is None else self._started_at - arrived_at,
        )


def _readers_of(spec: RequestSpec) -> list[Reader]:
    """Return the readers of a request's rows besides the sampler: logprobs of its prompt, and the spec's own reader."""
    num_top = spec.params.prompt_logprobs
    readers: list[Reader] = [] if num_top is None else [PromptLogprobsReader(spec.prompt.ids, num_top)]
    return readers if spec.reads is None else [*readers, spec.reads()]
