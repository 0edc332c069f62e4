"""llama.cpp's slots and vLLM's same-step blocks: requests that arrive together with one new prefix each compute it.
Ours compute it once: the others wait for the one that is at work on it, and take its pages.
"""

from __future__ import annotations

import pytest
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.engine.step.plan import SchedulerPolicy

from ..runtime.fake_model import Bench, alone

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


def test_same_new_prompt_of_four_requests_is_computed_once() -> None:
    bench = Bench(num_pages=32)
    for name in "abcd":
        bench.add(name, range(33), GREEDY)
    bench.run()
    assert bench.model.num_tokens == 33 + 3 * 1 + 4 * (len(bench.tokens("a")) - 1)
    assert {bench.tokens(name) for name in "abcd"} == {alone(range(33), GREEDY)}


@pytest.mark.parametrize("budget", [8, 16, 24, 512])
@pytest.mark.parametrize("delay", [0, 1, 2, 5])
def test_same_new_prefix_of_two_live_requests_is_computed_once(budget: int, delay: int) -> None:
    policy = SchedulerPolicy(max_num_seqs=8, max_num_batched_tokens=budget)
    bench = Bench(num_pages=40, context_length=200, policy=policy)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    prefix = [(7 * i) % 39 for i in range(100)]
    prompts = {"a": [*prefix, 1, 2, 3], "b": [*prefix, 4, 5, 6, 7]}
    bench.add("a", prompts["a"], params)
    for _ in range(delay):
        bench.step()
    bench.add("b", prompts["b"], params)
    bench.run()
    for name, ids in prompts.items():
        assert bench.tokens(name) == alone(ids, params, context_length=200)
    num_rows_of_a_partial_page = 100 % 16  # pages are shared among live requests, rows of a partial one when it ends
    assert bench.model.num_tokens <= 103 + 4 + num_rows_of_a_partial_page + 2 * 19
