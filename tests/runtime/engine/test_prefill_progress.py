"""A request tells when it starts and how far its prompt is, and how long it waited for that."""

from __future__ import annotations

import threading

import pytest
from radixlm.runtime.engine.completion import Delta, PrefillProgress, RequestOutput
from radixlm.runtime.engine.engine_core import EngineCore
from radixlm.runtime.engine.engine_loop import EngineLoop
from radixlm.runtime.engine.generation_stream import GenerationStream
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.engine.step.plan import SchedulerPolicy

from ..fake_model import Bench

FEW = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
SLOWLY = SchedulerPolicy(max_num_seqs=2, max_num_batched_tokens=16)


class Told:
    """A bench whose core's progress is written down, each with whether the model had run by then."""

    def __init__(self, policy: SchedulerPolicy = SLOWLY, num_pages: int = 24) -> None:
        self.bench = Bench(num_pages, policy=policy)
        self.said: list[tuple[str, PrefillProgress, int]] = []
        self.core: EngineCore = self.bench.core
        self.core.on_progress = lambda name, progress: self.said.append((name, progress, self.bench.model.num_tokens))

    def of(self, name: str) -> list[tuple[int, int, int]]:
        """Tokens of a prompt: all, cached, and there."""
        found = [progress for asked, progress, _ in self.said if asked == name]
        return [(one.num_prompt_tokens, one.num_cached_tokens, one.num_processed_tokens) for one in found]


def test_a_prompt_is_told_of_at_its_start_and_after_every_step() -> None:
    told = Told()
    told.bench.add("a", range(37), FEW)
    told.bench.run()
    assert told.of("a") == [(37, 0, 0), (37, 0, 16), (37, 0, 32), (37, 0, 37)]
    assert told.said[0][2] == 0, "the start is told before anything is computed"


def test_what_was_cached_is_there_from_the_start() -> None:
    told = Told()
    told.bench.add("a", range(37), FEW)
    told.bench.run()
    told.bench.add("b", [*range(37), 1, 2], FEW)
    told.bench.run()
    assert told.of("b") == [(39, 37, 37), (39, 37, 39)]


def test_a_request_that_waits_has_not_started() -> None:
    told = Told(SchedulerPolicy(max_num_seqs=1, max_num_batched_tokens=16))
    told.bench.add("a", range(20), FEW)
    told.bench.add("b", range(20, 30), FEW)
    told.bench.step()
    assert told.of("b") == []
    told.bench.run()
    assert told.of("b") == [(10, 0, 0), (10, 0, 10)]


def test_the_time_since_the_start_is_told() -> None:
    told = Told()
    told.bench.now = 3.0
    told.bench.add("a", range(20), FEW)
    told.bench.now = 5.0
    told.bench.step()
    told.bench.now = 9.0
    told.bench.step()
    assert [progress.elapsed_s for _, progress, _ in told.said] == [0.0, 0.0, 4.0]


def test_a_completion_says_how_long_its_request_waited() -> None:
    told = Told(SchedulerPolicy(max_num_seqs=1, max_num_batched_tokens=64))
    for name in "ab":
        told.bench.add(name, [ord(name) % 30] * 20, FEW)
    for _ in range(4):
        told.bench.step()
        told.bench.now += 1.0
    first, second = (told.bench.outputs[name][-1].completion for name in "ab")
    assert first is not None and second is not None
    assert (first.timings.queue_s, second.timings.queue_s) == (0.0, 2.0)
    assert told.core.counters.in_queue.read().sum_s == 2.0


def test_a_request_that_was_cancelled_while_it_waited_has_no_time_in_the_queue() -> None:
    told = Told(SchedulerPolicy(max_num_seqs=1, max_num_batched_tokens=64))
    for name in "ab":
        told.bench.add(name, [ord(name) % 30] * 20, FEW)
    told.bench.step()
    told.bench.abort("b")
    waiting = told.bench.outputs["b"][-1].completion
    assert waiting is not None and waiting.timings.queue_s is None
    assert told.core.counters.in_queue.read().cumulative[-1] == 1


def test_a_request_that_was_preempted_waited_once() -> None:
    told = Told(SchedulerPolicy(max_num_seqs=4, max_num_batched_tokens=64), num_pages=8)
    for name in "abcd":
        told.bench.add(name, [ord(name) % 30] * 17, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    told.bench.run()
    assert told.core.num_preemptions > 0
    assert told.core.counters.in_queue.read().cumulative[-1] == 4
    for name in "abcd":
        assert told.of(name)[-1] == (17, 0, 17)


@pytest.mark.parametrize("with_progress", [False, True])
def test_a_stream_has_the_progress_and_deltas_of_it_if_asked(with_progress: bool) -> None:
    stream = GenerationStream("r", (5,), cancel=lambda _: None, with_progress=with_progress)
    assert stream.progress is None
    progress = PrefillProgress(37, 0, 16, 0.5)
    stream.deliver(RequestOutput("r", Delta("", (), progress=progress)))
    assert stream.progress == progress
    assert stream.poll() == (Delta("", (), progress=progress) if with_progress else None)


def test_progress_comes_through_the_loop_before_the_first_token() -> None:
    told = Told()
    loop = EngineLoop(told.core, clock=lambda: told.bench.now, on_exit=lambda: None)
    stream = GenerationStream("a", tuple(range(37)), cancel=loop.cancel, with_progress=True)
    loop.submit(told.bench.request("a", range(37), FEW), stream.deliver)
    deltas = list(stream)
    loop.close()
    there = [delta.progress.num_processed_tokens for delta in deltas if delta.progress is not None]
    assert there == [0, 16, 32, 37]
    assert [delta.progress is None for delta in deltas] == [False] * 4 + [True] * 2
    assert stream.progress == deltas[3].progress


def test_a_listener_that_fails_on_progress_fails_no_step() -> None:
    told = Told()
    loop = EngineLoop(told.core, clock=lambda: told.bench.now, on_exit=lambda: None)
    ended = threading.Event()

    def listen(output: RequestOutput) -> None:
        if output.delta is not None and output.delta.progress is not None:
            raise RuntimeError("no")
        if output.completion is not None:
            ended.set()

    loop.submit(told.bench.request("a", range(37), FEW), listen)
    assert ended.wait(60)
    loop.close()
    told.core.check()
