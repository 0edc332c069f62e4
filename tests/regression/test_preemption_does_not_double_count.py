"""mlc-llm since #2295, behind #2766: preemption put generated tokens into the radix tree twice, 364 for a KV of 202.
Ours has each token once in sequence, tree, pages and usage, however often the request was preempted.
"""

from __future__ import annotations

from radixlm.runtime.cache.page_pool import PagePool
from radixlm.runtime.cache.prefix_cache import PrefixCache
from radixlm.runtime.cache.sequence import Sequence
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.engine.step.plan import SchedulerPolicy

from ..runtime.fake_model import Bench, alone


def compute(cache: PrefixCache, sequence: Sequence) -> None:
    with cache.begin() as transaction:
        transaction.reserve(sequence, sequence.num_uncomputed)
        transaction.commit()
    cache.check()


def test_preemption_does_not_double_count_in_the_tree() -> None:
    cache = PrefixCache(PagePool(32))
    prompt = list(range(1000, 1040))
    sequence = cache.open(cache.match(prompt), context_length=256)
    compute(cache, sequence)
    for token in range(162):
        sequence.append([token])
        compute(cache, sequence)
    assert (len(sequence), sequence.num_computed) == (202, 202)
    tokens, flags = list(sequence.token_ids), sequence.generated

    cache.preempt(sequence)
    cache.check()
    assert (list(sequence.token_ids), sequence.num_computed, len(sequence.page_ids)) == (tokens, 0, 0)
    assert cache.stats().num_in_use_pages == 0
    assert cache.resume(sequence) == 201
    compute(cache, sequence)
    assert (list(sequence.token_ids), sequence.num_computed, sequence.generated) == (tokens, 202, flags)
    cache.close(sequence)
    assert max(len(run) for _, run, _ in cache.tree.paths()) == 202, "as long as the KV, not 40 + 2 x 162"


def test_preemption_does_not_double_count_in_usage_and_pages() -> None:
    bench = Bench(num_pages=14, context_length=200, policy=SchedulerPolicy(max_num_seqs=8, max_num_batched_tokens=24))
    params = SamplingParams(seed=3, max_tokens=100, ignore_eos=True)
    prompts = {name: [which] * 20 for which, name in enumerate("abc")}
    requests = [bench.add(name, ids, params) for name, ids in prompts.items()]
    bench.run()  # which compares every page count with its owners after every step
    assert sum(request.num_preemptions for request in requests) >= 2
    for request in requests:
        tokens = bench.tokens(request.request_id)
        assert tokens == alone(prompts[request.request_id], params, context_length=200)
        completion = bench.outputs[request.request_id][-1].completion
        assert completion is not None
        usage = completion.usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (20, 100, 0)
        assert request.admitted.generated == bytes(20) + bytes([1] * 100)
    counters = bench.core.counters
    assert (counters.num_prompt_tokens, counters.num_cached_tokens, counters.num_generated_tokens) == (60, 0, 300)
    runs = [tuple(run) for _, run, _ in bench.cache.tree.paths()]
    whole = [(*ids, *bench.tokens(name)) for name, ids in prompts.items()]
    assert all(any(run == one[: len(run)] for one in whole) for run in runs), "a run that nobody computed"
    stats = bench.cache.stats()
    assert (stats.num_in_use_pages, stats.num_sequences) == (0, 0)
