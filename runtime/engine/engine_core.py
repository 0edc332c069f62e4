"""Run requests step by step: schedule, compute, sample, commit.

One thread owns it; it starts none and never waits. All its parts are passed in. A failure ends only the one request,
or the requests of the one step, that it concerns. `outputs.py` ends requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from ..cache.cache_tree import CachedText, CacheTree
from ..cache.cache_uses import CacheUse
from ..cache.page_pool import num_pages_for
from ..cache.prefix_cache import PrefixCache
from ..chat.tools.tool_calls import ToolCall
from ..errors import EngineOverloaded, InvalidParameter
from ..memory import ForgetResult, Memories
from ..model.batch import Forward
from ..prefix.disk_tier import DiskTier
from ..prefix.expected_prompts import ExpectedPrompts
from ..prefix.loaded_prefix import LoadedPrefix, LoadedRows, PrefixLookup
from ..prefix.prefill_measure import seconds_of_zeros
from ..prefix.small_record_saver import ReplyTokens
from ..speculation.draft_levels import DraftSource
from ..speculation.draft_model import DraftModel
from .completion import PrefillProgress, RequestOutput
from .counters import CoreCounters
from .engine_queue import WorkQueue
from .outputs import OutputMaker
from .request import Request
from .request_options import Client, RequestLimits
from .scheduler import Scheduler
from .step.plan import SchedulerPolicy
from .waiting_request import RequestBroken, find_prefix

_LOGGER = logging.getLogger(__name__)


class EngineCore:
    """Runs requests: `add` them, `step` until they are finished, `abort` those that no client waits for any more.

    Args:
        forward: the model.
        cache: pages and prefixes, of this engine alone.
        memories: everything that outlives requests: the cache, and the memories among the following.
        limits: what a request must satisfy. A context needs a page more than its tokens fill, because the
            rows of a partly reused page exist twice for a moment.
        clock: seconds; only differences count.
        tier: the disk tier, if there is a store; a request that waits for the disk is not in the scheduler.
        queue: closures that the tier runs between two steps; None: a private queue.
        expected: prompts that are likely to come, prefilled a piece per step while there is no request.
        draft_model: drafts tokens for speculative decoding; None: there is no draft model.
        mtp_head: drafts in its place; None: the model has no MTP head, or it is not used.
        store_off_because: why there is no tier, although a store was requested.

    Attributes:
        cache, memories, tier, queue, expected, draft_model, store_off_because: as passed in.
        on_progress: called with a request's id and prefill progress, within steps; must not raise.

    Raises:
        InvalidParameter: the cache is too small for the context length.
    """

    def __init__(
        self,
        forward: Forward,
        cache: PrefixCache,
        memories: Memories,
        limits: RequestLimits,
        *,
        policy: SchedulerPolicy | None = None,
        clock: Callable[[], float],
        tier: DiskTier | None = None,
        queue: WorkQueue | None = None,
        expected: ExpectedPrompts | None = None,
        draft_model: DraftModel | None = None,
        mtp_head: DraftSource | None = None,
        store_off_because: str | None = None,
    ) -> None:
        num_needed = num_pages_for(limits.context_length) + 1
        if num_needed > cache.pool.num_pages:
            raise InvalidParameter(
                f"a context of {limits.context_length} tokens needs {num_needed} pages, the pool has "
                f"{cache.pool.num_pages}; raise --kv-cache-gb or lower the context length"
            )
        self.limits = limits
        self.memories = memories
        self.counters = CoreCounters()
        self.on_progress: Callable[[str, PrefillProgress], None] = lambda request_id, progress: None
        self._forward = forward
        self.cache = cache
        self._clock = clock
        self.store_off_because = store_off_because
        self.tier, self.queue = tier, WorkQueue(clock=clock) if queue is None else queue
        self._loading: dict[str, Request] = {}  # requests that wait for the disk, by id
        self.draft_model = draft_model
        policy, context_length = policy or SchedulerPolicy(), limits.context_length
        self._scheduler = Scheduler(cache, policy, context_length=context_length, drafts=draft_model or mtp_head)
        self.expected = expected
        self._outputs = OutputMaker(self._scheduler, cache, memories, tier, self.counters, expected, clock=clock)

    @property
    def has_work(self) -> bool:
        """Return whether `step` has anything to do; if not, requests may still wait for the disk."""
        return self._scheduler.has_work or self.queue.wait_s == 0.0

    @property
    def wait_s(self) -> float | None:
        """Seconds until there is work, if no request comes; None if there will be none."""
        return self.queue.wait_s if self._idle_work is None else 0.0

    @property
    def num_waiting(self) -> int:
        """Number of requests without pages."""
        return self._scheduler.num_waiting + len(self._loading)

    @property
    def num_running(self) -> int:
        """Number of requests that take part in steps."""
        return self._scheduler.num_running

    @property
    def num_preemptions(self) -> int:
        """Number of preemptions: a request had to give its pages back."""
        return self._scheduler.num_preemptions

    def cache_tree(self, namespace: bytes) -> CacheTree:
        """Return the cached prefixes of a namespace; between two steps."""
        return CacheTree.of(self.cache, namespace, self._clock(), live=self.live_uses(namespace))

    def cached_text(self, namespace: bytes, node_id: int) -> CachedText | None:
        """Return the tokens of one run of `cache_tree`, None if it is gone; between two steps."""
        return CachedText.of(self.cache, namespace, node_id)

    def live_uses(self, namespace: bytes) -> list[CacheUse]:
        """Return the cache use of the namespace's current requests, newest first; between two steps."""
        requests = [*self._scheduler.requests(), *self._loading.values()]
        live = [request for request in requests if request.namespace == namespace]
        live.sort(key=lambda request: request.spec.arrived_at, reverse=True)
        return [request.cache_use(self._clock()) for request in live]

    def forget(self, namespace: bytes) -> ForgetResult:
        """Forget a namespace in memory and on disk."""
        self._scheduler.drop_loaded_rows(namespace)
        return self.memories.forget(namespace)

    def keep_call(self, namespace: bytes, call: ToolCall, made_by: ReplyTokens) -> None:
        """Save a tool call that a client received to the store, after its reply."""
        if self.tier is not None:
            self.tier.saver.keep_call(namespace, call, made_by)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            InvalidRequest: it can never be served, or its id is in use; nothing is changed.
        """
        self.limits.validate(request.prompt, request.spec.params)
        if request.request_id in self._scheduler or request.request_id in self._loading:
            raise InvalidParameter(f"request id {request.request_id!r} is in use; choose another")
        if self.tier is None or request.namespace is None or not self._waits_for(self.tier, request):
            self._scheduler.add(request)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request with finish reason `cancelled`; None if it has already ended."""
        if request_id in self._loading:
            request = self._loading.pop(request_id)
        elif request_id in self._scheduler:
            request = self._scheduler.remove(request_id)
        else:
            return None
        try:
            delta = request.reply.cancel()
        except Exception as error:
            return self._outputs.fail(request, error)
        return self._outputs.finish(request, delta)

    def refuse_newest(self, client: Client, refusal: EngineOverloaded) -> RequestOutput | None:
        """Refuse a client's newest request that never ran, to make room for another client; None if there is none."""
        waiting = [*self._scheduler.waiting_requests(), *self._loading.values()]
        own = [request for request in waiting if request.client == client]
        if not own:
            return None
        newest = max(reversed(own), key=lambda request: request.spec.arrived_at)
        if self._loading.pop(newest.request_id, None) is None:
            self._scheduler.remove(newest.request_id)
        return self._outputs.refuse(newest, refusal)

    def step(self) -> list[RequestOutput]:
        """Compute one batch and return the new outputs; empty if no request has a token yet, or if there is no work.

        Without any request, prefill a piece of an expected prompt.
        """
        self.queue.run()
        if not self._scheduler.has_work:
            self._step_idle()
            return []
        stops = None if self.tier is None else self.tier.loader.before_step()
        with self.cache.begin() as step:
            try:
                plan = self._scheduler.schedule(step, self._clock(), stops)
            except RequestBroken as broken:
                step.rollback()
                self._scheduler.remove(broken.request.request_id)
                cause = broken.__cause__ if isinstance(broken.__cause__, Exception) else broken
                return [self._outputs.fail(broken.request, cause)]
            except Exception as error:
                return self._outputs.fail_step(step, self._scheduler.requests(), error, check=self.check)
            scheduled = plan.scheduled
            begun = self._clock()
            prefilling = [item.request for item in scheduled if not item.request.num_generated]
            self._start(prefilling, begun)
            try:
                outcomes = plan.compute(self._forward, num_outputs=self.limits.num_outputs, clock=self._clock)
                for item, outcome in outcomes:
                    if outcome.is_damaged:
                        step.drop(item.reservation.sequence)  # its rows must not be reused
                    elif item.draft.token_ids:
                        step.accept(item.reservation.sequence, outcome.num_accepted)
                step.commit()
            except Exception as error:
                return self._outputs.fail_step(step, [item.request for item in scheduled], error, check=self.check)
        self.counters.count_step(sum(item.reservation.num_tokens - len(item.draft.token_ids) for item in scheduled))
        ended = self._clock()
        num_accepted = sum(outcome.num_accepted for _, outcome in outcomes)
        self._scheduler.observe(plan, ended - begun, num_accepted)
        if self.tier is not None:
            self.tier.rates.observe_step([item.reservation for item in scheduled], ended - begun)
        self._tell_progress(prefilling, ended)
        return self._outputs.hand_out(plan, outcomes, check=self.check)

    def warm_up(self) -> None:
        """Compute one token on a free page for no request, so that weights are mapped in and threads run.

        The time is the scheduler's first measurement. A failure is logged; requests will meet it themselves.
        """
        if not self.cache.pool.num_free:
            return
        try:
            for _ in range(2):  # the first one maps the weights in, so only the second is measured
                seconds = seconds_of_zeros(
                    self._forward, self.cache, 0, 1, clock=self._clock, num_outputs=self.limits.num_outputs
                )
            self._scheduler.observe_decode(num_rows=1, seconds=seconds)
        except Exception:
            _LOGGER.exception("the model could not be warmed up")

    def start_over(self, cause: BaseException) -> None:
        """Drop all requests and all cached prefixes in memory, in whatever state `cause` left them: the pool is fresh.

        The disk keeps its pages: they are verified when written and when read.
        """
        self.counters.count_restart(cause)
        self._scheduler.start_over()
        if self.tier is not None:
            for name in self._loading:
                self.tier.abandon(name)
        self._loading.clear()
        self.memories.start_over()
        self.check()

    def check(self) -> None:
        """Raise AssertionError unless queues, sequences, pages and tree agree; between steps only."""
        self._scheduler.check()
        self.memories.check()
        sequences = [request.sequence for request in self._scheduler.requests() if request.sequence]
        assert self.cache.stats().num_sequences == len(sequences), "a sequence belongs to no request"
        for sequence in sequences:
            assert self.cache.sequences.get(sequence.seq_id) is sequence
        for request in self._loading.values():
            assert request.sequence is None, f"{request!r} waits for the disk and has a sequence"

    @property
    def _idle_work(self) -> ExpectedPrompts | None:
        """The expected prompts if there is something to prefill and no request; else None."""
        expected, is_busy = self.expected, self._scheduler.has_work or self._loading
        return None if is_busy or expected is None or not expected.has_work else expected

    def _step_idle(self) -> None:
        """Prefill a piece of an expected prompt, if there is no request and there are any."""
        try:
            if (work := self._idle_work) is not None:
                work.run()
        except Exception:  # the prompt is computed when it comes
            _LOGGER.exception("computing what the next prompt begins with failed")

    def _waits_for(self, tier: DiskTier, request: Request) -> bool:
        """Start loading the request's prefix from disk; return whether the request has to wait for it."""
        wanted = PrefixLookup(
            request.request_id,
            partial(find_prefix, request=request, context_length=self.limits.context_length),
            go_on=partial(self._go_on, request),
            met=partial(self._scheduler.resume_loaded, request),
            num_tokens_ahead=self._scheduler.num_tokens_ahead,
            options=request.spec.options,
        )
        if not tier.begin(wanted):
            return False
        self._loading[request.request_id] = request
        return True

    def _go_on(self, request: Request, loaded: LoadedPrefix | None, rows: LoadedRows | None) -> None:
        """Schedule a request that waited for the disk, whether or not anything was loaded."""
        self._scheduler.add(self._loading.pop(request.request_id), loaded=loaded, rows=rows)

    def _start(self, requests: list[Request], now: float) -> None:
        """Record the first step of these requests, and report progress before it is computed: it can take long."""
        for request in requests:
            queue_s = request.start(now)
            if queue_s is not None:
                self.counters.in_queue.observe(queue_s)
                self._tell_progress([request], now)

    def _tell_progress(self, requests: list[Request], now: float) -> None:
        for request in requests:
            self.on_progress(request.request_id, request.progress(now))
