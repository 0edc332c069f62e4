"""Estimate how a step scales to more threads than this machine has: its kernels split for them, and the parts timed.

    python -m bench.engine.scaling ARTIFACT [--steps decode:1:200 decode:8:200 prefill:512:0] [--threads 2 4 8 16 64]

A kernel hands its work to TVM's pool with one call, a launch. A function of our own replaces that call, which runs
the parts one after another on one thread and records how long each takes, the fastest of several steps. This gives
the launches, the time between them that one thread computes alone, and how evenly the parts are split.

The estimate of a step is that time, the longest part of each launch, and the cost of each launch. It assumes that a
part takes as long with others as alone, so that memory has to deliver what the table says, and that a launch costs
as much for each further thread as was measured for two: the pool notifies its threads one by one. `radixlm
bench` measures these assumptions on any machine.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from radixlm.cli.bench.figures import decode_bytes
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.model.batch import Batch
from radixlm.runtime.model.machine_limits import LimitsMeter
from radixlm.runtime.model.model_runner import ModelRunner

from ..kernels.forward import MAX_ROWS, make_batch, pages_of
from ..report.page import publish

_CONTEXT = 200
STEPS = (f"decode:1:{_CONTEXT}", f"decode:8:{_CONTEXT}", "prefill:512:0")
THREADS = (2, 4, 8, 16, 64)
_RUNS = 7
_MAX_LAUNCHES = 4096
_MOST_THREADS = 256
# The arguments are those of TVMBackendParallelLaunch; the parts see their number.
_LAUNCH = """
#include <stdint.h>
#include <time.h>
typedef struct { void *sync; int32_t num_task; } Env;
int32_t num_parts = 1, num_launches = 0;
int64_t nanoseconds[%d];
static int64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}
int launch(int (*part)(int, Env *, void *), void *data, int ignored) {
  Env env = {0, num_parts};
  int64_t *mine = nanoseconds + (int64_t)num_parts * num_launches++;
  for (int i = 0; i < num_parts; ++i) {
    int64_t start = now();
    int failed = part(i, &env, data);
    mine[i] = now() - start;
    if (failed) return failed;
  }
  return 0;
}
"""


@dataclass(frozen=True)
class Scaling:
    """A step split for `num_threads`; seconds on one thread.

    Attributes:
        num_launches: calls of the pool.
        serial_s: outside of launches. parts_s: of all parts; longest_s: of the longest part of each launch.
    """

    step: str
    num_threads: int
    num_launches: int
    serial_s: float
    parts_s: float
    longest_s: float


class SplitRunner:
    """A runner whose kernels are split for any number of threads, and run on one.

    It changes the module for the whole process: anything loaded afterwards is split, too.
    """

    def __init__(self, artifact: Artifact, num_pages: int) -> None:
        self.runner = ModelRunner(artifact, num_pages=num_pages, num_threads=1, num_state_slots=1 + MAX_ROWS)
        with tempfile.TemporaryDirectory() as folder:
            source, library = Path(folder) / "launch.c", Path(folder) / "launch.so"
            source.write_text(_LAUNCH % (_MAX_LAUNCHES * _MOST_THREADS))
            subprocess.run(["cc", "-O2", "-shared", "-fPIC", source, "-o", library], check=True)
            self._shim = ctypes.CDLL(str(library))
        module = ctypes.CDLL(str(artifact.module_path.resolve()))
        launcher = ctypes.c_void_p.in_dll(module, "kernel_launcher")
        launcher.value = ctypes.cast(self._shim.launch, ctypes.c_void_p).value

    def measure(self, step: str, batch: Batch, num_threads: int, runs: int) -> Scaling:
        """Run a step some times; each part counts with its fastest time."""
        ctypes.c_int32.in_dll(self._shim, "num_parts").value = num_threads
        num_launches = ctypes.c_int32.in_dll(self._shim, "num_launches")
        noted = np.ctypeslib.as_array(
            (ctypes.c_int64 * (_MAX_LAUNCHES * _MOST_THREADS)).in_dll(self._shim, "nanoseconds")
        )
        parts, serial = [], []
        for _ in range(runs):
            num_launches.value = 0
            start = time.perf_counter()
            self.runner.forward(batch)
            seconds = time.perf_counter() - start
            parts.append(noted[: num_launches.value * num_threads].reshape(-1, num_threads) / 1e9)
            serial.append(seconds - parts[-1].sum())
        best = np.min(parts, axis=0)
        return Scaling(
            step, num_threads, len(best), float(min(serial)), float(best.sum()), float(best.max(axis=1).sum())
        )


def main() -> None:
    """Estimate steps with more threads than the machine has, print, write `results/scaling.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--steps", nargs="+", default=STEPS, help="decode:B:P or prefill:N:P, as bench.kernels.forward")
    parser.add_argument("--threads", nargs="+", type=int, default=THREADS)
    parser.add_argument("--runs", type=int, default=_RUNS, help="of each step; a part counts as the fastest was")
    options = parser.parse_args()
    artifact = Artifact.open(options.artifact)
    manifest = artifact.manifest
    launch_us = LimitsMeter(artifact, read_bytes=512 << 20).measure().launch_us
    found = measure_scaling(artifact, options.steps, options.threads, options.runs)
    layers, token_bytes = manifest.model.num_hidden_layers, decode_bytes(manifest, _CONTEXT)
    figures = {"layers": layers, "token_bytes": token_bytes, "launch_us": launch_us}
    publish("scaling", {**figures, "rows": list(map(asdict, found))}, run=manifest.name)


def measure_scaling(artifact: Artifact, steps: Sequence[str], threads: Sequence[int], runs: int) -> list[Scaling]:
    """Return the seconds of each step, with its kernels split for 1 thread, and for each number in `threads`."""
    parsed = [(step, kind, int(count), int(past)) for step in steps for kind, count, past in (step.split(":"),)]
    runner = SplitRunner(artifact, max(pages_of(kind, count, past) for _, kind, count, past in parsed))
    vocab_size = artifact.manifest.model.vocab_size
    return [
        runner.measure(step, make_batch(kind, count, past, vocab_size), num_threads, runs)
        for step, kind, count, past in parsed
        for num_threads in (1, *threads)
    ]


if __name__ == "__main__":
    main()
