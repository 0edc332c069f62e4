"""The threads that kernels run on end with their engine, and engines side by side do not get into each other's way."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from radixlm.runtime import Completion, Engine, SamplingParams

NUM_THREADS = 6
PROMPT = list(range(40, 100))
PARAMS = SamplingParams(max_tokens=12, temperature=1.0, seed=3, logprobs=4, ignore_eos=True)


def num_tasks() -> int:
    """Threads of this process, as the system counts them: Python does not know those of the kernels."""
    return len(list(Path("/proc/self/task").iterdir()))


def open_engine(artifact: Path) -> Engine:
    return Engine(artifact, kv_cache_bytes=2 << 20, context_length=256, num_threads=NUM_THREADS)


def told(completion: Completion) -> object:
    return completion.token_ids, completion.logprobs


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_no_kernel_thread_outlives_its_engine(tiny_artifact: Path) -> None:
    with open_engine(tiny_artifact) as engine:  # other libraries make threads that stay
        engine.generate(PROMPT, PARAMS)
    before = num_tasks()
    for _ in range(20):  # threads that have ended are listed for a moment more
        time.sleep(0.01)
        before = min(before, num_tasks())
    for _ in range(8):
        engine = open_engine(tiny_artifact)
        engine.generate(PROMPT, PARAMS)
        assert num_tasks() >= before + NUM_THREADS - 1  # the engine's before may still be ending
        engine.close()  # right after a step: the kernels' threads still look for work
        assert num_tasks() < before + NUM_THREADS - 1


def test_engines_side_by_side_answer_as_each_alone(tiny_artifact: Path) -> None:
    with open_engine(tiny_artifact) as alone:
        expected = [told(alone.generate([*PROMPT, number], PARAMS)) for number in range(6)]
    with open_engine(tiny_artifact) as one, open_engine(tiny_artifact) as other, ThreadPoolExecutor(6) as clients:
        asked = [clients.submit((one, other)[number % 2].generate, [*PROMPT, number], PARAMS) for number in range(6)]
        assert [told(each.result()) for each in asked] == expected
        one.close()
        assert told(other.generate([*PROMPT, 0], PARAMS)) == expected[0]
