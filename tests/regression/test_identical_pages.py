"""vLLM V1: block tables only grow, so blocks that two requests computed at once stay twice ("no dedup", by design).
Ours keeps one of them as soon as both are full: the other request goes on with it and its own page is free again.
"""

from __future__ import annotations

from radixlm.runtime.cache.page_pool import PagePool
from radixlm.runtime.cache.prefix_cache import PrefixCache
from radixlm.runtime.engine.sampling_params import SamplingParams

from ..runtime.fake_model import Bench, alone

GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)


def test_identical_pages_of_one_step_keep_one_copy() -> None:
    cache = PrefixCache(PagePool(8))
    one, two = (cache.open(cache.match(range(40)), context_length=64) for _ in range(2))
    with cache.begin() as transaction:
        transaction.reserve(one, 40)
        transaction.reserve(two, 40)
        assert cache.pool.num_in_use == 6
        transaction.commit()
    cache.check()
    assert one.page_ids[:2] == two.page_ids[:2]
    assert one.page_ids[2] != two.page_ids[2], "a partial page is its sequence's own"
    assert cache.pool.num_in_use == 4


def test_identical_pages_of_replies_written_at_once_keep_one_copy() -> None:
    bench = Bench(num_pages=20)
    prompt = list(range(33))
    bench.add("before", prompt, SamplingParams(temperature=0.0, max_tokens=1))
    bench.run()  # the prompt is there: the next two begin in the same step
    one, two = (bench.add(name, prompt, GREEDY) for name in ("one", "two"))
    most_in_use = 0
    while bench.core.has_work:
        bench.step()
        if one.sequence and two.sequence and not one.is_finished:
            num_full = one.admitted.num_computed // 16
            assert one.admitted.num_computed == two.admitted.num_computed
            assert one.admitted.page_ids[:num_full] == two.admitted.page_ids[:num_full]
            most_in_use = max(most_in_use, bench.cache.stats().num_in_use_pages)
    assert bench.tokens("one") == bench.tokens("two") == alone(prompt, GREEDY)
    assert most_in_use == -(-(33 + 59) // 16) + 1, "all pages once, but for the last"
