"""ExLlamaV2 (doc/dynamic.md, #507) computes of [400 prefix][200 middle][80-82 suffix] 680 tokens once, then 80-82.
Ours does the same with pages of 16 whose rows are copied, and on going back, rotating the middle and cancelling, too.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator

import pytest
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.engine.step.plan import SchedulerPolicy

from ..runtime.fake_model import EOS, Bench, alone

REPLY = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1)
CONTEXT_LENGTH = 1024
EXLLAMA_V2_HIT_RATE = 0.88  # of the later prompts' tokens: 600 of 680 to 682


class Client:
    """Sends prompts to one engine, and counts what the model computes for each."""

    def __init__(self, num_pages: int = 600) -> None:
        policy = SchedulerPolicy(max_num_seqs=8, max_num_batched_tokens=256)
        self.bench = Bench(num_pages, CONTEXT_LENGTH, policy)
        self.num_prompt_tokens = self.num_prefilled = 0
        self._names = map(str, range(1000))

    def ask(self, prompt: list[int], params: SamplingParams = REPLY) -> int:
        """Tokens of the prompt that were computed."""
        name, before = next(self._names), self.bench.model.num_tokens
        self.bench.add(name, prompt, params)
        while self.bench.core.has_work:  # checked once a request: 300 steps make no difference to it
            for output in self.bench.core.step():
                self.bench.outputs.setdefault(name, []).append(output)
        self.bench.core.check()
        self.reply = self.bench.tokens(name)
        num_prefilled = self.bench.model.num_tokens - before - (len(self.reply) - 1)
        self.num_prompt_tokens += len(prompt)
        self.num_prefilled += num_prefilled
        return num_prefilled


def parts(seed: int, *lengths: int) -> Iterator[list[int]]:
    """Random tokens; parts of one seed begin with different ones, so that none is found by chance."""
    chance = random.Random(seed)
    for first, length in enumerate(lengths):
        yield [first, *(chance.randrange(EOS) for _ in range(length - 1))]


def test_exllama_suffixes() -> None:
    prefix, middle, other_middle, *suffixes = parts(1, 400, 200, 200, 80, 81, 82, 80, 81, 82, 80, 81, 82)
    client = Client()
    assert client.ask([*prefix, *middle, *suffixes[0]]) == 680
    assert client.reply == alone([*prefix, *middle, *suffixes[0]], REPLY, context_length=CONTEXT_LENGTH)
    client.num_prompt_tokens = client.num_prefilled = 0
    for suffix in suffixes[1:6]:  # 600 is 37 pages and 8 rows: the rows are copied, so that no token more is computed
        assert client.ask([*prefix, *middle, *suffix]) == len(suffix)
    hit_rate = 1 - client.num_prefilled / client.num_prompt_tokens
    print(f"hit rate of the later prompts: {hit_rate:.1%}; ExLlamaV2: {EXLLAMA_V2_HIT_RATE:.0%}")
    assert hit_rate >= EXLLAMA_V2_HIT_RATE
    assert client.reply == alone([*prefix, *middle, *suffixes[5]], REPLY, context_length=CONTEXT_LENGTH)

    assert client.ask([*prefix, *other_middle, *suffixes[6]]) == 200 + len(suffixes[6])
    assert client.ask([*prefix, *middle, *suffixes[7]]) == len(suffixes[7]), "going back to the earlier middle"
    assert client.ask([*prefix, *other_middle, *suffixes[8]]) == len(suffixes[8])
    assert client.ask([*prefix, *middle, *suffixes[0]], ONE_TOKEN) == 1, "the very first prompt"


def test_exllama_rotating_middle() -> None:
    prefix, tail, *chunks = parts(2, 400, 20, *[50] * 20)
    chunk_of = dict(zip(string.ascii_lowercase, chunks, strict=False))
    client = Client()

    def ask(middle: str) -> int:
        tokens = [token for letter in middle for token in chunk_of[letter]]
        return client.ask([*prefix, *tokens, 25, *tail[1:]], ONE_TOKEN)

    assert ask("abcd") == 400 + 4 * 50 + 20
    for stop in range(5, 11):
        assert ask("abcdefghij"[:stop]) == 50 + 20, "one chunk more, and what comes after"
    assert ask("qrst") == 4 * 50 + 20, "of a middle that begins otherwise the prefix is true still"
    assert ask("qrs") == 20
    assert ask("abcdef") == 1, "as it was asked before"
    assert ask("abcdeq") == 50 + 20
    assert ask("bcde") == 4 * 50 + 20


@pytest.mark.parametrize("num_steps", [1, 2, 17, 33, 150])
def test_exllama_cancelled_reply_keeps_what_is_true(num_steps: int) -> None:
    prefix, middle, suffix, more = parts(3, 400, 200, 81, 30)
    prompt = [*prefix, *middle, *suffix]
    client = Client()
    bench = client.bench
    request = bench.add("cancelled", prompt, REPLY)
    while request.num_generated < num_steps:
        bench.step()
    bench.abort("cancelled")
    said = list(bench.tokens("cancelled"))
    assert len(said) == num_steps
    # the next prompt goes on from the words that the client had seen; the last of them was never computed
    assert client.ask([*prompt, *said, *more]) == 1 + len(more)
    assert client.reply == alone([*prompt, *said, *more], REPLY, context_length=CONTEXT_LENGTH)
    assert client.ask(prompt, ONE_TOKEN) == 1
    assert client.reply == tuple(said[:1])


def test_exllama_pages_are_shared_among_live_requests() -> None:
    prefix, middle, *suffixes = parts(4, 400, 200, 80, 81, 82)
    client = Client()
    client.ask([*prefix, *middle, *suffixes[0]], ONE_TOKEN)
    bench, before = client.bench, client.bench.model.num_tokens
    requests = [bench.add(str(len(s)), [*prefix, *middle, *s], REPLY) for s in suffixes[1:]]
    while any(request.num_generated < 10 for request in requests):
        bench.step()
    one, two = (request.admitted for request in requests)
    assert one.page_ids[:37] == two.page_ids[:37], "600 tokens are 37 whole pages"
    assert bench.model.num_tokens - before == 81 + 82 + sum(request.num_generated - 1 for request in requests)
