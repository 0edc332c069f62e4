"""Measure the cost of matching and inserting a prompt in the index of cached tokens, by the size of the index.

    python -m bench.cache.match_cost

Pages, tree and cache are the engine's own; there is no model and no tokenizer: ids and their texts are made up. The
index is filled with conversations (a few system prompts; turns of clients and generated ones; half of them continue an
earlier one). Measured are matching a prompt that is cached except for its last token, by its ids (`match`) and by its
text, with other ids; and `insert`, all that the cache does for a prompt that is not cached: `match`, `open`, one step's
`reserve` and `commit`, `close`. The bar is for match and insert together, for n tokens: 50 us + 1 us x n, at 1,000,000
cached tokens.
"""

from __future__ import annotations

import gc
import random
import statistics
import tracemalloc
from collections.abc import Callable, Sequence
from functools import cache as cached
from time import perf_counter

from radixlm.runtime.artifact.manifest import PAGE_SIZE
from radixlm.runtime.cache.page_pool import PagePool
from radixlm.runtime.cache.prefix_cache import PrefixCache
from radixlm.runtime.cache.sequence import Sequence as CachedSequence
from radixlm.tokenizer_fix import SpelledPrompt
from radixlm.tokenizer_fix.spelled_prompt import special_mark

from ..options import read_options
from ..report.page import publish

CACHED_TOKENS = (10_000, 100_000, 1_000_000)
PROMPT_TOKENS = (16, 64, 512, 4096, 16384)
ROUNDS = 15
VOCAB_SIZE = 1 << 15
SYSTEMS, SYSTEM_TOKENS, TURN_TOKENS, EARLIER = 5, 200, (20, 300), 50


def main() -> None:
    """Measure the cost of matching and inserting prompts by the size of the index; print and write the results."""
    read_options(__doc__)
    sizes = [measure(num_cached, PROMPT_TOKENS) for num_cached in CACHED_TOKENS]
    publish("match_cost", {"bar": {"s": 50e-6, "s_per_token": 1e-6}, "sizes": sizes})


def measure(num_cached: int, prompt_tokens: Sequence[int]) -> dict[str, object]:
    """Return the memory of a cache with `num_cached` tokens, and the times of prompts of these numbers of tokens."""
    chance = random.Random(num_cached)
    room = ROUNDS * sum(2 * (tokens // PAGE_SIZE + 2) for tokens in prompt_tokens)
    cache = PrefixCache(PagePool(num_cached // PAGE_SIZE + room))
    tracemalloc.start()
    fill(cache, num_cached, chance)
    gc.collect()
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    cached_tokens = cache.pool.num_cached * PAGE_SIZE
    num_nodes = cache.stats().num_nodes
    rows = [times_of(cache, num_tokens, chance) for num_tokens in prompt_tokens]
    return {
        "cached_tokens": cached_tokens,
        "num_nodes": num_nodes,
        "bytes_per_token": num_bytes / cached_tokens,
        "prompts": rows,
    }


def fill(cache: PrefixCache, num_cached: int, chance: random.Random) -> None:
    """Insert conversations until the cache has `num_cached` tokens."""
    systems = [tokens(chance, SYSTEM_TOKENS) for _ in range(SYSTEMS)]
    earlier: list[list[int]] = []
    while cache.pool.num_cached * PAGE_SIZE < num_cached:
        goes_on = earlier and chance.random() < 0.5
        before = chance.choice(earlier) if goes_on else chance.choice(systems)
        prompt = before + tokens(chance, chance.randrange(*TURN_TOKENS))
        reply = tokens(chance, chance.randrange(*TURN_TOKENS))
        serve_request(cache, prompt, reply)
        earlier = [*earlier[-EARLIER:], prompt + reply]


def times_of(cache: PrefixCache, num_tokens: int, chance: random.Random) -> dict[str, float]:
    """Time prompts of one length, each new to the cache before it is inserted; medians of the rounds, in seconds."""
    prompts = [tokens(chance, num_tokens) for _ in range(ROUNDS)]
    insert_s = median_of(lambda number: serve_request(cache, prompts[number]))
    match_s = median_of(lambda number: match_once(cache, prompts[number]))
    mark, spell = VOCAB_SIZE - 1, spellings().__getitem__
    replies = [tokens(chance, num_tokens) for _ in range(ROUNDS)]
    for number, reply in enumerate(replies):
        serve_request(cache, [mark, number], [*reply, 0])
    texts = [SpelledPrompt((mark, number, *halves(reply), mark), spell, refuse) for number, reply in enumerate(replies)]
    text_s = median_of(lambda number: match_once(cache, texts[number].ids, texts[number]))
    return {"tokens": num_tokens, "insert_s": insert_s, "match_s": match_s, "text_match_s": text_s}


def serve_request(cache: PrefixCache, prompt: Sequence[int], reply: Sequence[int] = ()) -> None:
    """Do all that the cache does for a request: match, run a step for the prompt and one for the reply, and close."""
    match = cache.match(prompt)
    sequence = cache.open(match, context_length=len(prompt) + len(reply))
    run_step(cache, sequence)
    if reply:
        sequence.append(reply)
        run_step(cache, sequence)
    cache.close(sequence)


def run_step(cache: PrefixCache, sequence: CachedSequence) -> None:
    """Reserve pages for the uncomputed tokens of a sequence, and commit them as if the model had computed them."""
    with cache.begin() as transaction:
        transaction.reserve(sequence, sequence.num_uncomputed)
        transaction.commit()


def match_once(cache: PrefixCache, prompt: Sequence[int], text: SpelledPrompt | None = None) -> None:
    """Match a prompt that is cached except for its last token."""
    match = cache.match(prompt, spelled=None if text is None else lambda: text)
    assert match.num_tokens == len(match.prompt_ids) - 1


def tokens(chance: random.Random, num_tokens: int) -> list[int]:
    """Return random ids that are text."""
    return [chance.randrange(VOCAB_SIZE - 1) for _ in range(num_tokens)]


def halves(token_ids: Sequence[int]) -> list[int]:
    """Return other ids with the same text, two half tokens for each."""
    return [VOCAB_SIZE + half for token_id in token_ids for half in (token_id >> 8, token_id & 255)]


def spelling(token_id: int) -> bytes:
    """Return the text of a token id: four letters, or two if the id is half of such a token.

    The last id of the vocabulary is a special token.
    """
    if token_id == VOCAB_SIZE - 1:
        return special_mark(token_id)
    width = 8 if token_id >= VOCAB_SIZE else 16
    return bytes(97 + (token_id >> shift & 15) for shift in range(width - 4, -1, -4))


@cached
def spellings() -> list[bytes]:
    """Return the texts of all ids, as a tokenizer's table: only the walk is measured."""
    return [spelling(token_id) for token_id in range(VOCAB_SIZE + 256)]


def refuse(text: str) -> list[int]:
    """Raise, because tokenization is not measured, and nothing here needs it."""
    raise AssertionError(text)


def median_of(action: Callable[[int], None]) -> float:
    """Time `action(round)` in each of `ROUNDS`; return the median in seconds."""
    times = []
    for number in range(ROUNDS):
        start = perf_counter()
        action(number)
        times.append(perf_counter() - start)
    return statistics.median(times)


if __name__ == "__main__":
    main()
