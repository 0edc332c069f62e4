"""mlc-llm #2766: under 50 requests the radix tree said 364 tokens, the KV had 202, and a pop of 304 killed the engine.
Ours has one length for both: the pop is refused with PopLengthError to that request alone, and the engine goes on.
"""

from __future__ import annotations

import pytest
from radixlm.runtime.engine.request import Request
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.errors import AppendLengthError, ForkLengthError, PopLengthError, UnknownSequence

from ..runtime.fake_model import Bench, LetterDecoder, alone

OTHERS = {f"other{i}": [4, i] * 20 for i in range(3)}
OF_OTHERS = SamplingParams(seed=2, max_tokens=60, ignore_eos=True)


class PoppingDecoder(LetterDecoder):
    """Stands for what rolls a reply back within its step, a grammar or a stop string, and asks for too much."""

    def __init__(self) -> None:
        self.request: Request | None = None

    def push(self, token_id: int) -> str:
        assert self.request is not None
        if len(self.request.admitted) == 202:
            self.request.admitted.pop(304)
        return super().push(token_id)


def bench_with_others() -> Bench:
    bench = Bench(num_pages=30, context_length=256)
    for name, ids in OTHERS.items():
        bench.add(name, ids, OF_OTHERS)
    return bench


def test_pop_length_fails_its_request_alone() -> None:
    bench = bench_with_others()
    decoder = PoppingDecoder()
    decoder.request = bench.add("victim", [3] * 40, SamplingParams(seed=1, ignore_eos=True), decoder=decoder)
    bench.run()
    error = bench.error("victim")
    assert isinstance(error, PopLengthError)
    assert (error.length, error.pop) == (202, 304)
    for name, ids in OTHERS.items():
        assert bench.tokens(name) == alone(ids, OF_OTHERS, context_length=256)
    bench.add("later", [3] * 40, OF_OTHERS)
    bench.run()
    assert bench.tokens("later") == alone([3] * 40, OF_OTHERS, context_length=256)


def test_pop_length_refused_changes_nothing() -> None:
    bench = bench_with_others()
    params = SamplingParams(seed=1, ignore_eos=True)
    victim = bench.add("victim", [3] * 40, params)
    while victim.sequence is None or len(victim.sequence) < 202:
        bench.step()
    sequence = victim.admitted
    computed = sequence.num_computed
    with pytest.raises(PopLengthError) as refused:
        sequence.pop(304)
    assert (refused.value.length, refused.value.pop) == (202, 304)
    with pytest.raises(ForkLengthError):
        bench.cache.fork(sequence, 203)
    with pytest.raises(AppendLengthError):
        sequence.append([1] * 55)
    with pytest.raises(UnknownSequence):
        bench.cache.sequences.get(10_000)
    assert (len(sequence), sequence.num_computed) == (202, computed)
    bench.core.check()
    bench.run()
    assert bench.tokens("victim") == alone([3] * 40, params, context_length=256)
    for name, ids in OTHERS.items():
        assert bench.tokens(name) == alone(ids, OF_OTHERS, context_length=256)
