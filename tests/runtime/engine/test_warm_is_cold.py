"""On a real compiled model: what a warm cache gives is what a cold one gives for the ids really used, bit for bit.

Talks at random, by text, with the model's own replies, which are hardly ever the encoding of their text; some are
cancelled. Each reply is asked for again in a namespace where nothing is cached, by the ids that the first one used.
`traces.py` says how to run thousands.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from radixlm.runtime.engine.engine import Completion, Engine, Message, SamplingParams

from ..traces import num_traces

WORDS = ("he", "hein", "in", "the", "tree", "trees", "ein", "eine,", "what", "é", "of?", "漢字", "a-tree", "", "the\n")
# the tokens of single letters: the tiny tokenizer makes `he`, `in` and more of them
LETTERS = {ord(letter) + 3: 30.0 for letter in "hein tr"}


@pytest.fixture(scope="module")
def engine(tiny_artifact: Path) -> Iterator[Engine]:
    with Engine(tiny_artifact, kv_cache_bytes=1 << 20, max_num_seqs=4, max_num_batched_tokens=48) as engine:
        yield engine


def test_warm_is_cold_bit_for_bit(engine: Engine) -> None:
    kinds: Counter[str] = Counter()
    for seed in range(num_traces(40)):
        for completion, params, namespace in talk(engine, random.Random(seed)):
            kinds.update(completion.usage.tokens_by_kind)
            cold = engine.generate(completion.prompt_token_ids, params, namespace=namespace, cache_match="exact")
            assert cold.usage.cached_tokens == 0
            assert cold.prompt_token_ids == completion.prompt_token_ids
            num_tokens = len(completion.token_ids)
            if completion.finish_reason != "cancelled":
                assert cold.token_ids == completion.token_ids
            assert cold.token_ids[:num_tokens] == completion.token_ids
            assert completion.logprobs is not None and cold.logprobs is not None
            assert cold.logprobs[:num_tokens] == completion.logprobs  # floats, and equal
            engine.clear_cache(namespace)
    assert min(kinds[kind] for kind in ("exact", "text")) > 200, kinds


def talk(engine: Engine, chance: random.Random) -> Iterator[tuple[Completion, SamplingParams, bytes]]:
    """The replies of one conversation, each with a namespace of its own."""
    messages: list[Message] = []
    for _ in range(chance.randrange(1, 5)):
        messages.append({"role": "user", "content": " ".join(chance.choices(WORDS, k=chance.randrange(1, 6)))})
        params = SamplingParams(
            temperature=1.0, seed=chance.randrange(99), max_tokens=24, logprobs=3, ignore_eos=True, logit_bias=LETTERS
        )
        several = [replace(params, seed=seed) for seed in range(chance.choice((0, 0, 2)))]  # n > 1
        streams = [engine.stream_chat(messages, one) for one in (params, *several)]
        if chance.random() < 0.3:
            for count, _ in enumerate(streams[0]):
                if count == 5:
                    break  # which cancels it
        for stream, used in zip(streams, (params, *several), strict=True):
            yield stream.result(), used, chance.randbytes(8)
        messages.append({"role": "assistant", "content": streams[0].result().text})
        if len(engine.render(messages)) > 250:
            return
