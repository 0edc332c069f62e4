"""Decide which requests compute how many tokens in the next step, and who must give its pages back.

Knows requests, pages and a token budget. No tensors, no text, and no clock: time is an argument.
"""

from __future__ import annotations

import collections.abc
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, islice

from ..artifact.manifest import PAGE_SIZE
from ..cache.kv_transaction import KVTransaction
from ..cache.prefix_cache import PrefixCache
from ..cache.prefix_match import PrefixMatch
from ..cache.sequence import Sequence
from ..errors import KVError
from .admission import Admission, AdmissionPolicy
from .request import Request
from .step_plan import StepPlan


class RequestBroken(Exception):
    """Looking at one waiting request raised: it can only fail, and nothing else is changed."""

    def __init__(self, request: Request) -> None:
        super().__init__(request.request_id)
        self.request = request


@dataclass(frozen=True)
class SchedulerPolicy:
    """Limits of a step, and how cached prefixes weigh against waiting.

    A waiting request's turn comes by `cached tokens + ageing_tokens_per_s * seconds waited`: a cached prefix
    lets it overtake others, for a bounded time. Only the `num_candidates` oldest are looked at, so that a
    long queue costs nothing.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    ageing_tokens_per_s: float = 256.0
    num_candidates: int = 32
    admission: AdmissionPolicy = "optimistic"


def find_prefix(cache: PrefixCache, request: Request, context_length: int) -> PrefixMatch:
    """The longest reuse that the request allows; ids that leave no room for a reply are not taken."""
    prompt = request.prompt
    match = cache.match(
        prompt.ids,
        num_match=prompt.num_match,
        namespace=request.namespace,
        num_known=prompt.num_known,
        spelled=request.spec.spelled,
    )
    if len(match.prompt_ids) < context_length or request.spec.spelled is None:
        return match
    return cache.match(prompt.ids, num_match=prompt.num_match, namespace=request.namespace, num_known=prompt.num_known)


class Scheduler:
    """Continuous batching with chunked prefill over one prefix cache.

    Pages are taken from the newest running request first, so the oldest always advances and everybody
    finishes; with conservative admission none need be. A preempted request comes before those that never ran;
    its KV stays in the tree until others need the room, and it resumes from there. Tokens of a sparse span are not in
    the tree, and are computed.
    """

    def __init__(self, cache: PrefixCache, policy: SchedulerPolicy, *, context_length: int) -> None:
        self._cache = cache
        self._policy = policy
        self._context_length = context_length
        self._admission = Admission(cache, policy.admission, context_length)
        self._waiting: dict[str, Request] = {}  # by id, in order of arrival
        self._preempted: dict[str, Request] = {}  # their sequences are open and hold no pages
        self._running: dict[str, Request] = {}  # in order of arrival
        self._arrivals: dict[str, int] = {}
        self._num_arrived = 0
        self.num_preemptions = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._arrivals

    @property
    def has_work(self) -> bool:
        """Whether there is any request."""
        return bool(self._arrivals)

    @property
    def num_waiting(self) -> int:
        """Requests without pages: those that never ran, and those that were preempted."""
        return len(self._waiting) + len(self._preempted)

    @property
    def num_running(self) -> int:
        """Requests that take part in steps."""
        return len(self._running)

    def requests(self) -> list[Request]:
        """All requests, in no particular order."""
        return list(chain(self._running.values(), self._preempted.values(), self._waiting.values()))

    def get(self, request_id: str) -> Request | None:
        """The request with this id; None if there is none."""
        queues = (self._running, self._preempted, self._waiting)
        return next((queue[request_id] for queue in queues if request_id in queue), None)

    def add(self, request: Request) -> None:
        """Let a request wait for its turn."""
        assert request.request_id not in self._arrivals, "added twice"
        self._arrivals[request.request_id] = self._num_arrived
        self._num_arrived += 1
        self._waiting[request.request_id] = request

    def start_over(self) -> None:
        """Forget all requests, in whatever state the queues are; their sequences are the caller's to end."""
        for queue in (self._waiting, self._preempted, self._running):
            queue.clear()
        self._arrivals.clear()

    def remove(self, request_id: str) -> Request:
        """Forget a request, finished or not; its sequence stays open and is the caller's to close."""
        del self._arrivals[request_id]
        for queue in (self._running, self._preempted, self._waiting):
            if request_id in queue:
                return queue.pop(request_id)
        raise AssertionError(f"request {request_id} is in no queue")

    @property
    def num_tokens_ahead(self) -> int | None:
        """Tokens that are computed before a request that is added now; None: who knows, others wait as well."""
        if self.num_waiting or self.num_running == self._policy.max_num_seqs:
            return None
        return sum(request.admitted.num_uncomputed for request in self._running.values())

    def schedule(self, step: KVTransaction, now: float, stops: Mapping[str, int] | None = None) -> StepPlan:
        """Reserve pages for the next step, preempting if need be.

        Running requests come first, those that decode before those that prefill; what is left of the budget
        admits waiting ones. While there is work the plan is not empty, or names a request that can only fail.

        Args:
            stops: by id, positions that requests are not to compute beyond in this step.

        Raises:
            RequestBroken: a waiting request cannot even be looked at; roll the step back, and take it out.
        """
        plan = StepPlan(step, self._policy.max_num_batched_tokens, stops)
        for request in self._in_turn():
            if request.request_id in self._running and plan.budget > 0:
                self._advance(request, plan)
        self._admit(plan, now)
        return plan

    def drop_loaded_rows(self, namespace: bytes | None = None) -> None:
        """Drop the rows that were loaded for waiting requests, of a namespace or of all; the requests compute them."""
        for request in self._waiting.values():
            if request.rows is not None and (namespace is None or request.namespace == namespace):
                _drop_rows(request)

    def check(self) -> None:
        """Raise AssertionError unless queues and sequences agree; not inside a transaction."""
        queues = (self._running, self._preempted, self._waiting)
        assert sum(map(len, queues)) == len(self._arrivals), "a request is in two queues, or in none"
        assert {request.request_id for request in self.requests()} == set(self._arrivals)
        assert len(self._running) <= self._policy.max_num_seqs
        arrivals = [self._arrival(request) for request in self._running.values()]
        assert arrivals == sorted(arrivals), "running requests are not in order of arrival"
        for request in self._waiting.values():
            assert request.sequence is None, f"{request!r} waits and has a sequence"
        for request in chain(self._running.values(), self._preempted.values()):
            sequence = request.admitted
            assert not request.is_finished and not sequence.is_closed
            assert sequence.num_uncomputed > 0, f"{request!r} has nothing to compute"
            assert tuple(sequence.token_ids[: len(request.prompt.ids)]) == tuple(request.prompt.ids)
        for request in self._preempted.values():
            assert not request.admitted.page_ids, f"{request!r} was preempted and holds pages"

    # Running requests.

    def _in_turn(self) -> list[Request]:
        """Those that decode first, so that no long prompt stops them; each kind by arrival."""
        decoding: list[Request] = []
        prefilling: list[Request] = []
        for request in self._running.values():
            (decoding if request.admitted.num_uncomputed == 1 else prefilling).append(request)
        return decoding + prefilling

    def _arrival(self, request: Request) -> int:
        return self._arrivals[request.request_id]

    def _advance(self, request: Request, plan: StepPlan) -> None:
        """Reserve a running request's next tokens, at the cost of newer ones, or give up its own pages."""
        while not plan.reserve(request):
            if len(self._running) == 1:
                plan.unservable = request
                return
            newest = next(reversed(self._running.values()))
            self._preempt(newest, plan)
            if newest is request:
                return

    def _preempt(self, request: Request, plan: StepPlan) -> None:
        """Take a request's pages, those of this step too; what it computed stays in the tree for now."""
        plan.drop(request)
        self._cache.preempt(request.admitted)
        self._preempted[request.request_id] = self._running.pop(request.request_id)
        request.preempted()
        self.num_preemptions += 1

    # Waiting requests.

    def _admit(self, plan: StepPlan, now: float) -> None:
        """Run waiting requests until one does not fit: nobody overtakes it for that."""
        while self.num_waiting and plan.budget > 0 and len(self._running) < self._policy.max_num_seqs:
            request = self._resume_oldest(plan) if self._preempted else self._start_best(plan, now)
            if request is None:
                return
            self._run(request)
            if not plan.reserve(request):
                if len(self._running) == 1:
                    plan.unservable = request
                else:
                    self._preempt(request, plan)
                return

    def _run(self, request: Request) -> None:
        """Add a request to those that run, before those that it arrived before."""
        newest = next(reversed(self._running.values()), request)
        self._running[request.request_id] = request
        if self._arrival(newest) > self._arrival(request):
            self._running = dict(sorted(self._running.items(), key=lambda item: self._arrivals[item[0]]))

    def _resume_oldest(self, plan: StepPlan) -> Request | None:
        request = min(self._preempted.values(), key=self._arrival)
        match = self._cache.match(request.admitted.token_ids, namespace=request.namespace)
        if not self._admission.fits(request, match, None, plan, self._running.values()):
            return None
        self._cache.resume(request.admitted)
        return self._preempted.pop(request.request_id)

    def _start_best(self, plan: StepPlan, now: float) -> Request | None:
        chosen = self._choose(now)
        if chosen is None:
            return None
        request, match = chosen
        sparse = None if request.rows is None else request.rows.span
        if not self._admission.fits(request, match, sparse, plan, self._running.values()):
            return None
        sequence: Sequence | None = None
        try:
            if not request.is_candidate_final and request.rows is None:
                match = find_prefix(self._cache, request, self._context_length)
                request.candidate, request.is_candidate_final = match, True
                if not self._admission.fits(request, match, None, plan, self._running.values()):
                    return None
            sequence = self._open(request, match)
            if sequence is not None:
                request.admit(sequence, match)
        except Exception as error:
            if sequence is not None:
                self._cache.close(sequence, keep=False)
            request.sequence = None
            raise RequestBroken(request) from error
        if sequence is None:
            return self._start_best(plan, now)
        return self._waiting.pop(request.request_id)

    def _open(self, request: Request, match: PrefixMatch) -> Sequence | None:
        """A request's sequence. None if it cannot begin with the rows that were loaded for it: the request goes on
        waiting, without them."""
        context_length, request_id = self._context_length, request.request_id
        if request.rows is None:
            return self._cache.open(match, context_length=context_length, request_id=request_id)
        try:
            return request.rows.open(self._cache, context_length=context_length, request_id=request_id)
        except KVError:
            _drop_rows(request)
            return None

    def _choose(self, now: float) -> tuple[Request, PrefixMatch] | None:
        """The waiting request with the longest cached prefix, age counted in; the older one on ties."""
        best: tuple[Request, PrefixMatch] | None = None
        best_score = 0.0
        for request in islice(self._waiting.values(), self._policy.num_candidates):
            try:
                match = self._peek(request)
            except Exception as error:
                raise RequestBroken(request) from error
            rows = request.rows
            if rows is None and self._is_being_computed(match):
                continue
            num_cached = match.num_tokens if rows is None else rows.span.stop
            score = num_cached + self._policy.ageing_tokens_per_s * max(0.0, now - request.spec.arrived_at)
            if best is None or score > best_score:
                best, best_score = (request, match), score
        return best

    def _peek(self, request: Request) -> PrefixMatch:
        """What was found of a waiting request, as far as it is still there: to look by text each time is too slow."""
        before, rows = request.candidate, request.rows
        if before is None and rows is not None:  # of the ids that the rows are of, which matching by text may change
            before = rows.memory_match(self._cache)
        elif before is None:
            before = find_prefix(self._cache, request, self._context_length)
            request.is_candidate_final = True
        elif before.version != self._cache.tree.version:
            before = self._cache.match(before.prompt_ids, num_match=before.num_match, namespace=request.namespace)
            request.is_candidate_final = False
        request.candidate = before
        if rows is not None and before.num_tokens >= rows.span.stop:
            request.rows = None  # memory has all their tokens by now
        return before

    def _is_being_computed(self, match: PrefixMatch) -> bool:
        """Whether a running request is at work on more of this prompt: then that one computes it for both."""
        limit = min(match.num_match, len(match.prompt_ids) - 1)
        for other in self._running.values():
            sequence = other.admitted
            if sequence.num_uncomputed == 1 or sequence.namespace is None or sequence.namespace != match.namespace:
                continue
            if sequence.sparse is not None:  # no other request will find what it computes
                continue
            if sequence.num_computed >= limit or match.num_tokens >= limit:
                continue
            num_common = _num_common(match.prompt_ids, sequence.token_ids, limit)
            if num_common // PAGE_SIZE * PAGE_SIZE > max(match.num_tokens, sequence.num_computed):
                return True
        return False


def _drop_rows(request: Request) -> None:
    """Let a waiting request go on as if no rows had been loaded for it."""
    request.rows = request.candidate = None
    request.is_candidate_final = False


def _num_common(left: collections.abc.Sequence[int], right: collections.abc.Sequence[int], limit: int) -> int:
    """How many of the first `limit` ids are the same, counted in whole pages."""
    limit = min(limit, len(left), len(right))
    for start in range(0, limit, PAGE_SIZE):
        stop = start + PAGE_SIZE
        if stop > limit or tuple(left[start:stop]) != tuple(right[start:stop]):
            return start
    return limit
