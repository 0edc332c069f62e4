"""An idle request never delays, evicts or outlives what a client needs.

Random lives of an engine that is told what prompts may come, beside a plain list of what was asked and expected in each
namespace since it was forgotten: nothing else may be found. `traces.py` says how to run thousands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from radixlm.runtime.artifact.manifest import PAGE_SIZE
from radixlm.runtime.engine.request import Request
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.engine.step.plan import SchedulerPolicy
from radixlm.runtime.model.batch import Batch, Float32Array
from radixlm.runtime.prefix.expected_prompts import PIECE_S, ExpectedPrompt, ExpectedPrompts

from ..fake_model import CONTEXT_LENGTH, Bench, alone
from ..traces import num_traces

NAMESPACES = st.sampled_from([b"a", b"b"])
PARAMS = st.builds(SamplingParams, temperature=st.just(0.0), max_tokens=st.integers(1, 30))
MOST_LIVE = 5


def ids_of(conversation: int, num_tokens: int) -> tuple[int, ...]:
    """The first tokens of one of a few conversations, two of which begin alike."""
    shared = 20 if conversation < 2 else 0
    return tuple((place * 7 + (conversation + 1) * (place >= shared) * 5) % 30 for place in range(num_tokens))


class EngineThatExpects(RuleBasedStateMachine):
    """One engine on a small pool."""

    @initialize(
        num_pages=st.integers(8, 30),
        budget=st.sampled_from([4, 24, 64, 64]),
        token_s=st.sampled_from([0.002, 0.002, 0.02]),
        num_states=st.sampled_from([0, 0, 0, 12]),
    )
    def start(self, num_pages: int, budget: int, token_s: float, num_states: int) -> None:
        self.elsewhere: list[Callable[[], None]] = []  # threads that make ids, which take their time
        policy = SchedulerPolicy(max_num_seqs=4, max_num_batched_tokens=budget)
        self.bench = Bench(num_pages, policy=policy, num_states=num_states, aside=self.elsewhere.append)
        self.token_s = token_s

        def after(batch: Batch, logits: Float32Array) -> None:
            self.bench.now += token_s * len(batch.arrays.token_ids)  # so long does the step take

        self.bench.model.after = after
        self.live: dict[str, Request] = {}
        self.num_asked = 0
        self.asked: list[Request] = []  # those that were not forgotten
        self.told: list[tuple[bytes, tuple[int, ...]]] = []  # prompts that were expected, likewise

    @rule(namespace=NAMESPACES, conversation=st.integers(0, 3), num_tokens=st.integers(1, CONTEXT_LENGTH - 1), p=PARAMS)
    def ask(self, namespace: bytes, conversation: int, num_tokens: int, p: SamplingParams) -> None:
        if len(self.live) < MOST_LIVE:
            name = f"r{self.num_asked}"
            self.num_asked += 1
            self.live[name] = self.bench.add(name, ids_of(conversation, num_tokens), p, namespace)
            self.asked.append(self.live[name])

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(list(self.live)), label="request")
        del self.live[name]
        self.bench.abort(name)

    @rule(namespace=NAMESPACES, conversation=st.integers(0, 3), num_tokens=st.integers(0, CONTEXT_LENGTH + 9))
    def expect(self, namespace: bytes, conversation: int, num_tokens: int) -> None:
        ids = ids_of(conversation, num_tokens)
        self.told.append((namespace, ids))
        self.expected.add(ExpectedPrompt(namespace, lambda: ids))

    @rule(count=st.integers(1, 5), are_ids_made=st.booleans())
    def step(self, count: int, are_ids_made: bool) -> None:
        for _ in range(count):
            if are_ids_made:
                self.make_ids()
            self.step_once()

    def make_ids(self) -> None:
        while self.elsewhere:
            self.elsewhere.pop()()

    def step_once(self) -> None:
        """The law, of each step."""
        self.every_reply_is_that_of_its_ids_alone()  # those that ended wait no more
        bench, counters, expected = self.bench, self.bench.core.counters, self.expected
        has_clients, now, num_evicted = bool(self.live), bench.now, bench.cache.stats().num_evicted_pages
        computed, idle, all_tokens = counters.num_computed_tokens, expected.num_tokens, bench.model.num_tokens
        num_available = bench.cache.pool.num_free + bench.cache.pool.num_cached
        bench.step()
        num_idle, num_all = expected.num_tokens - idle, bench.model.num_tokens - all_tokens
        if has_clients:  # the step is theirs
            assert num_idle == 0 and num_all == counters.num_computed_tokens - computed
            return
        assert num_all == num_idle and counters.num_computed_tokens == computed
        assert bench.now - now <= max(PIECE_S, PAGE_SIZE * self.token_s) + 1e-9, "a client that comes now waits for it"
        assert bench.cache.stats().num_evicted_pages == num_evicted
        assert bench.cache.pool.num_free + bench.cache.pool.num_cached == num_available == bench.num_pages

    @rule(namespace=NAMESPACES, has_begun=st.booleans())
    def forget(self, namespace: bytes, has_begun: bool) -> None:
        if has_begun:  # and would go on
            self.expect(namespace, 3, CONTEXT_LENGTH - 2)
            self.step(2, are_ids_made=True)
        self.bench.core.forget(namespace)
        live = list(self.live.values())
        self.asked = [each for each in self.asked if each.namespace != namespace or each in live]
        self.told = [(owner, ids) for owner, ids in self.told if owner != namespace]

    @rule()
    def a_step_fails(self) -> None:
        def refuse(batch: Batch) -> None:
            raise RuntimeError("no")

        self.bench.model.before = refuse
        self.bench.step()
        self.bench.model.before = lambda batch: None

    @rule(namespace=NAMESPACES, conversation=st.integers(0, 3))
    def nobody_comes(self, namespace: bytes, conversation: int) -> None:
        """In the end all is computed that there is memory for, and the engine sleeps."""
        self.bench.run()
        self.every_reply_is_that_of_its_ids_alone()
        self.expect(namespace, conversation, CONTEXT_LENGTH - 2)
        for _ in range(5000):
            if self.bench.core.wait_s is None and not self.elsewhere:
                break
            self.make_ids()
            self.step_once()
        assert self.expected.is_done
        cache, ids = self.bench.cache, ids_of(conversation, CONTEXT_LENGTH - 2)
        num_missing = len(ids) - cache.match((*ids, 31), namespace=namespace).num_tokens
        assert num_missing <= PAGE_SIZE or cache.pool.num_free <= 5 or cache.states is not None

    @invariant()
    def every_reply_is_that_of_its_ids_alone(self) -> None:
        for name, request in list(getattr(self, "live", {}).items()):
            outputs = self.bench.outputs.get(name, [])
            if not outputs or (outputs[-1].completion is None and outputs[-1].error is None):
                continue
            del self.live[name]
            if outputs[-1].error is None:
                is_recurrent = self.bench.cache.states is not None
                cold = alone(request.spec.prompt.ids, request.spec.params, is_recurrent=is_recurrent)
                assert self.bench.tokens(name) == cold

    @invariant()
    def nothing_else_is_found(self) -> None:
        if not hasattr(self, "bench"):
            return
        known = [(each.namespace, (*each.prompt.ids, *each.reply.token_ids)) for each in self.asked] + self.told
        for namespace in (b"a", b"b"):
            for conversation in range(4):
                ids = ids_of(conversation, CONTEXT_LENGTH)
                most = max((num_common(ids, other) for owner, other in known if owner == namespace), default=0)
                assert self.bench.cache.match(ids, namespace=namespace).num_tokens <= most

    @property
    def expected(self) -> ExpectedPrompts:
        assert self.bench.expected is not None
        return self.bench.expected


def num_common(ids: Sequence[int], others: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    pairs = zip(ids, others, strict=False)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(ids), len(others)))


TestEngineThatExpects = EngineThatExpects.TestCase
TestEngineThatExpects.settings = settings(
    max_examples=num_traces(60), stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
