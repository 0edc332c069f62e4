"""Measure how cost grows: decode with the context, prefill with the prompt, a step with the number of streams.

    python -m bench.engine.growth ARTIFACT [--runs 3]

Each point is the best of some runs, with the least time at the machine's limits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from radixlm.compile.codegen.targets import find_target
from radixlm.runtime.artifact import Artifact

from ..kernels.case import Work
from ..limits import LimitsMeter
from ..model_work import decode_work, prefill_work
from ..options import read_options
from ..prompts import Prompts
from ..report.page import publish
from ..worker import Worker
from .figures import STREAM_PROMPT, STREAM_TOKENS

# Tokens before a decoded one, tokens of a prompt, and requests that get a token each in a step.
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
    """Time decode steps and prefills by size, print them with the machine's limits, write `results/growth.json`."""
    options = read_options(__doc__, "artifact", runs=3)
    artifact = Artifact.open(options.artifact)
    vocab_size, context_length = artifact.manifest.model.vocab_size, artifact.manifest.context_length
    meter = LimitsMeter(find_target("native"), artifact)
    prompts = Prompts(1, vocab_size)
    ids = prompts.ids(context_length - DECODED)  # each context begins with the previous one, so that prefill is short
    with Worker("bench.engine.worker", artifact.path) as worker:

        def decode_s(context: int) -> float:
            return 1 / float(worker.call("decode", prompt=ids[:context], num_tokens=DECODED))

        def prefill_s(size: int) -> float:
            return float(worker.call("prefill", prompt=prompts.ids(size)))

        def step_s(size: int) -> float:
            batch = prompts.batch(size, STREAM_PROMPT)
            return size / float(worker.call("streams", prompts=batch, num_tokens=STREAM_TOKENS))

        def curve(sizes: Sequence[int], seconds: Callable[[int], float], work: Callable[[int], Work]) -> list[Point]:
            return [_point(size, seconds, work(size), meter, options.runs) for size in sizes]

        curves = {
            "decode_s_by_context": curve(
                [size for size in CONTEXTS if size <= len(ids)],
                decode_s,
                lambda size: decode_work(artifact, size + DECODED // 2),
            ),
            "prefill_s_by_prompt": curve(
                [size for size in PROMPTS if size < context_length],
                prefill_s,
                lambda size: prefill_work(artifact, size),
            ),
            "step_s_by_batch": curve(
                BATCHES,
                step_s,
                lambda size: decode_work(artifact, STREAM_PROMPT + STREAM_TOKENS // 2, size),
            ),
        }
    points = {name: [asdict(point) for point in found] for name, found in curves.items()}
    publish("growth", {"model": artifact.manifest.name, "limits": asdict(meter.limits), **points})


def _point(size: int, seconds_of: Callable[[int], float], work: Work, meter: LimitsMeter, runs: int) -> Point:
    seconds, limits = meter.around(lambda: min(seconds_of(size) for _ in range(runs)))
    return Point(size, seconds, work.least_s(limits))


if __name__ == "__main__":
    main()
