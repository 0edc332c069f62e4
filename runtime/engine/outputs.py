"""Give requests the tokens that a step sampled, and end requests: with a completion, or with an error.

Closes the sequences of requests that end, and counts. Knows the queues, not what a step computes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from ..cache.kv_transaction import KVTransaction
from ..cache.prefix_cache import PrefixCache
from ..errors import EngineError, EngineOverloaded, InvalidRequest, OutOfPages, RadixLMError, StepFailed
from ..memory import Memories
from ..prefix.disk_tier import DiskTier
from ..prefix.expected_prompts import ExpectedPrompts
from .completion import Delta, RequestOutput
from .counters import CoreCounters
from .request import Request
from .scheduler import Scheduler
from .step.plan import ScheduledRequest, StepPlan
from .step.readers import Outcome

_LOGGER = logging.getLogger(__name__)


class OutputMaker:
    """Makes the outputs of requests; a request that ends has left the queues, unless stated otherwise.

    Args:
        clock: seconds; only differences count.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        cache: PrefixCache,
        memories: Memories,
        tier: DiskTier | None,
        counters: CoreCounters,
        expected: ExpectedPrompts | None,
        *,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler, self._cache, self._tier, self._counters = scheduler, cache, tier, counters
        self._memories, self._expected, self._clock = memories, expected, clock

    def hand_out(
        self,
        plan: StepPlan,
        outcomes: list[tuple[ScheduledRequest, Outcome]],
        *,
        check: Callable[[], None],
    ) -> list[RequestOutput]:
        """Give each request its tokens, and end those that cannot continue, with the reason.

        A request for which that raises fails alone, unless pages or queues become inconsistent: then `check` raises.
        """
        now = self._clock()
        outputs: list[RequestOutput] = []
        broken: list[Request] = []
        for item, outcome in outcomes:
            if outcome.is_damaged:
                continue
            try:
                outputs += self._outputs_of(item, outcome, now)
            except Exception as error:
                broken.append(item.request)
                if item.request.request_id in self._scheduler:
                    self._scheduler.remove(item.request.request_id)
                outputs.append(self._fail_broken(item.request, error))
        damaged = [item.request for item, outcome in outcomes if outcome.is_damaged]
        for request in damaged:
            self._scheduler.remove(request.request_id)
            outputs.append(self.fail_damaged(request))
        if damaged:
            self._cache.clear()  # the numbers may already have been wrong in earlier pages
            for request in damaged:
                if self._tier is not None and request.namespace is not None:  # else nothing of it was stored
                    self._tier.distrust(request.namespace, request.admitted.token_ids)
            self._scheduler.drop_loaded_rows()
        if plan.unservable is not None:
            self._scheduler.remove(plan.unservable.request_id)
            outputs.append(self.fail_unservable(plan.unservable))
        if broken:
            try:
                check()
            except Exception as disorder:
                outputs += self._start_over([], disorder)
        return [output for output in outputs if output.delta is None or not output.delta.is_empty]

    def _fail_broken(self, request: Request, error: Exception) -> RequestOutput:
        """End a request whose outputs could not be made, in whatever state its sequence is; return its last output."""
        try:
            return self.fail(request, error)
        except Exception:
            _LOGGER.exception("%r could not be closed", request)
            return RequestOutput(request.request_id, error=_visible_error(request, error))

    def _outputs_of(self, item: ScheduledRequest, outcome: Outcome, now: float) -> list[RequestOutput]:
        """Return the outputs of a request after a step, such as its deltas; the reply has the step's tokens already."""
        request = item.request
        if num_drafted := len(item.draft.token_ids):
            request.drafted(item.draft, outcome.num_right)
            self._counters.count_draft(num_drafted, outcome.num_right, outcome.num_accepted)
        before, outputs = outcome.before, []
        for each in outcome.deltas:
            delta = request.with_readings(each)
            outputs.append(RequestOutput(request.request_id, delta))
            for _ in delta.token_ids:
                self._counters.count_token(now, request.spec.arrived_at, before)
                before = now
        if outcome.error is not None:
            self._scheduler.remove(request.request_id)
            return [*outputs, self.fail(request, outcome.error)]
        if outcome.next_id is not None:
            request.admitted.append((outcome.next_id,))
        if outcome.is_first and self._tier is not None:
            self._tier.computed(request.admitted, num_reused=request.reuse.num_tokens)
        if request.is_finished:
            self._scheduler.remove(request.request_id)
            outputs[-1] = self.finish(request, delta)
        elif request.num_certain is not None:  # else it takes nothing back
            request.drop_taken_back(has_no_next=outcome.next_id is None)
            self._cache.settle(request.admitted, request.num_certain)
        return outputs

    def finish(self, request: Request, delta: Delta) -> RequestOutput:
        """End a request with its last delta; its KV stays cached."""
        try:
            completion = request.completion(self._clock())
            if request.sequence is not None and request.num_certain is not None:
                request.drop_taken_back()
                self._cache.settle(request.sequence, None)
            self._remember(request)
            if request.sequence is not None:
                if self._tier is not None:
                    self._tier.save_computed(request.sequence)
                self._cache.close(request.sequence)
        except Exception as error:
            return self.fail(request, error)
        self._abandon(request)
        was_admitted = request.sequence is not None
        reason, total_s = completion.finish_reason, completion.timings.total_s
        if self._expected is not None and reason != "cancelled" and (prompt := request.next_prompt()) is not None:
            self._expected.add(prompt)
        self._counters.count_finished(completion.usage, reason, total_s, was_admitted=was_admitted)
        return RequestOutput(request.request_id, delta, completion)

    def fail(self, request: Request, error: Exception) -> RequestOutput:
        """End a request with the error that it raised."""
        return self._fail(request, _visible_error(request, error))

    def refuse(self, request: Request, refusal: EngineOverloaded) -> RequestOutput:
        """End a request that never ran, because others need its room."""
        self._abandon(request)
        return RequestOutput(request.request_id, error=refusal)

    def fail_damaged(self, request: Request) -> RequestOutput:
        """End a request whose logits are not finite."""
        return self._fail(
            request,
            EngineError(
                f"the model returned logits that are not finite after {len(request.admitted)} tokens; cached "
                f"prefixes were dropped; try again, and if it stays so, compile the model again"
            ),
        )

    def fail_unservable(self, request: Request) -> RequestOutput:
        """End a request that does not fit the pool even alone."""
        return self._fail(
            request,
            OutOfPages(
                f"{request!r} does not fit the pool of {self._cache.pool.num_pages} pages even alone; "
                f"raise --kv-cache-gb"
            ),
        )

    def fail_step(
        self, step: KVTransaction, requests: list[Request], error: Exception, *, check: Callable[[], None]
    ) -> list[RequestOutput]:
        """Roll back a step that raised, and fail its `requests`, which are still queued.

        The others continue, unless pages or queues became inconsistent: then `check` raises, and the cache starts over.
        """
        _LOGGER.error("step %d failed, and with it %r", self._counters.num_steps, requests, exc_info=error)
        self._counters.count_failed_step(error)
        message = f"the step of {len(requests)} requests failed: {type(error).__name__}: {error}; try again"
        outputs: list[RequestOutput] = []
        try:
            step.rollback()
            for request in requests:
                self._scheduler.remove(request.request_id)
                outputs.append(self._fail(request, _caused(StepFailed(message), error)))
            check()
        except Exception as disorder:
            step.abandon()
            told = {output.request_id for output in outputs}
            outputs += self._start_over([request for request in requests if request.request_id not in told], disorder)
        return outputs

    def _start_over(self, requests: list[Request], disorder: Exception) -> list[RequestOutput]:
        """Fail `requests` and all that hold pages, and clear the cache: its content is unknown."""
        _LOGGER.critical("pages are in disorder: the cache starts over", exc_info=disorder)
        left = {request.request_id: request for request in requests}
        left |= {request.request_id: request for request in self._scheduler.requests() if request.sequence is not None}
        self._memories.start_over()
        outputs = []
        for request_id, request in left.items():
            if request_id in self._scheduler:
                self._scheduler.remove(request_id)
            failure = StepFailed("a step failed and left no page sure; the cache starts over; try again")
            self._counters.count_failed(failure)
            outputs.append(RequestOutput(request_id, error=_caused(failure, disorder)))
            request.sequence = None
            self._abandon(request)
        return outputs

    def _abandon(self, request: Request) -> None:
        """Stop loading anything for a request."""
        if self._tier is not None:
            self._tier.abandon(request.request_id)

    def _remember(self, request: Request) -> None:
        """Record what a request reused, and how later prompts may render its reply; nothing without a namespace."""
        if request.namespace is None:
            return
        self._cache.uses.record(request.namespace, request.cache_use(self._clock()))
        for alias in () if request.sequence is None else request.spec.aliases(request.reply):
            self._cache.aliases.record(request.namespace, request.prompt.ids, alias)

    def _fail(self, request: Request, failure: RadixLMError) -> RequestOutput:
        """End a request with an error: close its sequence, and keep only pages that are shared already."""
        if request.sequence is not None and not request.sequence.is_closed:
            self._cache.close(request.sequence, keep=False)
        self._abandon(request)
        self._counters.count_failed(failure)
        return RequestOutput(request.request_id, error=failure)


def _visible_error(request: Request, error: Exception) -> RadixLMError:
    """Log an error and return it as clients see it: ours unchanged, others as an EngineError that names their type."""
    if isinstance(error, InvalidRequest):  # the client's constraint cannot be followed any further
        return error
    _LOGGER.error("%r failed", request, exc_info=error)
    if isinstance(error, RadixLMError):
        return error
    return _caused(EngineError(f"the request failed: {type(error).__name__}; the log says more"), error)


def _caused(failure: EngineError, cause: Exception) -> EngineError:
    """Return `failure` with its cause set, like `raise failure from cause`, to be raised elsewhere."""
    failure.__cause__ = cause
    return failure
