"""Measure the engine as its users see it, on one artifact; each figure with the machine's limit.

    python -m bench.engine ARTIFACT [--rounds 5]

The share is the least time for the model's bytes and operations at the limits, divided by the
time taken; memory bandwidth is measured again around every figure.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from contextlib import closing
from dataclasses import asdict

from radixlm.compile.codegen.targets import find_target
from radixlm.runtime.artifact import Artifact

from ..limits import Limits, LimitsMeter
from ..model_work import decode_work, prefill_work
from ..options import read_options
from ..prompts import Prompts
from ..report.page import publish
from . import figures
from .figures import Figure
from .measured import MeasuredEngine

FIGURES = (*figures.OF_AN_ENGINE, figures.START, figures.MEMORY)


def main() -> None:
    """Measure the engine's figures on one artifact, print them, and write `results/engine.json`."""
    options = read_options(__doc__, "artifact", rounds=5)
    artifact = Artifact.open(options.artifact)
    target = find_target("native")
    meter = LimitsMeter(target, artifact)
    values: dict[str, list[float]] = defaultdict(list)
    shares: dict[str, list[float]] = defaultdict(list)
    with closing(MeasuredEngine(artifact.path)) as engine:
        for number in range(-1, options.rounds):  # the first round warms up and is not counted
            for seed, figure in enumerate(FIGURES, start=100 * (number + 1)):
                if number < 0 and figure not in figures.OF_AN_ENGINE:
                    continue
                prompts = Prompts(seed, artifact.manifest.model.vocab_size)
                measured, limits_now = meter.around(lambda: engine.measure(figure, prompts))  # noqa: B023
                if number >= 0:
                    for name, value in measured.items():
                        values[name].append(value)
                    share = share_of_limit(figure, measured[figure.name], artifact, limits_now)
                    if share is not None:
                        shares[figure.name].append(share)
            print(f"round {number + 1} of {options.rounds} done at {time.strftime('%H:%M:%S')}", file=sys.stderr)
    limits = asdict(meter.limits)
    publish("engine", {"model": artifact.manifest.name, "limits": limits, "values": values, "shares": shares})


def share_of_limit(figure: Figure, value: float, artifact: Artifact, limits: Limits) -> float | None:
    """Return the least time at the machine's limits divided by the time taken; None if a figure's work is unknown."""
    if figure in figures.PREFILLS:
        num_tokens = figures.PREFILLS[figure]
        return prefill_work(artifact, num_tokens).least_s(limits) / (num_tokens / value)
    if figure is figures.CACHED_TTFT:
        cached, new = figures.CACHED_TOKENS, figures.NEW_TOKENS
        return prefill_work(artifact, cached + new, cached).least_s(limits) / (value / 1e3)
    if figure is figures.DECODE:
        context = figures.DECODE_PROMPT + figures.DECODE_TOKENS // 2
        return decode_work(artifact, context).least_s(limits) * value
    if figure.num_streams > 1:
        context = figures.STREAM_PROMPT + figures.STREAM_TOKENS // 2
        return decode_work(artifact, context, figure.num_streams).least_s(limits) * value / figure.num_streams
    return None


if __name__ == "__main__":
    main()
