"""What it costs to keep how much attention each KV row gets: `forward_scored` beside `forward`.

    python -m bench.scored ARTIFACT [--before ARTIFACT] [--runs 30]

Steps of random tokens, one call after the other in every round; medians, and the ratio of the medians. `--before` is an
artifact of the same model from a compiler that knew no scores: what the possibility itself costs.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from radixlm.runtime.artifact import Artifact
from radixlm.runtime.artifact.manifest import PAGE_SIZE
from radixlm.runtime.model.model_runner import ModelRunner

from .profile_forward import make_batch
from .results import write_results
from .timing import Spread

STEPS = {
    "prompt of 512": ("prefill", 512, 0),
    "512 tokens after 1,536": ("prefill", 512, 1536),
    "decode after 500": ("decode", 1, 500),
    "decode after 2,000": ("decode", 1, 2000),
    "8 streams after 2,000": ("decode", 8, 2000),
}
NUM_PAGES = 8 * -(-2001 // PAGE_SIZE)


def main() -> None:
    """Measure, print, write `results/scored.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--runs", type=int, default=30)
    options = parser.parse_args()
    artifact = Artifact.open(options.artifact)
    runner = ModelRunner(artifact, num_pages=NUM_PAGES, keep_mass=True)
    forwards: dict[str, Callable[..., object]] = {"forward": runner.forward, "scored": runner.forward_scored}
    if options.before is not None:
        forwards["before"] = ModelRunner(Artifact.open(options.before), num_pages=NUM_PAGES).forward
    rows = []
    for step, (kind, count, past) in STEPS.items():
        batch = make_batch(kind, count, past, artifact.manifest.model.vocab_size)
        seconds: dict[str, list[float]] = defaultdict(list)
        for number in range(options.runs + 1):  # the first round warms up and is not counted
            for name, forward in forwards.items():
                start = time.perf_counter()
                forward(batch)
                if number:
                    seconds[name].append(time.perf_counter() - start)
        medians = {name: Spread.of(values).median for name, values in seconds.items()}
        row = {"step": step, **{f"{name}_s": median for name, median in medians.items()}}
        row |= {f"{name}_over_forward": medians[name] / medians["forward"] for name in medians if name != "forward"}
        rows.append(row)
        print(row)
    print(write_results("scored", {"model": artifact.manifest.name, "runs": options.runs, "rows": rows}))


if __name__ == "__main__":
    main()
