"""Run requests step by step: schedule, compute, sample, commit.

One thread owns it; it starts none and never waits. Everything it works with is handed in, and a failure stays
with whom it concerns: one request, or the requests of one step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

import numpy as np

from .batch import Batch, Float32Array, Forward, make_batch
from .cache_tree import CacheCleared
from .cache_uses import CacheUse
from .completion import Delta
from .core_counters import CoreCounters
from .disk_tier import DiskTier
from .errors import EngineError, InvalidParameter, InvalidRequest, OutOfPages, RadixLMError, StepFailed
from .kv_transaction import KVTransaction
from .manifest import PAGE_SIZE
from .prefix_cache import PrefixCache
from .request import Request, RequestLimits
from .request_output import RequestOutput
from .sampler import Refusal, Sampled, SampledToken, sample
from .scheduler import RequestBroken, Scheduler, SchedulerPolicy, find_prefix
from .sequence import num_pages_for
from .step_plan import ScheduledRequest, StepPlan

_LOGGER = logging.getLogger(__name__)

_PREFILL_PER_DECODE = 16  # tokens of prompts beside each of a reply, for a step to measure prefill
_MEASURED_TOKENS = 64


class EngineCore:
    """`add` requests, `step` until they are finished, `abort` those that nobody waits for any more.

    Args:
        forward: the model.
        cache: pages and prefixes, of this engine alone.
        limits: what a request must keep to. A context needs a page more than its tokens fill, because the
            rows of a
            page that is reused in part lie there twice for a moment.
        clock: seconds; only differences count.
        tier: what keeps pages on disk, if anything does; a request that it loads for waits outside of the queues.

    Raises:
        InvalidParameter: the cache is too small for the context length.
    """

    def __init__(
        self,
        forward: Forward,
        cache: PrefixCache,
        limits: RequestLimits,
        *,
        policy: SchedulerPolicy | None = None,
        clock: Callable[[], float],
        tier: DiskTier | None = None,
    ) -> None:
        num_needed = num_pages_for(limits.context_length) + 1
        if num_needed > cache.pool.num_pages:
            raise InvalidParameter(
                f"a context of {limits.context_length} tokens needs {num_needed} pages, the pool has "
                f"{cache.pool.num_pages}; raise --kv-cache-gb or lower the context length"
            )
        self.limits = limits
        self.counters = CoreCounters()
        self._forward = forward
        self._cache = cache
        self._clock = clock
        self._tier = tier
        self._loading: dict[str, Request] = {}  # by id
        self._scheduler = Scheduler(cache, policy or SchedulerPolicy(), context_length=limits.context_length)

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything; without it there may still be requests that wait for the disk."""
        return self._scheduler.has_work or (self._tier is not None and self._tier.is_ready)

    @property
    def wait_s(self) -> float | None:
        """Without work: seconds until there is some again in any case; None: there may never be."""
        return None if self._tier is None else self._tier.wait_s

    @property
    def tier(self) -> DiskTier | None:
        """What keeps pages on disk."""
        return self._tier

    @property
    def num_waiting(self) -> int:
        """Requests that hold no pages."""
        return self._scheduler.num_waiting + len(self._loading)

    @property
    def num_running(self) -> int:
        """Requests that take part in steps."""
        return self._scheduler.num_running

    @property
    def num_preemptions(self) -> int:
        """How often a request had to give its pages back."""
        return self._scheduler.num_preemptions

    @property
    def cache(self) -> PrefixCache:
        """Pages and prefixes."""
        return self._cache

    def live_uses(self, namespace: bytes) -> list[CacheUse]:
        """What the namespace's requests use now, the newest first; between two steps."""
        everybody = [*self._scheduler.requests(), *self._loading.values()]
        live = [request for request in everybody if request.namespace == namespace]
        live.sort(key=lambda request: request.arrived_at, reverse=True)
        return [request.cache_use(self._clock()) for request in live]

    def forget(self, namespace: bytes) -> tuple[CacheCleared, Future[None]]:
        """Forget a namespace in memory and on disk; the second comes when nothing of it is on disk any more."""
        cleared = CacheCleared.of(self._cache, namespace)
        if self._tier is None:
            done: Future[None] = Future()
            done.set_result(None)
            return cleared, done
        num_discarded, done = self._tier.discard(namespace)
        return replace(cleared, num_discarded_pages=num_discarded), done

    def measure_prefill(self, max_num_tokens: int) -> None:
        """Compute a few tokens of nobody's, at the beginning of a context and far behind it, so that the first load can
        be weighed against computing. Only while nothing is cached: free pages are written to.
        """
        num_pages = min(self.limits.context_length // PAGE_SIZE, self._cache.pool.num_pages)
        num_tokens = min(_MEASURED_TOKENS, max_num_tokens, num_pages * PAGE_SIZE)
        try:
            assert self._cache.pool.num_free == self._cache.pool.num_pages
            self._measure(0, num_tokens)  # what is computed first takes longer
            for start in (0, num_pages * PAGE_SIZE - num_tokens):
                seconds = self._measure(start, num_tokens)
                if self._tier is not None:
                    self._tier.planner.observe_compute(
                        num_tokens=num_tokens, position=start + num_tokens / 2, seconds=seconds
                    )
        except Exception:  # whatever it is, requests will meet it and say so
            _LOGGER.exception("prefill could not be measured")

    def add(self, request: Request) -> None:
        """Let a request wait for its turn.

        Raises:
            InvalidRequest: it cannot be served as it is, or its id is taken; nothing is changed.
        """
        self.limits.validate(request.prompt, request.params)
        if request.request_id in self._scheduler or request.request_id in self._loading:
            raise InvalidParameter(f"request id {request.request_id!r} is in use; choose another")
        if self._begin_load(request):
            self._loading[request.request_id] = request
        else:
            self._scheduler.add(request)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request where it is, with finish reason `cancelled`; None if it has ended already."""
        if request_id in self._loading:
            request = self._loading.pop(request_id)
            if self._tier is not None:
                self._tier.abandon(request_id)
        elif request_id in self._scheduler:
            request = self._scheduler.remove(request_id)
        else:
            return None
        try:
            delta = request.cancel()
        except Exception as error:
            return self._fail(request, _internal_error(request, error))
        return self._finish(request, delta)

    def step(self) -> list[RequestOutput]:
        """Compute one batch, and return what is new; empty if nobody has a token yet, or nothing is to be
        done.
        """
        self._advance_tier()
        if not self._scheduler.has_work:
            return []
        with self._cache.begin() as step:
            try:
                plan = self._scheduler.schedule(step, self._clock())
            except RequestBroken as broken:
                step.rollback()
                self._scheduler.remove(broken.request.request_id)
                cause = broken.__cause__ if isinstance(broken.__cause__, Exception) else broken
                return [self._fail(broken.request, _internal_error(broken.request, cause))]
            except Exception as error:
                return self._fail_step(step, self._scheduler.requests(), error)
            scheduled = plan.scheduled
            begun = self._clock()
            try:
                sampled = self._compute(step, scheduled)
                damaged = [item for item, token in sampled if token is None]
                for item in damaged:
                    step.drop(item.reservation.sequence)  # what came out of it must not be reused
                step.commit()
            except Exception as error:
                return self._fail_step(step, [item.request for item in scheduled], error)
        self.counters.count_step(sum(item.reservation.num_tokens for item in scheduled))
        self._observe(scheduled, self._clock() - begun)
        return self._hand_out(plan, sampled)

    def check(self) -> None:
        """Raise AssertionError unless queues, sequences, pages and tree agree; between steps only."""
        self._scheduler.check()
        self._cache.check()
        sequences = [request.sequence for request in self._scheduler.requests() if request.sequence]
        assert self._cache.stats().num_sequences == len(sequences), "a sequence belongs to no request"
        for sequence in sequences:
            assert self._cache.get(sequence.seq_id) is sequence
        for request in self._loading.values():
            assert request.sequence is None, f"{request!r} waits for the disk and has a sequence"
        if self._tier is not None:
            self._tier.check()

    # The disk.

    def _begin_load(self, request: Request) -> bool:
        """Whether the request is to wait for what the disk has of its prompt."""
        if self._tier is None:
            return False
        context_length = self.limits.context_length
        return self._tier.begin(request.request_id, lambda cache: find_prefix(cache, request, context_length))

    def _advance_tier(self) -> None:
        """Let those go on that waited for the disk, whatever became of it."""
        if self._tier is None:
            return
        try:
            names = self._tier.advance()
        except Exception:
            _LOGGER.exception("loading from the store failed")
            names = self._tier.give_up()
        for name in names:
            request = self._loading.pop(name)
            request.loaded = self._tier.loaded(name)
            self._scheduler.add(request)

    def _measure(self, start: int, num_tokens: int) -> float:
        """Seconds of a step that computes the tokens `[start, start + num_tokens)` of a context of zeros."""
        positions = np.arange(start, start + num_tokens, dtype=np.int32)
        pages = np.arange(-(-(start + num_tokens) // PAGE_SIZE), dtype=np.int32)
        zeros, nothing = np.zeros(num_tokens, np.int32), np.zeros(0, np.int32)
        batch = Batch(zeros, positions, positions, zeros, pages[None], positions + np.int32(1), nothing)
        begun = self._clock()
        self._forward.forward(batch)
        return self._clock() - begun

    def _distrust(self, damaged: list[Request]) -> None:
        """Take off the disk what requests whose numbers went wrong have reused and computed."""
        for request in damaged:
            if self._tier is not None:
                self._tier.distrust(request.namespace, request.admitted.token_ids)

    def _observe(self, scheduled: list[ScheduledRequest], seconds: float) -> None:
        """Tell who decides on loads how long a step of prompts took; decode costs more a token and is no measure."""
        prefill = [item.reservation for item in scheduled if item.reservation.num_tokens > 1]
        num_tokens = sum(reservation.num_tokens for reservation in prefill)
        if self._tier is None or num_tokens < _PREFILL_PER_DECODE * (len(scheduled) - len(prefill)) or not num_tokens:
            return
        positions = sum(item.num_tokens * (item.start + item.stop) / 2 for item in prefill)
        self._tier.planner.observe_compute(num_tokens=num_tokens, position=positions / num_tokens, seconds=seconds)

    def _save(self, request: Request) -> None:
        """Keep what is computed of a request on disk, too."""
        sequence = request.sequence
        if self._tier is not None and sequence is not None:
            num_tokens = sequence.num_computed
            self._tier.save(sequence.namespace, sequence.token_ids[:num_tokens], sequence.generated[:num_tokens])

    # One step.

    def _compute(
        self, step: KVTransaction, scheduled: list[ScheduledRequest]
    ) -> list[tuple[ScheduledRequest, Sampled]]:
        """Run the model, and sample for those whose prompt ends in this step."""
        if not scheduled:
            return []
        if step.copies:
            self._forward.copy_rows(step.copies)
        sampling = [item for item in scheduled if item.wants_logits]
        wants_logits = [item.wants_logits for item in scheduled]
        logits = self._forward.forward(make_batch([item.reservation for item in scheduled], wants_logits))
        self._check_logits(logits, len(sampling))
        if not sampling:
            return []
        # a padded embedding has rows that are no token: they are never sampled
        vocab_size = self.limits.vocab_size
        top = self._forward.top_logits(len(sampling), vocab_size)
        tokens = sample(logits[:, :vocab_size], top, [item.request.sampler for item in sampling])
        return list(zip(sampling, tokens, strict=True))

    def _hand_out(self, plan: StepPlan, sampled: list[tuple[ScheduledRequest, Sampled]]) -> list[RequestOutput]:
        """Give each request its token, and say of those that cannot go on why."""
        now = self._clock()
        outputs = [self._accept(item.request, token, now) for item, token in sampled if token is not None]
        damaged = [item.request for item, token in sampled if token is None]
        outputs += [self._fail_damaged(request) for request in damaged]
        if damaged:
            self._cache.clear()  # the numbers may have been wrong in earlier pages already
            self._distrust(damaged)
        if plan.unservable is not None:
            outputs.append(self._fail_unservable(plan.unservable))
        return outputs

    def _check_logits(self, logits: Float32Array, num_rows: int) -> None:
        if logits.shape[0] != num_rows or logits.shape[1] < self.limits.vocab_size:
            raise EngineError(
                f"the model returned logits of shape {logits.shape}, not "
                f"{(num_rows, self.limits.vocab_size)}; compile the model again"
            )

    def _accept(self, request: Request, token: SampledToken | Refusal, now: float) -> RequestOutput:
        before = request.last_token_at
        try:
            delta = request.accept(token, now)
        except Exception as error:
            self._scheduler.remove(request.request_id)
            return self._fail(request, _internal_error(request, error))
        self.counters.count_token(now, request.arrived_at, before)
        if delta.finish_reason is None:
            if before is None:
                self._save(request)
            return RequestOutput(request.request_id, delta)
        self._scheduler.remove(request.request_id)
        return self._finish(request, delta)

    def _finish(self, request: Request, delta: Delta) -> RequestOutput:
        """Close the sequence of a request that left the scheduler; what it computed stays cached."""
        try:
            completion = request.completion(self._clock())
            alias = request.alias() if request.sequence is not None else None
            self._cache.uses.record(request.namespace, request.cache_use(self._clock()))
            if request.sequence is not None:
                self._save(request)
                self._cache.close(request.sequence)
            if alias is not None:
                self._cache.aliases.record(request.namespace, request.prompt.ids, alias)
        except Exception as error:
            return self._fail(request, _internal_error(request, error))
        was_admitted = request.sequence is not None
        reason, total_s = completion.finish_reason, completion.timings.total_s
        self.counters.count_finished(completion.usage, reason, total_s, was_admitted=was_admitted)
        return RequestOutput(request.request_id, delta, completion)

    # Failures.

    def _fail(self, request: Request, error: RadixLMError) -> RequestOutput:
        """Close the sequence of a request that left the scheduler, and keep nothing that is not shared
        already.
        """
        if request.sequence is not None and not request.sequence.is_closed:
            self._cache.close(request.sequence, keep=False)
        self.counters.count_failed(error)
        return RequestOutput(request.request_id, error=error)

    def _fail_step(self, step: KVTransaction, requests: list[Request], error: Exception) -> list[RequestOutput]:
        """Fail those whose step raised; the others go on, unless pages or queues were left in disorder."""
        _LOGGER.error("step %d failed", self.counters.num_steps, exc_info=error)
        self.counters.count_failed_step(error)
        message = f"the step of {len(requests)} requests failed: {type(error).__name__}: {error}; try again"
        outputs: list[RequestOutput] = []
        try:
            step.rollback()
            for request in requests:
                self._scheduler.remove(request.request_id)
                outputs.append(self._fail(request, _caused(StepFailed(message), error)))
            self.check()
        except Exception as disorder:
            step.abandon()
            told = {output.request_id for output in outputs}
            outputs += self._start_over([request for request in requests if request.request_id not in told], disorder)
        return outputs

    def _start_over(self, requests: list[Request], disorder: Exception) -> list[RequestOutput]:
        """Fail `requests` and all that hold pages, and forget what is cached: nobody knows what is in it."""
        _LOGGER.critical("pages are in disorder: the cache starts over", exc_info=disorder)
        left = {request.request_id: request for request in requests}
        left |= {request.request_id: request for request in self._scheduler.requests() if request.sequence is not None}
        self._cache.start_over()
        outputs = []
        for request_id, request in left.items():
            if request_id in self._scheduler:
                self._scheduler.remove(request_id)
            failure = StepFailed("a step failed and left no page sure; the cache starts over; try again")
            self.counters.count_failed(failure)
            outputs.append(RequestOutput(request_id, error=_caused(failure, disorder)))
            request.sequence = None
        return outputs

    def _fail_damaged(self, request: Request) -> RequestOutput:
        self._scheduler.remove(request.request_id)
        return self._fail(
            request,
            EngineError(
                f"the model returned logits that are not finite after {len(request.admitted)} tokens; cached "
                f"prefixes were dropped; try again, and if it stays so, compile the model again"
            ),
        )

    def _fail_unservable(self, request: Request) -> RequestOutput:
        self._scheduler.remove(request.request_id)
        return self._fail(
            request,
            OutOfPages(
                f"{request!r} does not fit the pool of {self._cache.pool.num_pages} pages even alone; "
                f"raise --kv-cache-gb"
            ),
        )


def _internal_error(request: Request, error: Exception) -> RadixLMError:
    """An error that clients may see; ours stays as it is."""
    if isinstance(error, InvalidRequest):  # a constraint of the client's that cannot be followed any further
        return error
    _LOGGER.error("%r failed", request, exc_info=error)
    if isinstance(error, RadixLMError):
        return error
    return _caused(EngineError(f"the request failed: {type(error).__name__}: {error}"), error)


def _caused(failure: EngineError, cause: Exception) -> EngineError:
    """`raise failure from cause`, to be raised elsewhere."""
    failure.__cause__ = cause
    return failure
