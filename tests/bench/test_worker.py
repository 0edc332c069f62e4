"""A worker answers, fails one call at a time, and its process can be watched; on a tiny model."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.processes import peak_memory_during, seconds_to_first_output
from bench.prompts import Prompts
from bench.worker import Worker, WorkerError

VOCABULARY = 300


@pytest.fixture(scope="module")
def worker(tiny_artifact: Path) -> Iterator[Worker]:
    with Worker("bench.engine.worker", tiny_artifact) as worker:
        yield worker


def test_every_measurement_of_the_engine_is_a_positive_number(worker: Worker) -> None:
    prompts = Prompts(0, VOCABULARY)
    measured = [
        worker.call("prefill", prompt=prompts.ids(40)),
        worker.call("decode", prompt=prompts.ids(5), num_tokens=8),
        worker.call("streams", prompts=prompts.batch(5, 6), num_tokens=200),
        worker.call("resume", prefix=prompts.ids(64), suffix=prompts.ids(9)),
    ]
    assert all(isinstance(value, float) and value > 0 for value in measured)


def test_a_prompt_that_came_from_the_cache_is_no_prefill(worker: Worker) -> None:
    prompt = Prompts(1, VOCABULARY).ids(48)
    worker.call("prefill", prompt=prompt)
    with pytest.raises(WorkerError, match="came from the cache"):
        worker.call("prefill", prompt=prompt)


def test_a_failed_call_does_not_end_the_worker(worker: Worker) -> None:
    with pytest.raises(WorkerError, match="EmptyPrompt"):
        worker.call("prefill", prompt=[])
    assert worker.call("prefill", prompt=[5, 6, 7]) > 0


def test_a_worker_that_does_not_start_says_why() -> None:
    with pytest.raises(WorkerError, match="no_such_module"):
        Worker("bench.no_such_module")


def test_the_first_output_ends_the_wait_and_a_failure_is_an_error() -> None:
    assert seconds_to_first_output([sys.executable, "-c", "print('x')"]) > 0
    with pytest.raises(RuntimeError, match="it broke"):
        seconds_to_first_output([sys.executable, "-c", "raise SystemExit('it broke')"])


@pytest.mark.parametrize(
    "take", ["bytearray(b'1') * (64 << 20)", "mmap.mmap(-1, 64 << 20); x.write(b'1' * (64 << 20))"]
)
def test_peak_memory_sees_what_a_process_has_taken(take: str) -> None:
    code = f"import mmap, time; x = {take}; print(flush=True); time.sleep(1.0)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    peak = peak_memory_during(process.pid, process.communicate)
    assert 64 << 20 <= peak.anonymous <= peak.resident


def test_prompts_of_a_seed_are_always_the_same_and_differ_from_each_other() -> None:
    first, second = Prompts(3).batch(2, 50)
    assert [first, second] == Prompts(3).batch(2, 50)
    assert first[0] != second[0]
    assert all(0 <= token < 49_152 for token in first)
