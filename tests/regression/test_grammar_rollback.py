"""mlc-llm (jump_forward, its default): JSON mode pops KV, the radix tree is not told, and its stale tokens are reused.
Ours pops from the one token list that tree, pages and KV follow: what is found afterwards holds what it says.
"""

from __future__ import annotations

import random

from radixlm.runtime.page_pool import PagePool
from radixlm.runtime.prefix_cache import PrefixCache
from radixlm.runtime.sequence import Sequence

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
        with self.cache.begin() as step:
            reservation = step.reserve(sequence, num_tokens)
            self.pages.copy(step.copies)
            self.pages.forward(reservation)
            step.commit()
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
