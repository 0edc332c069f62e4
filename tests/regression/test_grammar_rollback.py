"""mlc-llm (jump_forward, its default): JSON mode pops KV, the radix tree is not told, and its stale tokens are reused.
Ours pops from the one token list that tree, pages and KV follow: what is found afterwards holds what it says. Nor does
a grammar here ever take back a token: it is asked before one is chosen, and told of one when the sequence has it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from radixlm.runtime.cache.page_pool import PagePool
from radixlm.runtime.cache.prefix_cache import PrefixCache
from radixlm.runtime.cache.sequence import Sequence
from radixlm.runtime.chat.grammar import Grammar
from radixlm.runtime.chat.grammar_trial_process import TokenBytes
from radixlm.runtime.chat.grammars import Grammars
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.engine.step.plan import SchedulerPolicy

from ..runtime.fake_model import EOS, Bench, alone, text_of
from ..runtime.fake_pages import FakePages


class Writer:
    """A cache whose pages are looked at after every step."""

    def __init__(self, num_pages: int) -> None:
        self.cache, self.pages = PrefixCache(PagePool(num_pages)), FakePages()

    def open(self, prompt: list[int]) -> Sequence:
        sequence = self.cache.open(self.cache.match(prompt), context_length=400)
        self.compute(sequence)
        return sequence

    def compute(self, sequence: Sequence) -> int:
        """How many tokens had to be computed."""
        num_tokens = sequence.num_uncomputed
        with self.cache.begin() as transaction:
            reservation = transaction.reserve(sequence, num_tokens)
            self.pages.copy(transaction.copies)
            self.pages.forward(reservation)
            transaction.commit()
        self.check(sequence)
        return num_tokens

    def check(self, *sequences: Sequence) -> None:
        """Tree and sequences say what the rows hold."""
        self.cache.check()
        for sequence in sequences:
            tokens = list(sequence.token_ids)[: sequence.num_computed]
            self.pages.check(b"", tokens, list(sequence.page_ids))
        for namespace, run, page_ids in self.cache.tree.paths():
            self.pages.check(namespace, run, page_ids)


def test_grammar_rollback_within_a_page_and_over_pages() -> None:
    writer = Writer(40)
    sequence = writer.open(list(range(40)))
    for num_popped in (3, 8, 16, 17, 33):
        reply = list(range(100, 150))
        sequence.append(reply)
        assert writer.compute(sequence) == 50
        sequence.pop(num_popped)
        assert sequence.num_computed == len(sequence) == 90 - num_popped
        jumped = [200 + num_popped] * 7  # what the grammar allows here and nothing else
        sequence.append(jumped)
        assert writer.compute(sequence) == 7
        told = [*range(40), *reply[: 50 - num_popped], *jumped]
        assert list(sequence.token_ids) == told
        assert writer.cache.match([*told, 5]).num_tokens >= len(told) // 16 * 16
        # a later prompt with the popped tokens gets rows of exactly these, or computes them
        popped = writer.open([*range(40), *reply, 5])
        writer.check(sequence, popped)
        writer.cache.close(popped)
        sequence.pop(len(sequence) - 40)
    writer.cache.close(sequence)
    writer.check()


def test_grammar_rollback_at_random() -> None:
    chance = random.Random(7)
    writer = Writer(24)
    for _ in range(60):
        sequence = writer.open([1] * chance.randrange(1, 40) + [chance.randrange(3)])
        for _ in range(chance.randrange(8)):
            sequence.append([chance.randrange(2) for _ in range(chance.randrange(1, 20))])
            writer.compute(sequence)
            sequence.pop(chance.randrange(min(30, len(sequence) - 1)))
            writer.check(sequence)
        if sequence.num_uncomputed == 0:
            sequence.append([chance.randrange(2)])
        writer.cache.close(sequence, keep=chance.random() < 0.8)
        writer.check()
    assert writer.cache.stats().num_evicted_pages > 0


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    """Of the letters that the fake model says."""
    grammars = Grammars(lambda: TokenBytes([text_of([i]).encode() for i in range(EOS)] + [b"</s>"], [EOS], EOS), (EOS,))
    yield grammars
    grammars.close()


def test_structured_replies_survive_preemption_and_leave_a_cache_that_says_what_it_holds(grammars: Grammars) -> None:
    """In a pool that holds a third of them, with others beside them; then each reply is asked for again as a prompt."""
    chance = random.Random(3)
    structure = grammars.compile(Grammar("regex", "(AB|C[D-H]{3}|[IJ]K?){10,60}"))
    bench = Bench(num_pages=20, policy=SchedulerPolicy(max_num_seqs=12, max_num_batched_tokens=48))
    wanted = {}
    for i in range(24):
        ids = [1] * 16 + [chance.randrange(EOS) for _ in range(chance.randrange(1, 16))]
        params = SamplingParams(temperature=chance.choice([0.0, 1.0]), seed=i, max_tokens=chance.randrange(10, 40))
        wanted[f"r{i}"] = (ids, params, i % 3 > 0)
        bench.add(f"r{i}", ids, params, constraint=structure.start() if i % 3 else None)
    bench.run()
    assert bench.core.num_preemptions > 0
    for name, (ids, params, is_structured) in wanted.items():
        tokens = bench.tokens(name)
        assert tokens == alone(ids, params, constraint=structure.start() if is_structured else None)
        if is_structured:
            again = structure.start()
            for token in tokens:
                again.accept(token)  # or it raises
        later = [*ids, *tokens, 3]
        if len(later) < 90:
            bench.add(f"{name} later", later, params)
            bench.run()
            assert bench.tokens(f"{name} later") == alone(later, params)
