"""Measure the cost of recording the attention to each KV row: `forward_scored` compared with `forward`.

    python -m bench.partial.scored ARTIFACT [--runs 30]

Steps of random tokens, scored as they are served, one call after the other in every round; medians, and the ratio of
the medians.
"""

from __future__ import annotations

from radixlm.runtime.artifact import Artifact
from radixlm.runtime.artifact.manifest import PAGE_SIZE
from radixlm.runtime.extras.approximate.attention_scores import stride_of
from radixlm.runtime.model.model_runner import ModelRunner

from ..kernels.forward import make_batch
from ..options import read_options
from ..report.page import publish
from ..timing import Spread, in_turns, seconds_of

STEPS = {
    "prompt of 512": ("prefill", 512, 0),
    "512 tokens after 1,536": ("prefill", 512, 1536),
    "512 tokens after 3,500": ("prefill", 512, 3500),
    "a question of 64 after 2,000": ("prefill", 64, 2000),
}
NUM_PAGES = -(-4012 // PAGE_SIZE)


def main() -> None:
    """Measure, print, write `results/scored.json`, which keeps other models' runs."""
    options = read_options(__doc__, "artifact", runs=30)
    artifact = Artifact.open(options.artifact)
    runner = ModelRunner(artifact, num_pages=NUM_PAGES, keep_scores=True)
    rows = []
    for step, (kind, count, past) in STEPS.items():
        batch = make_batch(kind, count, past, artifact.manifest.model.vocab_size)
        stride = stride_of(count, ends_prompt=True)
        seconds = in_turns(
            {
                "forward": lambda: [seconds_of(lambda: runner.forward(batch))],  # noqa: B023
                "scored": lambda: [seconds_of(lambda: runner.forward_scored(batch, stride=stride))],  # noqa: B023
            },
            options.runs,
        )
        forward, scored = (Spread.of(seconds[name]).median for name in ("forward", "scored"))
        rows.append({"step": step, "forward_s": forward, "scored_s": scored, "scored_over_forward": scored / forward})
    publish("scored", {"model": artifact.manifest.name, "calls": options.runs, "rows": rows}, artifact.manifest.name)


if __name__ == "__main__":
    main()
