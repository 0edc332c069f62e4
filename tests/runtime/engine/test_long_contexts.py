"""What the engine does beside the model, at 16,000 and at 128,000 tokens: counted in calls and bytes, not in seconds.

A step may pass over its context by a few bytes a token: its pages, a comparison of encoded ids. The model's attention
reads thousands of bytes of each. Anything that handles tokens one by one, or in Python, is to be done once a request.
"""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from radixlm.runtime.artifact.manifest import PAGE_SIZE
from radixlm.runtime.engine.request import Request
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.engine.step.plan import SchedulerPolicy
from radixlm.runtime.model.batch import Batch, Float32Array, TopLogits

from ..fake_model import Bench, FakeModel

SHORT, LONG = 16_000, 128_000
VOCAB_SIZE, FIRST_SAID = 300_000, 250_000  # no token comes twice: nothing is guessed in the end, and all is looked for
STEP_BYTES = 8.0  # a step may handle for each token of a context; encoding the ids anew takes 12
REQUEST_BYTES = 100.0  # once a request
CALLS = 1.05  # times as many for a token, or a step, of a long context as of a short one
POLICY = SchedulerPolicy(max_num_seqs=4, prompts_s=0.05, speculates=True)


class NoModel(FakeModel):
    """Computes nothing, and says tokens that were never said before; a row takes some time on the bench's clock."""

    bench: Bench

    def __init__(self, num_pages: int, vocab_size: int) -> None:
        super().__init__(1, vocab_size)
        self.logits = np.zeros((1, vocab_size), np.float32)
        self.num_said = 0

    def forward(self, batch: Batch) -> Float32Array:
        self.bench.now += 0.02 + 0.0005 * batch.shape[0]
        return np.broadcast_to(self.logits, (batch.shape[3], self.vocab_size))

    def top_logits(self, num_rows: int, vocab_size: int) -> TopLogits:
        ids = np.arange(num_rows, dtype=np.int32)[:, None] + np.int32(FIRST_SAID + self.num_said)
        self.num_said += num_rows
        return TopLogits(np.zeros_like(ids, np.float32), ids, np.ones(num_rows, np.int32))


class Work(NamedTuple):
    """Calls of functions, Python's own among them, and the most bytes that were held at a time."""

    calls: int
    num_bytes: int

    @classmethod
    def of(cls, each: Iterable[Callable[[], object]]) -> Work:
        """What things to do take one after the other: calls of all, and the bytes of the one that holds most."""
        calls, num_bytes = 0, 0

        def count(frame: Any, event: str, argument: Any) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            for do in each:
                before = tracemalloc.get_traced_memory()[0]
                tracemalloc.reset_peak()
                sys.setprofile(count)
                do()
                sys.setprofile(None)
                num_bytes = max(num_bytes, tracemalloc.get_traced_memory()[1] - before)
        finally:
            sys.setprofile(None)
            tracemalloc.stop()
            gc.enable()
        return cls(calls, num_bytes)


