"""Measure the time of each kernel in a real forward pass: cycles are counted between the calls of the compiled module.

    python -m bench.kernels.forward SOURCE decode:1:100 decode:8:100 prefill:512:0 prefill:512:1536

`decode:B:P` is a step of B sequences with P tokens before, `prefill:N:P` a chunk of N tokens after P. The source is
compiled again, with the counters, into a temporary directory.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
from radixlm.compile import compile_model
from radixlm.compile.codegen.builder import SIZE, Kernel
from radixlm.compile.kernels.activation import ActivationSpec
from radixlm.compile.kernels.linear import LinearSpec
from radixlm.compile.module import build_module
from radixlm.compile.ops.program import Program, Scratch
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.artifact.manifest import PAGE_SIZE
from radixlm.runtime.model import model_runner
from radixlm.runtime.model.batch import Batch
from radixlm.runtime.model.memory import zeros
from radixlm.runtime.model.model_runner import ModelRunner
from tvm.script.ir_builder import tirx as T

MAX_ROWS = 64  # of a step, limited by the room for states
_RUNS = 9
Bytes = npt.NDArray[np.uint8]


@dataclass
class Counters:
    """The place of the counters of a program's calls, and the name of each call."""

    place: Scratch
    names: list[str]


@dataclass(frozen=True)
class Share:
    """All calls of one kernel in a forward."""

    kernel: str
    num_calls: int
    seconds: float
    share: float


def main() -> None:
    """Compile a model, run it, and print a table of the time of each kernel for each kind of step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="as `radixlm compile` takes it")
    parser.add_argument("steps", nargs="+", help="decode:B:P or prefill:N:P")
    options = parser.parse_args()
    steps = [(kind, int(count), int(past)) for kind, count, past in (step.split(":") for step in options.steps)]
    with tempfile.TemporaryDirectory() as directory, profiled_modules() as counters:
        artifact = Artifact.open(compile_model(options.source, Path(directory) / "profiled.radixlm").path)
        num_pages = max(pages_of(*step) for step in steps)
        runner, workspace = open_runner(artifact, num_pages)
        vocab_size = artifact.manifest.model.vocab_size
        for step in steps:
            seconds, shares = profile(runner, make_batch(*step, vocab_size), counters[0], workspace)
            print(f"\n{':'.join(map(str, step))}: {seconds * 1e3:.3f} ms")
            for s in shares:
                print(f"{s.kernel:48s} {s.share:6.1%} {s.seconds * 1e6 / s.num_calls:9.2f} us x {s.num_calls}")


@contextmanager
def profiled_modules() -> Iterator[list[Counters]]:
    """Compile modules that count cycles while the context lasts; the list gets the counters of each module."""
    made: list[Counters] = []

    def build_profiled(program: Program, *arguments: Any) -> Any:
        made.append(_interleave(program))
        return build_module(program, *arguments)

    with patch("radixlm.compile.compiler.build_module", build_profiled):
        yield made


def open_runner(artifact: Artifact, num_pages: int) -> tuple[ModelRunner, Bytes]:
    """Open a runner; return it and its workspace, which is otherwise private to it."""
    allocated: list[Bytes] = []

    def remember(shape: tuple[int, ...], dtype: Any, **how: Any) -> Any:
        allocated.append(zeros(shape, dtype, **how))
        return allocated[-1]

    with patch.object(model_runner, "zeros", remember):
        runner = ModelRunner(artifact, num_pages=num_pages, num_state_slots=1 + MAX_ROWS)
    [workspace] = (a for a in allocated if a.dtype == np.uint8 and a.size == artifact.manifest.module.workspace_bytes)
    return runner, workspace


def profile(runner: ModelRunner, batch: Batch, counters: Counters, workspace: Bytes) -> tuple[float, list[Share]]:
    """Return the seconds of the fastest of several forwards, and its kernels, slowest first."""
    size = len(counters.names) + 1
    best, cycles = float("inf"), np.zeros(size, np.int64)
    for _ in range(_RUNS):
        start = time.perf_counter()
        runner.forward(batch)
        seconds = time.perf_counter() - start
        if seconds < best:
            best, cycles = seconds, workspace[counters.place.offset :][: 8 * size].view(np.int64).copy()
    taken: dict[str, list[int]] = defaultdict(list)
    for name, count in zip(counters.names, np.diff(cycles), strict=True):
        taken[name].append(int(count))
    total = int(cycles[-1] - cycles[0])
    shares = [Share(n, len(c), best * sum(c) / total, sum(c) / total) for n, c in taken.items()]
    return best, sorted(shares, key=lambda share: -share.share)


def make_batch(kind: str, count: int, past: int, vocab_size: int) -> Batch:
    """Return a step of random tokens; every sequence has its own pages."""
    token_ids = np.random.default_rng(0).integers(0, vocab_size, count).astype(np.int32)
    width = _width(count, past, kind)
    if kind == "prefill":
        positions = np.arange(past, past + count, dtype=np.int32)
        rows, table = np.zeros(count, np.int32), np.arange(width, dtype=np.int32)[None]
        slots, logit_rows = positions, np.array([count - 1], np.int32)
    else:
        positions = np.full(count, past, np.int32)
        rows = np.arange(count, dtype=np.int32)
        table = np.arange(count * width, dtype=np.int32).reshape(count, width)
        slots, logit_rows = table[:, past // PAGE_SIZE] * np.int32(PAGE_SIZE) + np.int32(past % PAGE_SIZE), rows
    # for recurrent models; others ignore them
    states = {"state_in": np.zeros(len(table), np.int32), "state_out": np.arange(1, 1 + len(table), dtype=np.int32)}
    return Batch(token_ids, positions, slots, rows, table, positions + np.int32(1), logit_rows, **states)


def pages_of(kind: str, count: int, past: int) -> int:
    """Return the number of pages of all sequences of a step."""
    return (count if kind == "decode" else 1) * _width(count, past, kind)


def _width(count: int, past: int, kind: str) -> int:
    """Return the number of pages of a sequence."""
    return -(-(past + (1 if kind == "decode" else count)) // PAGE_SIZE)


def _interleave(program: Program) -> Counters:
    calls, program.calls = program.calls, []
    place = program.scratch("profile", 8 * (len(calls) + 1))
    program.call("profile", _read_cycles, place, 0)
    for i, call in enumerate(calls):
        program.calls.append(call)
        program.call("profile", _read_cycles, place, i + 1)
    for draft in program.drafts.values():  # they use the same workspace
        draft.workspace_bytes = program.workspace_bytes
    return Counters(place, [_name(call.key) for call in calls])


def _read_cycles() -> Any:
    """Return a function `(counters, i)` that writes the CPU's time stamp."""
    with Kernel() as k:
        counters, i = k.arguments(counters="int64", i=SIZE)
        counters[i] = T.call_llvm_intrin("int64", "llvm.readcyclecounter")
    return k.function


def _name(key: Any) -> str:
    """Return a readable name that distinguishes a kernel."""
    first = key[0] if isinstance(key, tuple) else key
    if isinstance(first, LinearSpec):
        wide = " wide" if first.wide else ""
        return f"linear {first.kind.label} {first.num_outputs}x{first.num_inputs}{wide}"
    if isinstance(first, ActivationSpec):
        return f"activation {first.function} {first.width}{' wide' if first.wide else ''}"
    return str(first)


if __name__ == "__main__":
    main()
