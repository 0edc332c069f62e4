"""Decide how many tokens of which requests the next step computes, and which requests are preempted.

Knows requests, pages and a token budget. No tensors, no text, and no clock: time is an argument.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain, islice

from ..cache.kv_transaction import KVTransaction
from ..cache.prefix_cache import PrefixCache
from ..cache.prefix_match import PrefixMatch
from ..cache.sequence import Sequence
from ..prefix.loaded_prefix import LoadedPrefix, LoadedRows
from ..speculation.draft_levels import DraftSource
from .request import Request
from .request_options import Client
from .step.drafts import DraftPlanner
from .step.pace import StepPace
from .step.plan import SchedulerPolicy, StepPlan
from .waiting_request import Admission, RequestBroken, WaitingRequest


class Scheduler:
    """Continuous batching with chunked prefill over one prefix cache.

    Preemption takes pages from the newest running request first, so the oldest always advances and all
    finish; conservative admission never preempts. A preempted request resumes before those that never ran.
    Its KV stays in the tree until others need the room, and it resumes from there. Tokens of offered rows are not
    in the tree, and are computed.

    Clients take turns: the one with the fewest running requests comes first. If all places are taken, a client with two
    more running requests than a waiting client loses its newest, unless admission is conservative.

    Idle requests run only while there are no others. Any other request preempts all of them, and they resume after it.
    """

    def __init__(
        self,
        cache: PrefixCache,
        policy: SchedulerPolicy,
        *,
        context_length: int,
        drafts: DraftSource | None = None,
    ) -> None:
        self._cache = cache
        self._policy = policy
        self._context_length = context_length
        self._admission = Admission(cache, policy.admission, context_length)
        self._waiting: dict[str, WaitingRequest] = {}  # by id, in order of arrival
        self._preempted: dict[str, Request] = {}  # their sequences are open and hold no pages
        self._running: dict[str, Request] = {}  # in order of arrival
        self._arrivals: dict[str, int] = {}
        self._num_arrived = self._num_idle = 0
        self._by_client = Counter[Client]()  # requests in any queue
        self._turns: dict[Client, int] = {}  # when each of these clients was admitted last, as a count of admissions
        self._num_admitted = 0
        self._pace = None if policy.prompts_s is None else StepPace(policy.prompts_s)
        self._draft_planner = DraftPlanner.of(policy, cache, drafts)
        self.num_preemptions = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._arrivals

    @property
    def has_work(self) -> bool:
        """Return whether there is any request."""
        return bool(self._arrivals)

    @property
    def num_waiting(self) -> int:
        """Number of requests without pages: those that never ran, and those that were preempted."""
        return len(self._waiting) + len(self._preempted)

    @property
    def num_running(self) -> int:
        """Number of requests that take part in steps."""
        return len(self._running)

    def requests(self) -> list[Request]:
        """Return all requests, in no particular order."""
        waiting = (each.request for each in self._waiting.values())
        return list(chain(self._running.values(), self._preempted.values(), waiting))

    def waiting_requests(self) -> list[Request]:
        """Return the requests that never ran, in order of arrival."""
        return [waiting.request for waiting in self._waiting.values()]

    def add(self, request: Request, *, loaded: LoadedPrefix | None = None, rows: LoadedRows | None = None) -> None:
        """Queue a request.

        Args:
            loaded: whole pages that were loaded from disk for it.
            rows: rows that an extra offers; its sequence begins with them.
        """
        assert request.request_id not in self._arrivals, "added twice"
        self._arrivals[request.request_id] = self._num_arrived
        self._num_arrived += 1
        self._num_idle += request.is_idle
        self._by_client[request.client] += 1
        self._waiting[request.request_id] = WaitingRequest(request, loaded, rows)

    def resume_loaded(self, request: Request, loaded: LoadedPrefix, match: PrefixMatch) -> None:
        """Resume a request after the pages that were loaded while it was prefilling or queued.

        Args:
            match: the disk's match of its prompt.
        """
        sequence = request.sequence
        if sequence is None:
            self._waiting[request.request_id].loaded = loaded
        elif (num_computed := sequence.num_computed) and self._cache.resume(sequence):  # else it was preempted
            by_kind = loaded.behind(num_computed).by_kind(match.tokens_by_kind, match.num_tokens)
            request.count_loaded(by_kind, match.why_not_more)

    def start_over(self) -> None:
        """Forget all requests, in whatever state the queues are; the caller ends their sequences."""
        self._waiting.clear()
        for queue in (self._preempted, self._running):
            queue.clear()
        for counts in (self._arrivals, self._by_client, self._turns):
            counts.clear()
        self._num_idle = 0

    def remove(self, request_id: str) -> Request:
        """Remove a request, finished or not; the caller closes its sequence."""
        del self._arrivals[request_id]
        self._draft_planner.end(request_id)
        queue = next((queue for queue in (self._running, self._preempted) if request_id in queue), None)
        request = self._waiting.pop(request_id).request if queue is None else queue.pop(request_id)
        self._num_idle -= request.is_idle
        self._by_client[request.client] -= 1
        if not self._by_client[request.client]:
            del self._by_client[request.client]
            self._turns.pop(request.client, None)
        return request

    @property
    def num_tokens_ahead(self) -> int | None:
        """Tokens computed before a request that is added now; None if unknown, because others are waiting."""
        if self._num_ready or self.num_running == self._policy.max_num_seqs:
            return None
        return sum(request.admitted.num_uncomputed for request in self._running.values() if self._may_run(request))

    def schedule(self, step: KVTransaction, now: float, stops: Mapping[str, int] | None = None) -> StepPlan:
        """Reserve pages for the next step, preempting requests if necessary.

        Running requests come first, those that decode before those that prefill; what is left of the budget
        admits waiting ones. While there is work, the plan is not empty, or names a request that can only fail.

        Args:
            stops: by request id, positions that must not be computed in this step.

            Raises:
                RequestBroken: matching a waiting request raised; the caller rolls the step back and removes it.
        """
        for request in [request for request in self._running.values() if not self._may_run(request)]:
            self._move_to_preempted(request)
        decoding, prefilling = self._by_kind()
        num_prompts = len(prefilling) + self._num_ready
        if num_prompts and self._is_idle:
            num_prompts += 1  # for the request that may come next, which must not wait for a long step
        time = (
            None if self._pace is None else self._pace.time_of(now, num_streams=len(decoding), num_prompts=num_prompts)
        )
        most, num_logits = self._policy.max_num_batched_tokens, self._policy.max_num_logits
        whole = self._policy.whole_prompts
        plan = StepPlan(step, most, stops, time, max_num_logits=num_logits, whole_prompts=whole)
        has_prompts = (self._num_ready and plan.has_room) or any(map(plan.has_room_for, prefilling))
        drafts = None if has_prompts else self._draft_planner.begin(decoding)
        for request in decoding:
            if request.request_id not in self._running or plan.budget <= 0:
                continue
            if drafts is None or not drafts.reserve(request, plan):
                self._advance(request, plan)
        if time is None:
            self._advance_each(prefilling, plan)
            self._admit(plan, now)
        elif time.has_room:
            if prefilling and plan.has_room_for(prefilling[0]):
                plan.set_half_aside()
            others = sorted(prefilling[1:], key=lambda request: request.admitted.num_uncomputed)
            self._advance_each(others, plan, num_more=bool(self._num_ready))
            self._admit(plan, now)
            plan.take_back()
            for request in prefilling[:1]:
                if request.request_id in self._running and plan.has_room_for(request):
                    self._advance(request, plan)
        plan.cut_at_states()
        return plan

    def observe(self, plan: StepPlan, seconds: float, num_accepted: int = 0) -> None:
        """Record how long the step of a plan took, and how many draft tokens were accepted."""
        scheduled = plan.scheduled
        if self._pace is not None:
            self._pace.observe_step([item.reservation for item in scheduled], seconds, num_accepted)
        self._draft_planner.observe(scheduled, seconds)

    def observe_decode(self, num_rows: int, seconds: float) -> None:
        """Record how long a step took that decoded this many tokens for no request."""
        if self._pace is not None:
            self._pace.observe(num_streams=num_rows, chunks=[], seconds=seconds)

    def drop_loaded_rows(self, namespace: bytes | None = None) -> None:
        """Drop rows loaded for waiting requests, of a namespace or of all; the requests then compute them."""
        for waiting in self._waiting.values():
            if waiting.rows is not None and (namespace is None or waiting.request.namespace == namespace):
                waiting.drop_rows()

    def check(self) -> None:
        """Raise AssertionError unless queues and sequences agree; not inside a transaction."""
        num_queued = self.num_running + self.num_waiting
        assert num_queued == len(self._arrivals), "a request is in two queues, or in none"
        assert {request.request_id for request in self.requests()} == set(self._arrivals)
        assert self._by_client == Counter(request.client for request in self.requests())
        assert self._num_idle == sum(request.is_idle for request in self.requests())
        assert len(self._running) <= self._policy.max_num_seqs
        arrivals = [self._arrival(request) for request in self._running.values()]
        assert arrivals == sorted(arrivals), "running requests are not in order of arrival"
        self._draft_planner.check(list(self._running))
        for waiting in self._waiting.values():
            assert waiting.request.sequence is None, f"{waiting.request!r} waits and has a sequence"
        for request in chain(self._running.values(), self._preempted.values()):
            sequence = request.admitted
            assert not request.is_finished and not sequence.is_closed
            assert sequence.num_uncomputed > 0, f"{request!r} has nothing to compute"
            assert tuple(sequence.token_ids[: len(request.prompt.ids)]) == tuple(request.prompt.ids)
        for request in self._preempted.values():
            assert not request.admitted.page_ids, f"{request!r} was preempted and holds pages"

    # Running requests

    def _by_kind(self) -> tuple[list[Request], list[Request]]:
        """Return the running requests that decode, and those that prefill, each in order of arrival."""
        decoding: list[Request] = []
        prefilling: list[Request] = []
        for request in self._running.values():
            (decoding if request.admitted.decodes else prefilling).append(request)
        return decoding, prefilling

    def _arrival(self, request: Request) -> int:
        return self._arrivals[request.request_id]

    def _advance_each(self, requests: list[Request], plan: StepPlan, *, num_more: int = 0) -> None:
        """Reserve the next tokens of prompts in turn; the time is shared equally with `num_more` others."""
        for place, request in enumerate(requests):
            if request.request_id in self._running and plan.has_room_for(request):
                self._advance(request, plan, 1 / (len(requests) - place + num_more))

    def _advance(self, request: Request, plan: StepPlan, share: float = 1.0) -> None:
        """Reserve a running request's next tokens, preempting newer requests, or the request itself."""
        while not plan.reserve(request, share):
            if len(self._running) == 1:
                plan.unservable = request
                return
            newest = next(reversed(self._running.values()))
            self._preempt(newest, plan)
            if newest is request:
                return

    def _preempt(self, request: Request, plan: StepPlan) -> None:
        """Preempt a request, and drop it from the step; its KV stays in the tree for now."""
        plan.drop(request)
        self._move_to_preempted(request)

    def _move_to_preempted(self, request: Request) -> None:
        """Move a running request that is not in this step to the preempted ones; its pages can be evicted."""
        self._cache.preempt(request.admitted)
        self._preempted[request.request_id] = self._running.pop(request.request_id)
        request.preempted()
        self.num_preemptions += 1
        self._draft_planner.end(request.request_id)

    # Waiting requests

    @property
    def _is_idle(self) -> bool:
        """Return whether all requests are idle ones, and there is one."""
        return 0 < self._num_idle == len(self._arrivals)

    def _may_run(self, request: Request) -> bool:
        """Return whether the request is not idle work, or all requests are."""
        return not request.is_idle or self._is_idle

    @property
    def _num_ready(self) -> int:
        """Number of waiting requests that may run; all idle ones wait by now if they may not."""
        if not self._num_idle or self._is_idle:
            return self.num_waiting
        return sum(not request.is_idle for request in self._queued())

    def _queued(self) -> Iterator[Request]:
        return chain(self._preempted.values(), (waiting.request for waiting in self._waiting.values()))

    def _admit(self, plan: StepPlan, now: float) -> None:
        """Run waiting requests until one does not fit: no later one overtakes it."""
        while self._num_ready and plan.has_room:
            clients = self._clients_in_turn()
            if len(self._running) == self._policy.max_num_seqs and not self._give_up_place(clients[0], plan, now):
                return
            request = self._next(clients, plan, now)
            if request is None:
                return
            self._run(request)
            self._num_admitted += 1
            self._turns[request.client] = self._num_admitted
            if not plan.reserve(request):
                if len(self._running) == 1:
                    plan.unservable = request
                else:
                    self._preempt(request, plan)
                return

    def _run(self, request: Request) -> None:
        """Add a request to the running ones, in order of arrival."""
        newest = next(reversed(self._running.values()), request)
        self._running[request.request_id] = request
        if self._arrival(newest) > self._arrival(request):
            self._running = dict(sorted(self._running.items(), key=lambda item: self._arrivals[item[0]]))

    def _clients_in_turn(self) -> list[Client]:
        """Return the clients with a waiting request: fewest running requests first, then longest since admission."""
        if len(self._by_client) == 1:
            return list(self._by_client)
        running = Counter(request.client for request in self._running.values())
        waiting = dict.fromkeys(request.client for request in self._queued() if self._may_run(request))
        return sorted(waiting, key=lambda client: (running[client], self._turns.get(client, 0)))

    def _give_up_place(self, client: Client, plan: StepPlan, now: float) -> bool:
        """Preempt the newest request of the client with the most running ones, if it has two more than this client.

        Return whether one was preempted.
        """
        if len(self._by_client) == 1 or self._policy.admission == "conservative":
            return False
        running = Counter(request.client for request in self._running.values())
        greediest = max(running, key=running.__getitem__)
        if running[greediest] < running[client] + 2:
            return False
        if self._best(client, now) is None and not self._preempted_of(client):
            return False
        self._preempt(next(each for each in reversed(self._running.values()) if each.client == greediest), plan)
        return True

    def _next(self, clients: list[Client], plan: StepPlan, now: float) -> Request | None:
        """Return the request that runs next; None if it does not fit, or all wait for what running ones compute."""
        for client in clients:
            preempted = self._preempted_of(client)
            if preempted:
                return self._resume(min(preempted, key=self._arrival), plan)
            chosen = self._best(client, now)
            if chosen is not None:
                return self._start(*chosen, plan, now)
        return None

    def _preempted_of(self, client: Client) -> list[Request]:
        """Return a client's preempted requests that may run now."""
        return [each for each in self._preempted.values() if each.client == client and self._may_run(each)]

    def _best(self, client: Client, now: float) -> tuple[WaitingRequest, PrefixMatch] | None:
        """Return a client's waiting request that runs next; None if it has none, or they wait for running ones."""
        waiting = self._waiting.values()
        own = (each for each in waiting if each.request.client == client and self._may_run(each.request))
        score = partial(WaitingRequest.score, now=now, ageing=self._policy.ageing_tokens_per_s)
        candidates = islice(own, self._policy.num_candidates)
        return self._admission.choose(candidates, self._running.values(), score)

    def _resume(self, request: Request, plan: StepPlan) -> Request | None:
        """Give a preempted request a sequence again, with what the tree still has of it; None if it does not fit."""
        sequence, limit = request.admitted, request.num_reusable
        match = self._cache.match(sequence.token_ids, num_match=limit, namespace=request.namespace)
        if not self._admission.fits(request, match, None, plan, self._running.values()):
            return None
        self._cache.resume(sequence, limit)
        return self._preempted.pop(request.request_id)

    def _start(self, waiting: WaitingRequest, match: PrefixMatch, plan: StepPlan, now: float) -> Request | None:
        """Give a waiting request its sequence. Returns the request, or None if it does not fit.

        If the rows loaded for it cannot be used, the client's best request is chosen again.

        Raises:
            RequestBroken: matching or opening it raised; it holds nothing.
        """
        request, running = waiting.request, self._running.values()
        if not self._admission.fits(request, match, waiting.rows, plan, running):
            return None
        sequence: Sequence | None = None
        try:
            if not waiting.is_final and waiting.rows is None:
                match = waiting.match_prefix(self._cache, self._context_length)
                if not self._admission.fits(request, match, None, plan, running):
                    return None
            sequence = waiting.open(self._cache, match, self._context_length)
            if sequence is not None:
                waiting.admit(sequence, match)
        except Exception as error:
            if sequence is not None:
                self._cache.close(sequence, keep=False)
            request.sequence = None
            raise RequestBroken(request) from error
        if sequence is None:
            return self._next([request.client], plan, now)
        return self._waiting.pop(request.request_id).request