class Long:
    """An engine core over prompts of `num_tokens`, with room for two and a half of them."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens, self._num_added = num_tokens, 0
        num_pages = int(2.5 * num_tokens) // PAGE_SIZE
        self.bench = Bench(num_pages, num_tokens + 8000, POLICY, VOCAB_SIZE, NoModel)
        assert isinstance(self.bench.model, NoModel)
        self.bench.model.bench = self.bench

    def ids(self, first: int = 0) -> list[int]:
        return list(range(first, first + self.num_tokens))

    def add(self, ids: Sequence[int], max_tokens: int = 6000) -> Request:
        self._num_added += 1
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        return self.bench.add(f"request {self._num_added}", ids, params)

    def steps(self, number: int) -> Iterator[Callable[[], object]]:
        return (self.bench.core.step for _ in range(number))

    def until(self, is_done: Callable[[], object]) -> Iterator[Callable[[], object]]:
        while not is_done():
            yield self.bench.core.step

    def answer(self, ids: Sequence[int]) -> Work:
        """To the first token of a prompt, which stays in the cache."""
        request = self.add(ids, max_tokens=1)
        return Work.of(self.until(lambda: request.is_finished))

    def decode(self, *prompts: Sequence[int]) -> list[Request]:
        """Requests that all decode."""
        requests = [self.add(ids) for ids in prompts]
        for step in self.until(lambda: all(request.num_generated > 32 for request in requests)):
            step()
        return requests

    def compute_most(self, request: Request) -> None:
        """Four fifths of a prompt."""
        for step in self.until(lambda: request.sequence and request.sequence.num_computed > 0.8 * self.num_tokens):
            step()


def both(work: Callable[[Long], Work]) -> tuple[Work, Work]:
    """What it takes with a short context and with a long one."""
    return work(Long(SHORT)), work(Long(LONG))


def assert_a_step_costs_the_same(short: Work, long: Work, num_bytes: float = STEP_BYTES) -> None:
    assert long.calls <= CALLS * short.calls
    assert long.num_bytes <= short.num_bytes + num_bytes * (LONG - SHORT)


def assert_a_token_costs_the_same(short: Work, long: Work) -> None:
    assert long.calls / LONG <= CALLS * short.calls / SHORT
    assert long.num_bytes <= short.num_bytes + REQUEST_BYTES * (LONG - SHORT)


def test_a_decode_step_takes_as_many_calls_behind_a_long_context() -> None:
    def decode(long: Long) -> Work:
        long.decode(long.ids())
        return Work.of(long.steps(96))

    assert_a_step_costs_the_same(*both(decode))


def test_a_part_of_a_prompt_costs_the_same_wherever_it_is() -> None:
    def parts(long: Long) -> Work:
        long.compute_most(long.add(long.ids()))
        return Work.of(long.steps(16))

    assert_a_step_costs_the_same(*both(parts))


def test_a_request_that_waits_for_another_to_compute_its_prompt_costs_the_same_in_each_step() -> None:
    """Its prompt was encoded, and compared with the other's page by page, in each step."""

    def wait(long: Long) -> Work:
        first, waits = long.add([*long.ids(), 1]), long.add([*long.ids(), 2])
        long.compute_most(first)
        work = Work.of(long.steps(16))
        assert waits.sequence is None
        return work

    assert_a_step_costs_the_same(*both(wait))


def test_a_request_for_which_there_is_no_room_costs_the_same_in_each_step() -> None:
    def wait(long: Long) -> Work:
        ids = long.ids()
        long.decode(ids, [5, *ids])
        quarter = len(ids) // 4
        waiting = [long.add([7, *ids]), long.add([*ids[:quarter], 8, *ids[quarter:]])]  # a quarter is cached
        for step in long.steps(2):  # they are looked up once, whatever that takes
            step()
        work = Work.of(long.steps(96))
        assert all(request.sequence is None for request in waiting)
        return work

    assert_a_step_costs_the_same(*both(wait))


@pytest.mark.parametrize("edited_at", [None, 0.7])
def test_what_a_prompt_takes_grows_with_its_tokens_and_no_faster(edited_at: float | None) -> None:
    """Computed, found cached with some tokens more, and found cached up to an edit."""

    def answer(long: Long) -> Work:
        ids = long.ids()
        computed = long.answer(ids)
        place = len(ids) if edited_at is None else int(edited_at * len(ids))
        found = long.answer([*ids[:place], 7, 8, *ids[place + 1 : place + 800]])
        return Work(computed.calls + found.calls, max(computed.num_bytes, found.num_bytes))

    assert_a_token_costs_the_same(*both(answer))


def test_a_fork_takes_as_many_calls_of_a_long_sequence() -> None:
    def fork(long: Long) -> Work:
        (request,), cache = long.decode(long.ids()), long.bench.cache
        return Work.of([lambda: cache.close(cache.fork(request.admitted, long.num_tokens - 5))])

    assert_a_step_costs_the_same(*both(fork), num_bytes=REQUEST_BYTES)
