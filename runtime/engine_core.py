"""Run requests step by step: schedule, compute, sample, commit.

One thread owns it; it starts none and never waits. Everything it works with is handed in, and a failure stays
with whom it concerns: one request, or the requests of one step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from .batch import Float32Array, Forward, make_batch
from .cache_uses import CacheUse
from .completion import Delta
from .errors import EngineError, InvalidParameter, OutOfPages, RadixLMError, StepFailed
from .kv_transaction import KVTransaction
from .prefix_cache import PrefixCache
from .request import Request, RequestLimits
from .request_output import RequestOutput
from .sampler import SampledToken, sample
from .scheduler import Scheduler, SchedulerPolicy
from .sequence import num_pages_for
from .step_plan import ScheduledRequest

_LOGGER = logging.getLogger(__name__)


@dataclass
class CoreCounters:
    """What was done since the start; prompt and cached tokens are those of finished requests.

    Counted by the thread of the core; any thread may read.
    """

    num_steps: int = 0
    num_finished: int = 0
    num_failed: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0


class EngineCore:
    """`add` requests, `step` until they are finished, `abort` those that nobody waits for any more.

    Args:
        forward: the model.
        cache: pages and prefixes, of this engine alone.
        limits: what a request must keep to. A context needs a page more than its tokens fill, because the
            rows of a
            page that is reused in part lie there twice for a moment.
        clock: seconds; only differences count.

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
        self._scheduler = Scheduler(cache, policy or SchedulerPolicy(), context_length=limits.context_length)

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return self._scheduler.has_work

    @property
    def num_waiting(self) -> int:
        """Requests that hold no pages."""
        return self._scheduler.num_waiting

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
        live = [request for request in self._scheduler.requests() if request.namespace == namespace]
        live.sort(key=lambda request: request.arrived_at, reverse=True)
        return [request.cache_use(self._clock()) for request in live]

    def add(self, request: Request) -> None:
        """Let a request wait for its turn.

        Raises:
            InvalidRequest: it cannot be served as it is, or its id is taken; nothing is changed.
        """
        self.limits.validate(request.prompt, request.params)
        if request.request_id in self._scheduler:
            raise InvalidParameter(f"request id {request.request_id!r} is in use; choose another")
        self._scheduler.add(request)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request where it is, with finish reason `cancelled`; None if it has ended already."""
        if request_id not in self._scheduler:
            return None
        request = self._scheduler.remove(request_id)
        try:
            delta = request.cancel()
        except Exception as error:
            return self._fail(request, _internal_error(request, error))
        return self._finish(request, delta)

    def step(self) -> list[RequestOutput]:
        """Compute one batch, and return what is new; empty if nobody has a token yet, or nothing is to be
        done.
        """
        with self._cache.begin() as step:
            plan = self._scheduler.schedule(step, self._clock())
            scheduled = plan.scheduled
            try:
                sampled = self._compute(step, scheduled)
            except Exception as error:
                _LOGGER.exception("step %d failed", self.counters.num_steps)
                step.rollback()
                return self._fail_step(scheduled, error)
            damaged = [item for item, token in sampled if token is None]
            for item in damaged:
                step.drop(item.reservation.sequence)  # what came out of it must not be reused
            step.commit()
        self.counters.num_steps += 1
        now = self._clock()
        outputs = [self._accept(item.request, token, now) for item, token in sampled if token is not None]
        outputs += [self._fail_damaged(item.request) for item in damaged]
        if damaged:
            self._cache.clear()  # the numbers may have been wrong in earlier pages already
        if plan.unservable is not None:
            outputs.append(self._fail_unservable(plan.unservable))
        return outputs

    def check(self) -> None:
        """Raise AssertionError unless queues, sequences, pages and tree agree; between steps only."""
        self._scheduler.check()
        self._cache.check()
        sequences = [request.sequence for request in self._scheduler.requests() if request.sequence]
        assert self._cache.stats().num_sequences == len(sequences), "a sequence belongs to no request"
        for sequence in sequences:
            assert self._cache.get(sequence.seq_id) is sequence

    # One step.

    def _compute(
        self, step: KVTransaction, scheduled: list[ScheduledRequest]
    ) -> list[tuple[ScheduledRequest, SampledToken | None]]:
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

    def _check_logits(self, logits: Float32Array, num_rows: int) -> None:
        if logits.shape[0] != num_rows or logits.shape[1] < self.limits.vocab_size:
            raise EngineError(
                f"the model returned logits of shape {logits.shape}, not "
                f"{(num_rows, self.limits.vocab_size)}; compile the model again"
            )

    def _accept(self, request: Request, token: SampledToken, now: float) -> RequestOutput:
        try:
            delta = request.accept(token, now)
        except Exception as error:
            self._scheduler.remove(request.request_id)
            return self._fail(request, _internal_error(request, error))
        self.counters.num_generated_tokens += 1
        if delta.finish_reason is None:
            return RequestOutput(request.request_id, delta)
        self._scheduler.remove(request.request_id)
        return self._finish(request, delta)

    def _finish(self, request: Request, delta: Delta) -> RequestOutput:
        """Close the sequence of a request that left the scheduler; what it computed stays cached."""
        self._cache.uses.record(request.namespace, request.cache_use(self._clock()))
        if request.sequence is not None:
            self._cache.close(request.sequence)
            alias = request.alias()
            if alias is not None:
                self._cache.aliases.record(request.namespace, request.prompt.ids, alias)
        completion = request.completion(self._clock())
        self.counters.num_finished += 1
        self.counters.num_prompt_tokens += completion.usage.prompt_tokens
        self.counters.num_cached_tokens += completion.usage.cached_tokens
        return RequestOutput(request.request_id, delta, completion)

    # Failures.

    def _fail(self, request: Request, error: RadixLMError) -> RequestOutput:
        """Close the sequence of a request that left the scheduler, and keep nothing that is not shared
        already.
        """
        if request.sequence is not None:
            self._cache.close(request.sequence, keep=False)
        self.counters.num_failed += 1
        return RequestOutput(request.request_id, error=error)

    def _fail_step(self, scheduled: list[ScheduledRequest], error: Exception) -> list[RequestOutput]:
        outputs = []
        for item in scheduled:
            request = self._scheduler.remove(item.request.request_id)
            failure = StepFailed(
                f"the step of {len(scheduled)} requests failed: {type(error).__name__}: {error}; try again"
            )
            failure.__cause__ = error
            outputs.append(self._fail(request, failure))
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
    _LOGGER.error("%r failed", request, exc_info=error)
    if isinstance(error, RadixLMError):
        return error
    failure = EngineError(f"the request failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
