"""Time whole steps of one artifact, in a process of its own checkout.

python -m bench.kernels.steps_worker ARTIFACT NUM_PAGES
"""

from __future__ import annotations

import sys
import time

from radixlm.runtime.artifact import Artifact
from radixlm.runtime.model.model_runner import ModelRunner

from ..worker import serve
from .forward import MAX_ROWS, make_batch


class Steps:
    """The opened artifact; a step is as in `make_batch`."""

    def __init__(self, artifact: Artifact, num_pages: int) -> None:
        self._vocab_size = artifact.manifest.model.vocab_size
        self._runner = ModelRunner(artifact, num_pages=num_pages, num_state_slots=1 + MAX_ROWS)

    def seconds(self, kind: str, count: int, past: int, calls: int) -> float:
        """Return the seconds of a step, the mean of `calls` in a row."""
        batch = make_batch(kind, count, past, self._vocab_size)
        start = time.perf_counter()
        for _ in range(calls):
            self._runner.forward(batch)
        return (time.perf_counter() - start) / calls


def main() -> None:
    """Serve until standard input ends."""
    steps = Steps(Artifact.open(sys.argv[1]), int(sys.argv[2]))
    serve({"seconds": steps.seconds})


if __name__ == "__main__":
    main()
