"""Random lives of an engine core on a small pool: whatever is reused, each reply is that of its prompt's ids alone.

Clients talk by text, so that prompts meet in other ids than they were generated in; they ask several times at once, go
on, cancel; steps fail, caches are cleared, pages run out and requests are preempted. The law, warm == cold: a reply is
what the model says to the ids really used, with no engine, cache or company. Its KV is a digest of all before it, so
that any wrong page, row or id gives another reply. `traces.py` says how to run thousands.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.engine.step.plan import SchedulerPolicy
from radixlm.runtime.errors import StepFailed
from radixlm.runtime.model.batch import Batch, Float32Array
from radixlm.runtime.prefix.expected_prompts import ExpectedPrompt, ExpectedPrompts

from .. import toy_tokenizer as toy
from ..fake_model import Bench, FakeModel, alone
from ..traces import num_traces

CONTEXT_LENGTH = 160  # 10 pages
VOCAB_SIZE = max(toy.ID_OF.values()) + 1
SAID = np.array([toy.END, *(toy.ID_OF[letter.encode()] for letter in ("a", "b", " ")), *map(toy.ID_OF.get, toy.PIECES)])
TEXTS = st.text(alphabet="ab é", min_size=1, max_size=40)
NAMESPACES = st.sampled_from([b"", b"", b"", b"other"])
LAST = 8  # talks that clients go on with
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 1.0]),
    seed=st.integers(0, 3),
    max_tokens=st.sampled_from([1, 5, 30, 120]),
    stop_token_ids=st.just((toy.END,)),
)


def say_letters(logits: Float32Array) -> None:
    """Nothing but pieces of few letters, and the end of a turn."""
    kept = logits[:, SAID]
    logits[:] = -1e9
    logits[:, SAID] = kept


@dataclass
class Asked:
    """What a client sent: messages, the text of its prompt, and what it is to be answered with."""

    messages: tuple[str, ...]
    namespace: bytes
    prompt_ids: list[int]
    params: SamplingParams
    is_cancelled: bool = False


def prompt_of(messages: tuple[str, ...]) -> list[int]:
    """User, model, user, ... between marks, as a template renders it."""
    ids = [toy.BOS]
    for turn, text in enumerate(messages):
        ids += [toy.MODEL if turn % 2 else toy.USER, *toy.encode(text), toy.END]
    return [*ids, toy.MODEL]


class EngineOnASmallPool(RuleBasedStateMachine):
    """One engine and its clients."""

    @initialize(
        num_pages=st.integers(11, 18),
        budget=st.integers(4, 64),
        max_num_seqs=st.integers(1, 8),
        prompts_s=st.sampled_from([None, 0.01, 0.05]),
    )
    def start(self, num_pages: int, budget: int, max_num_seqs: int, prompts_s: float | None) -> None:
        policy = SchedulerPolicy(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, prompts_s=prompts_s)
        self.bench = Bench(num_pages, CONTEXT_LENGTH, policy, VOCAB_SIZE, FakeModel)

        def after(batch: Batch, logits: Float32Array) -> None:
            self.bench.now += 0.002 * len(batch.arrays.token_ids)  # so long does the step take
            say_letters(logits)

        self.bench.model.after = after
        self.expected = ExpectedPrompts(
            self.bench.model,
            self.bench.cache,
            context_length=CONTEXT_LENGTH,
            max_num_tokens=budget,
            clock=lambda: self.bench.now,
            aside=lambda work: work(),
            post=lambda work: work(),
        )
        self.asked: dict[str, Asked] = {}  # the plain dictionary, by request
        self.checked: set[str] = set()
        self.talks: list[tuple[bytes, tuple[str, ...]]] = [(b"", ())]  # of which clients may go on

    # What clients do.

    @rule(namespace=NAMESPACES, text=TEXTS, params=PARAMS, by_text=st.booleans())
    def begin(self, namespace: bytes, text: str, params: SamplingParams, by_text: bool) -> None:
        self.ask(namespace, (text,), params, by_text)

    @rule(
        data=st.data(), text=TEXTS, params=PARAMS, how=st.integers(0, 3), by_text=st.sampled_from([True, True, False])
    )
    def go_on(self, data: st.DataObject, text: str, params: SamplingParams, how: int, by_text: bool) -> None:
        namespace, messages = self.talks[data.draw(st.integers(0, len(self.talks) - 1), label="talk")]
        if how == 0 and messages:  # ask again
            self.ask(namespace, messages[: len(messages) // 2 * 2 - 1] or messages[:1], params, by_text)
        elif how == 1 and messages:  # with a history that was cut
            at = data.draw(st.integers(0, len(messages[-1])), label="at")
            self.ask(namespace, (*messages[:-1], messages[-1][:at], text), params, by_text)
        else:
            self.ask(namespace, (*messages, text), params, by_text)

    @rule(data=st.data(), count=st.integers(2, 4), params=PARAMS)
    def ask_several_times_at_once(self, data: st.DataObject, count: int, params: SamplingParams) -> None:
        namespace, messages = self.talks[data.draw(st.integers(0, len(self.talks) - 1), label="talk")]
        for seed in range(count):
            chosen = SamplingParams(temperature=1.0, seed=seed, max_tokens=params.max_tokens, stop_token_ids=(toy.END,))
            self.ask(namespace, (*messages, "ab ab"), chosen, True)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.live), label="request")
        self.asked[name].is_cancelled = True
        self.bench.abort(name)

    # What happens to the engine.

    @rule(count=st.integers(1, 30))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.bench.now += 0.05
            self.bench.step()

    @rule(data=st.data(), text=TEXTS, count=st.integers(1, 6))
    def expect(self, data: st.DataObject, text: str, count: int) -> None:
        namespace, messages = self.talks[data.draw(st.integers(0, len(self.talks) - 1), label="talk")]
        num_evicted = self.bench.cache.tree.eviction.num_evicted_pages
        self.expected.add(ExpectedPrompt(namespace, lambda: prompt_of((*messages, text))))
        for _ in range(count):
            if self.expected.has_work:
                self.expected.run()
                self.bench.core.check()
        assert self.bench.cache.tree.eviction.num_evicted_pages == num_evicted

    @rule()
    def run_to_the_end(self) -> None:
        self.bench.run()

    @precondition(lambda self: self.live)
    @rule()
    def fail_a_step(self) -> None:
        def refuse(batch: Batch) -> None:
            raise RuntimeError("no")

        self.bench.model.before = refuse
        self.bench.step()
        self.bench.model.before = lambda batch: None

    @rule(namespace=st.none() | NAMESPACES)
    def clear(self, namespace: bytes | None) -> None:
        self.bench.cache.clear(namespace)

    # The law.

    @property
    def live(self) -> list[str]:
        """Requests without an end."""
        return [name for name in self.asked if not self.is_over(name)]

    def is_over(self, name: str) -> bool:
        outputs = self.bench.outputs.get(name)
        return bool(outputs) and (outputs[-1].completion is not None or outputs[-1].error is not None)

    def ask(self, namespace: bytes, messages: tuple[str, ...], params: SamplingParams, by_text: bool) -> None:
        ids = prompt_of(messages)
        if len(ids) >= CONTEXT_LENGTH or len(self.live) > 8:
            return
        name = f"r{len(self.asked)}"
        spelled = (lambda: toy.spelled(ids)) if by_text else None
        self.asked[name] = Asked(messages, namespace, ids, params)
        self.bench.add(name, ids, params, namespace, spelled=spelled)

    @invariant()
    def every_reply_is_that_of_its_ids_alone(self) -> None:
        for name in list(getattr(self, "asked", ())):
            if name not in self.checked and self.is_over(name):
                self.checked.add(name)
                self.check(name, self.asked[name])

    def check(self, name: str, asked: Asked) -> None:
        output = self.bench.outputs[name][-1]
        if output.error is not None:
            assert isinstance(output.error, StepFailed)
            return
        completion = output.completion
        assert completion is not None
        used = completion.prompt_token_ids
        assert toy.spell_all(used) == toy.spell_all(asked.prompt_ids)
        said = self.bench.tokens(name)
        if not asked.is_cancelled or said:
            cold = alone(used, asked.params, context_length=CONTEXT_LENGTH, vocab_size=VOCAB_SIZE, after=say_letters)
            assert said == (cold[: len(said)] if asked.is_cancelled else cold)
        reply = toy.decode(said[:-1] if said and said[-1] == toy.END else said)
        self.talks = [*self.talks[-LAST:], (asked.namespace, (*asked.messages, reply))]

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        self.bench.run()
        self.every_reply_is_that_of_its_ids_alone()
        assert self.checked == set(self.asked)
        self.bench.cache.clear()
        assert self.bench.cache.pool.num_free == self.bench.num_pages


TestEngineOnASmallPool = EngineOnASmallPool.TestCase
TestEngineOnASmallPool.settings = settings(
    max_examples=num_traces(25), stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
