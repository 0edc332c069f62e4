"""Decide which requests compute how many tokens in the next step, and which give their pages back.

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
from .step.drafts import Guessing
from .step.pace import StepPace
from .step.plan import SchedulerPolicy, StepPlan
from .waiting_request import Admission, RequestBroken, WaitingRequest


class Scheduler:
    """Continuous batching with chunked prefill over one prefix cache.

    Pages are taken from the newest running request first, so the oldest always advances and all
    finish; conservative admission never takes any. A preempted request comes before those that never ran;
    its KV stays in the tree until others need the room, and it resumes from there. Tokens of offered rows are not
    in the tree, and are computed.

    Clients take turns: the one with fewest running requests comes first. Where no place is free, a client that has two
    more of them than one that waits gives up its newest, unless admission is conservative.

    Idle requests run while there are no others. Any other request preempts all of them, and they resume after it.
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
        self._turns: dict[Client, int] = {}  # when each of these clients was let in last, in requests of all
        self._num_admitted = 0
        self._pace = None if policy.prompts_s is None else StepPace(policy.prompts_s)
        self._guessing = Guessing.of(policy, cache, drafts)
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
        waiting = (each.request for each in self._waiting.values())
        return list(chain(self._running.values(), self._preempted.values(), waiting))

    def waiting_requests(self) -> list[Request]:
        """Those that never ran, in order of arrival."""
        return [waiting.request for waiting in self._waiting.values()]

    def add(self, request: Request, *, loaded: LoadedPrefix | None = None, rows: LoadedRows | None = None) -> None:
        """Let a request wait for its turn.

        Args:
            loaded: whole pages that came from disk for it.
            rows: that an extra offers for its sequence to begin with.
        """
        assert request.request_id not in self._arrivals, "added twice"
        self._arrivals[request.request_id] = self._num_arrived
        self._num_arrived += 1
        self._num_idle += request.is_idle
        self._by_client[request.client] += 1
        self._waiting[request.request_id] = WaitingRequest(request, loaded, rows)

    def meet(self, request: Request, loaded: LoadedPrefix, match: PrefixMatch) -> None:
        """Have a request go on behind what came from disk while it computed, or waited for its turn to.

        Args:
            match: what the disk had of its prompt.
        """
        sequence = request.sequence
        if sequence is None:
            self._waiting[request.request_id].loaded = loaded
        elif (num_computed := sequence.num_computed) and self._cache.resume(sequence):  # else it was preempted
            by_kind = loaded.behind(num_computed).by_kind(match.tokens_by_kind, match.num_tokens)
            request.count_loaded(by_kind, match.why_not_more)

    def start_over(self) -> None:
        """Forget all requests, in whatever state the queues are; their sequences are the caller's to end."""
        self._waiting.clear()
        for queue in (self._preempted, self._running):
            queue.clear()
        for counts in (self._arrivals, self._by_client, self._turns):
            counts.clear()
        self._num_idle = 0

    def remove(self, request_id: str) -> Request:
        """Forget a request, finished or not; its sequence stays open and is the caller's to close."""
        del self._arrivals[request_id]
        self._guessing.end(request_id)
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
        """Tokens that are computed before a request that is added now; None: not known, for others wait as well."""
        if self._num_ready or self.num_running == self._policy.max_num_seqs:
            return None
        return sum(request.admitted.num_uncomputed for request in self._running.values() if self._may_run(request))

    def schedule(self, step: KVTransaction, now: float, stops: Mapping[str, int] | None = None) -> StepPlan:
        """Reserve pages for the next step, preempting if need be.

        Running requests come first, those that decode before those that prefill; what is left of the budget
        admits waiting ones. While there is work the plan is not empty, or names a request that can only fail.

        Args:
            stops: by id, positions that requests are not to compute beyond in this step.

        Raises:
            RequestBroken: a waiting request cannot even be looked at; roll the step back, and take it out.
        """
        for request in [request for request in self._running.values() if not self._may_run(request)]:
            self._stop(request)
        decoding, prefilling = self._by_kind()
        num_prompts = len(prefilling) + self._num_ready
        if num_prompts and self._is_idle:
            num_prompts += 1  # the request that may come next, which does not wait for a long step
        time = (
            None if self._pace is None else self._pace.time_of(now, num_streams=len(decoding), num_prompts=num_prompts)
        )
        most, num_logits = self._policy.max_num_batched_tokens, self._policy.max_num_logits
        whole = self._policy.whole_prompts
        plan = StepPlan(step, most, stops, time, max_num_logits=num_logits, whole_prompts=whole)
        has_prompts = (self._num_ready and plan.has_room) or any(map(plan.has_room_for, prefilling))
        drafts = None if has_prompts else self._guessing.begin(decoding)
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
        plan.keep_to_states()
        return plan

    def observe(self, plan: StepPlan, seconds: float, num_accepted: int = 0) -> None:
        """Note how long the step of a plan took, and how many guesses were right."""
        scheduled = plan.scheduled
        if self._pace is not None:
            self._pace.observe_step([item.reservation for item in scheduled], seconds, num_accepted)
        self._guessing.observe(scheduled, seconds)

    def observe_decode(self, num_rows: int, seconds: float) -> None:
        """Note how long a step of no request took that decoded so many tokens."""
        if self._pace is not None:
            self._pace.observe(num_streams=num_rows, chunks=[], seconds=seconds)

    def drop_loaded_rows(self, namespace: bytes | None = None) -> None:
        """Drop the rows that were loaded for waiting requests, of a namespace or of all; the requests compute them."""
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
        self._guessing.check(list(self._running))
        for waiting in self._waiting.values():
            assert waiting.request.sequence is None, f"{waiting.request!r} waits and has a sequence"
        for request in chain(self._running.values(), self._preempted.values()):
            sequence = request.admitted
            assert not request.is_finished and not sequence.is_closed
            assert sequence.num_uncomputed > 0, f"{request!r} has nothing to compute"
            assert tuple(sequence.token_ids[: len(request.prompt.ids)]) == tuple(request.prompt.ids)
        for request in self._preempted.values():
            assert not request.admitted.page_ids, f"{request!r} was preempted and holds pages"

    # Running requests.

    def _by_kind(self) -> tuple[list[Request], list[Request]]:
        """Those that decode, which come first so that no long prompt stops them, and the others; each by arrival."""
        decoding: list[Request] = []
        prefilling: list[Request] = []
        for request in self._running.values():
            (decoding if request.admitted.decodes else prefilling).append(request)
        return decoding, prefilling

    def _arrival(self, request: Request) -> int:
        return self._arrivals[request.request_id]

    def _advance_each(self, requests: list[Request], plan: StepPlan, *, num_more: int = 0) -> None:
        """Reserve the next tokens of prompts in turn; the time is for them and `num_more` others alike."""
        for place, request in enumerate(requests):
            if request.request_id in self._running and plan.has_room_for(request):
                self._advance(request, plan, 1 / (len(requests) - place + num_more))

    def _advance(self, request: Request, plan: StepPlan, share: float = 1.0) -> None:
        """Reserve a running request's next tokens, at the cost of newer ones, or give up its own pages."""
        while not plan.reserve(request, share):
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
        self._stop(request)

    def _stop(self, request: Request) -> None:
        """Take the pages of a request that has none in this step."""
        self._cache.preempt(request.admitted)
        self._preempted[request.request_id] = self._running.pop(request.request_id)
        request.preempted()
        self.num_preemptions += 1
        self._guessing.end(request.request_id)

    # Waiting requests.

    @property
    def _is_idle(self) -> bool:
        """Whether there are idle requests, and no others."""
        return 0 < self._num_idle == len(self._arrivals)

    def _may_run(self, request: Request) -> bool:
        return not request.is_idle or self._is_idle

    @property
    def _num_ready(self) -> int:
        """How many requests wait that may run; the idle ones that may not all wait by the time this is asked."""
        if not self._num_idle or self._is_idle:
            return self.num_waiting
        return sum(not request.is_idle for request in self._queued())

    def _queued(self) -> Iterator[Request]:
        return chain(self._preempted.values(), (waiting.request for waiting in self._waiting.values()))

    def _admit(self, plan: StepPlan, now: float) -> None:
        """Run waiting requests until one does not fit: none overtakes it for that."""
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
        """Add a request to the running ones, which are in the order of arrival."""
        newest = next(reversed(self._running.values()), request)
        self._running[request.request_id] = request
        if self._arrival(newest) > self._arrival(request):
            self._running = dict(sorted(self._running.items(), key=lambda item: self._arrivals[item[0]]))

    def _clients_in_turn(self) -> list[Client]:
        """The clients with a request that waits: first the one with fewest running ones, of these the one that was let
        in longest ago."""
        if len(self._by_client) == 1:
            return list(self._by_client)
        running = Counter(request.client for request in self._running.values())
        waiting = dict.fromkeys(request.client for request in self._queued() if self._may_run(request))
        return sorted(waiting, key=lambda client: (running[client], self._turns.get(client, 0)))

    def _give_up_place(self, client: Client, plan: StepPlan, now: float) -> bool:
        """Preempt the newest request of the client with most running ones, if it has two more than this one, which has
        one to run."""
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
        """The request that runs next; None: it does not fit, or all wait for what running ones compute."""
        for client in clients:
            preempted = self._preempted_of(client)
            if preempted:
                return self._resume(min(preempted, key=self._arrival), plan)
            chosen = self._best(client, now)
            if chosen is not None:
                return self._start(*chosen, plan, now)
        return None

    def _preempted_of(self, client: Client) -> list[Request]:
        return [each for each in self._preempted.values() if each.client == client and self._may_run(each)]

    def _best(self, client: Client, now: float) -> tuple[WaitingRequest, PrefixMatch] | None:
        """A client's waiting request that runs next; None: it has none, or all wait for what running ones compute."""
        waiting = self._waiting.values()
        own = (each for each in waiting if each.request.client == client and self._may_run(each.request))
        score = partial(WaitingRequest.score, now=now, ageing=self._policy.ageing_tokens_per_s)
        candidates = islice(own, self._policy.num_candidates)
        return self._admission.choose(candidates, self._running.values(), score)

    def _resume(self, request: Request, plan: StepPlan) -> Request | None:
        sequence, limit = request.admitted, request.num_reusable
        match = self._cache.match(sequence.token_ids, num_match=limit, namespace=request.namespace)
        if not self._admission.fits(request, match, None, plan, self._running.values()):
            return None
        self._cache.resume(sequence, limit)
        return self._preempted.pop(request.request_id)

    def _start(self, waiting: WaitingRequest, match: PrefixMatch, plan: StepPlan, now: float) -> Request | None:
        request, running = waiting.request, self._running.values()
        if not self._admission.fits(request, match, waiting.rows, plan, running):
            return None
        sequence: Sequence | None = None
        try:
            if not waiting.is_final and waiting.rows is None:
                match = waiting.look(self._cache, self._context_length)
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
