"""A model that counts on, by reading its KV: prompts of consecutive integers show any page that is not their own.

Each row of KV is its token. The model says the number after the last one, or WRONG if the rows that it sees do not
count on from one another; after a JUMP anything may follow. `traces.py` says how to run thousands of traces.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
from radixlm.runtime.artifact.manifest import PAGE_SIZE
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.engine.step.plan import SchedulerPolicy
from radixlm.runtime.model.batch import Batch, Float32Array

from ..fake_model import Bench, FakeModel
from ..traces import num_traces

JUMP, WRONG, VOCAB_SIZE = 0, 1, 700
CONTEXT_LENGTH = 192
STARTS = (10, 200, 400)  # few, so that prompts begin alike; each has room for a context


class CountingModel(FakeModel):
    """Says what comes after the last row, if all rows count."""

    def forward(self, batch: Batch) -> Float32Array:
        arrays = batch.arrays
        self.num_tokens += len(arrays.token_ids)
        self.kv.reshape(-1)[arrays.slots] = arrays.token_ids  # a token sees rows of the same forward, never later ones
        self.logits = np.zeros((len(arrays.logit_rows), VOCAB_SIZE), np.float32)
        for row, index in enumerate(arrays.logit_rows):
            pages = arrays.page_table[arrays.row_of_token[index]]
            length = int(arrays.kv_lengths[index])
            assert length <= len(pages) * PAGE_SIZE
            self.logits[row, number_after(self.kv[pages].reshape(-1)[:length].astype(np.int64))] = 1.0
        return self.logits


def number_after(rows: np.ndarray) -> int:
    """The next number; WRONG if the rows do not count."""
    counts = (rows[1:] == rows[:-1] + 1) | (rows[1:] == JUMP) | (rows[:-1] == JUMP)
    return int(rows[-1]) + 1 if counts.all() and rows[-1] < VOCAB_SIZE - 1 else WRONG


@dataclass
class Asked:
    """A prompt, and how many numbers are to follow."""

    prompt: list[int]
    max_tokens: int
    is_cancelled: bool = False

    @property
    def expected(self) -> tuple[int, ...]:
        """The numbers after the prompt, as far as the context holds them."""
        room = min(self.max_tokens, CONTEXT_LENGTH - len(self.prompt))
        return tuple(range(self.prompt[-1] + 1, self.prompt[-1] + 1 + room))


class Trace:
    """One engine on a pool that is too small for its requests, and what clients do to it at random."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        policy = SchedulerPolicy(self.chance.randrange(1, 7), self.chance.randrange(3, 80))
        self.bench = Bench(self.chance.randrange(13, 30), CONTEXT_LENGTH, policy, VOCAB_SIZE, CountingModel)
        self.asked: dict[str, Asked] = {}

    def run(self) -> Bench:
        """Go through the trace, and hold each reply to what comes after its prompt."""
        for _ in range(30):
            self.chance.choice((self.begin, self.go_on, self.repeat, self.cancel, self.step, self.step))()
        while self.bench.core.has_work:
            self.step()
        for name, asked in self.asked.items():
            said = self.bench.tokens(name)
            assert said == (asked.expected[: len(said)] if asked.is_cancelled else asked.expected), (name, asked)
        return self.bench

    def begin(self) -> None:
        self.ask(self.numbers(100))

    def go_on(self) -> None:
        """The next turn, or another one after part of an earlier prompt."""
        if self.asked:
            name, asked = self.chance.choice(list(self.asked.items()))
            said = self.bench.tokens(name) if self.is_over(name) else ()
            before = [*asked.prompt, *said]
            if self.chance.random() < 0.5:
                before = before[: self.chance.randrange(1, len(before) + 1)]
            self.ask([*before, JUMP, *self.numbers(30)])

    def repeat(self) -> None:
        """Several of one prompt at once."""
        if self.asked:
            asked = self.chance.choice(list(self.asked.values()))
            for _ in range(self.chance.randrange(1, 4)):
                self.ask(asked.prompt)

    def cancel(self) -> None:
        live = [name for name in self.asked if not self.is_over(name)]
        if live:
            name = self.chance.choice(live)
            self.asked[name].is_cancelled = True
            self.bench.abort(name)

    def step(self) -> None:
        self.bench.step()  # with all that can be checked
        for _ in range(self.chance.randrange(8)):
            self.bench.now += 0.05
            for output in self.bench.core.step():
                self.bench.outputs.setdefault(output.request_id, []).append(output)

    def numbers(self, most: int) -> list[int]:
        start = self.chance.choice(STARTS)
        return list(range(start, start + self.chance.randrange(1, most)))

    def is_over(self, name: str) -> bool:
        outputs = self.bench.outputs.get(name)
        return bool(outputs) and outputs[-1].completion is not None

    def ask(self, prompt: list[int]) -> None:
        if len(prompt) < CONTEXT_LENGTH and len(self.asked) < 40:
            name = f"r{len(self.asked)}"
            self.asked[name] = Asked(prompt, self.chance.randrange(1, 80))
            params = SamplingParams(temperature=0.0, max_tokens=self.asked[name].max_tokens, ignore_eos=True)
            self.bench.add(name, prompt, params)


def test_the_oracle_notices_a_row_of_another_sequence() -> None:
    assert number_after(np.array([10, 11, 12, JUMP, 400, 401])) == 402
    assert number_after(np.array([10, 11, 212, 13])) == WRONG
    assert number_after(np.array([10, 11, 13])) == WRONG
    assert number_after(np.array([10, 2**51, 12])) == WRONG


def test_every_reply_counts_on() -> None:
    num_preemptions = num_evicted = num_reused = 0
    for seed in range(num_traces(60)):
        bench = Trace(seed).run()
        num_preemptions += bench.core.num_preemptions
        num_evicted += bench.cache.stats().num_evicted_pages
        num_reused += bench.cache.stats().num_reused_tokens
        bench.cache.clear()
        assert bench.cache.pool.num_free == bench.num_pages
    assert min(num_preemptions, num_evicted, num_reused) > 60, "traces that try nothing"
