"""Compare whole steps of one model, compiled and run by another checkout and by this one, in turns.

    python -m bench.kernels.steps_in_turns BEFORE BEFORE.radixlm NOW.radixlm [--steps decode:1:200 ...] [--rounds 20]

BEFORE is the folder of the other checkout, whose `.venv` runs its side. Each checkout compiled its own artifact. A
checkout without `bench/kernels/steps_worker.py` gets a copy of it. `decode:B:P` is a step of B sequences with P
tokens before, `prefill:N:P` a chunk of N tokens after P. A ratio is the median of the rounds' ratios, time before
divided by time now. More than 1 means that this checkout is faster.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

from ..options import read_options
from ..report.tables import table
from ..timing import in_turns
from ..worker import Worker
from .forward import pages_of

STEPS = ("decode:1:200", "decode:8:200", "prefill:64:0", "prefill:512:0")
_SECONDS = 0.05  # approximate time of a turn


def main() -> None:
    """Measure steps of two artifacts in turns, and print a table."""
    options = read_options(__doc__, "before", "before_artifact", "now_artifact", steps=STEPS, rounds=20)
    steps = [(kind, int(count), int(past)) for kind, count, past in (step.split(":") for step in options.steps)]
    num_pages = max(pages_of(*step) for step in steps)
    module, root = "bench.kernels.steps_worker", options.before.absolute()
    python = str(root / ".venv" / "bin" / "python")
    with (
        Worker(module, options.before_artifact.resolve(), num_pages, python=python, root=root) as before,
        Worker(module, options.now_artifact.resolve(), num_pages) as now,
    ):
        print(table(_COLUMNS, [row(step, before, now, options.rounds) for step in steps]))


def row(step: tuple[str, int, int], before: Worker, now: Worker, rounds: int) -> dict[str, Any]:
    """Measure a step on two workers in turns; return the table's row: seconds of each, and quartiles of their ratios.

    `step` is `decode` or `prefill`, the number of sequences or tokens, and the number of tokens before.
    """
    asked = dict(zip(("kind", "count", "past"), step, strict=True))
    calls = max(1, int(_SECONDS / before.call("seconds", **asked, calls=1)))

    def turn(worker: Worker) -> Sequence[float]:
        return [worker.call("seconds", **asked, calls=calls)]

    found = in_turns({"before": partial(turn, before), "now": partial(turn, now)}, rounds)
    ratios = [a / b for a, b in zip(found["before"], found["now"], strict=True)]
    first, median, third = statistics.quantiles(ratios, n=4)
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    least = {f"least_{name}": min(seconds) for name, seconds in found.items()}
    return {"step": ":".join(map(str, step)), **medians, **least, "ratio": median, "first": first, "third": third}


_COLUMNS = {
    "step": "{step}",
    "before, ms": "{before:ms .2f}",
    "now, ms": "{now:ms .2f}",
    "least before": "{least_before:ms .2f}",
    "least now": "{least_now:ms .2f}",
    "ratio": "{ratio:.3f}",
    "quartiles": "{first:.2f}-{third:.2f}",
}


if __name__ == "__main__":
    main()
