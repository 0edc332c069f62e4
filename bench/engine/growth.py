"""How cost grows: decode with the context, prefill with the prompt, a step with the number of streams.

    python -m bench.engine.growth ARTIFACT [--runs 3]

Each point is the best of some runs, and beside it the least time at the machine's limits.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from radixlm.compile.codegen.targets import find_target
from radixlm.runtime.artifact import Artifact

from ..kernels.case import Work
from ..limits import LimitsMeter
from ..model_work import decode_work, prefill_work
from ..prompts import Prompts
from ..results import write_results
from ..worker import Worker
from .figures import STREAM_PROMPT, STREAM_TOKENS

CONTEXTS = (64, 256, 512, 1024, 2048, 3072, 4096, 6144, 8000)
PROMPTS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8000)
BATCHES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
DECODED = 33  # tokens after a context


@dataclass(frozen=True)
class Point:
    """Seconds at a size, and the least that the machine's limits allow."""

    size: int
    seconds: float
    limit_s: float


def main() -> None:
    """Measure, print, write `results/growth.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    artifact = Artifact.open(options.artifact)
    meter = LimitsMeter(find_target("native"))
    with Worker("bench.engine.worker", artifact.path) as worker:
        curves = {
            "decode_s_by_context": decode_by_context(worker, artifact, meter, options.runs),
            "prefill_s_by_prompt": prefill_by_prompt(worker, artifact, meter, options.runs),
            "step_s_by_batch": step_by_batch(worker, artifact, meter, options.runs),
        }
    for name, points in curves.items():
        print(f"\n{name}")
        for point in points:
            print(
                f"{point.size:8,d} {point.seconds * 1e3:10,.2f} ms "
                f"{point.seconds * 1e6 / point.size:10,.1f} us each {point.limit_s / point.seconds:7.1%}"
            )
    write_results(
        "growth",
        {
            "model": artifact.manifest.name,
            "limits": asdict(meter.limits),
            **{name: [asdict(point) for point in points] for name, points in curves.items()},
        },
    )


def decode_by_context(worker: Worker, artifact: Artifact, meter: LimitsMeter, runs: int) -> list[Point]:
    """A token of one stream after so many; each context begins with the one before, so that prefill is short."""
    prompts = Prompts(1, artifact.manifest.model.vocab_size)
    longest = artifact.manifest.context_length - DECODED
    ids = prompts.ids(longest)
    return [
        _point(
            size,
            lambda: 1 / float(worker.call("decode", prompt=ids[:size], num_tokens=DECODED)),  # noqa: B023
            decode_work(artifact, size + DECODED // 2),
            meter,
            runs,
        )
        for size in CONTEXTS
        if size <= longest
    ]


def prefill_by_prompt(worker: Worker, artifact: Artifact, meter: LimitsMeter, runs: int) -> list[Point]:
    """The first token of a prompt of so many."""
    prompts = Prompts(2, artifact.manifest.model.vocab_size)
    return [
        _point(
            size,
            lambda: float(worker.call("prefill", prompt=prompts.ids(size))),  # noqa: B023
            prefill_work(artifact, size),
            meter,
            runs,
        )
        for size in PROMPTS
        if size < artifact.manifest.context_length
    ]


def step_by_batch(worker: Worker, artifact: Artifact, meter: LimitsMeter, runs: int) -> list[Point]:
    """A step in which so many streams get a token each."""
    prompts = Prompts(3, artifact.manifest.model.vocab_size)

    def step_s(size: int) -> float:
        batch = prompts.batch(size, STREAM_PROMPT)
        return size / float(worker.call("streams", prompts=batch, num_tokens=STREAM_TOKENS))

    return [
        _point(
            size,
            lambda: step_s(size),  # noqa: B023
            decode_work(artifact, STREAM_PROMPT + STREAM_TOKENS // 2, size),
            meter,
            runs,
        )
        for size in BATCHES
    ]


def _point(size: int, measure: Callable[[], float], work: Work, meter: LimitsMeter, runs: int) -> Point:
    seconds, limits = meter.around(lambda: min(measure() for _ in range(runs)))
    return Point(size, seconds, work.least_s(limits))


if __name__ == "__main__":
    main()
