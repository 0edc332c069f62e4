"""The engines that `peers.py` compares, each in processes of its own that start when they are first needed."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..engine.figures import DECODE, MEASURES, MEMORY, MEMORY_CONTEXT, RESIDENT, START, Figure, fill_context
from ..processes import RADIXLM, peak_memory_during, seconds_to_first_output
from ..prompts import Prompts
from ..worker import ROOT, Worker

_START_PROMPT = "The capital of France is"
_MIB = 1 << 20


class Contestant(Protocol):
    """An engine with a model."""

    name: str

    def measure(self, figure: Figure, prompts: Prompts) -> dict[str, float]:
        """Values by the names of figures: that of `figure`, and of others that come along."""
        ...

    def close(self) -> None:
        """End its processes."""
        ...


class RadixLMContestant:
    """One engine with its defaults serves every figure; those in `over_http` are measured at `radixlm serve`."""

    def __init__(self, name: str, artifact: Path, *, over_http: Collection[Figure] = ()) -> None:
        self.name, self._artifact, self._over_http = name, artifact, over_http
        self._stack = ExitStack()
        self._workers: dict[bool, Worker] = {}

    def measure(self, figure: Figure, prompts: Prompts) -> dict[str, float]:
        """See `Contestant`."""
        if figure is START:
            command = [RADIXLM, "generate", str(self._artifact), _START_PROMPT, *_ONE_TOKEN]
            return {START.name: seconds_to_first_output(command)}
        if figure is MEMORY:
            with self._open(is_http=False) as worker:
                return _memory(worker, worker.pid, prompts, sum(f.stat().st_size for f in self._artifact.iterdir()))
        is_http = figure in self._over_http
        if is_http not in self._workers:
            self._workers[is_http] = self._stack.enter_context(self._open(is_http=is_http))
        return {figure.name: MEASURES[figure](self._workers[is_http], prompts)}

    def close(self) -> None:
        """See `Contestant`."""
        self._stack.close()

    def _open(self, *, is_http: bool) -> Worker:
        if is_http:
            return Worker("bench.peers.http_worker", "radixlm", RADIXLM, "serve", self._artifact)
        return Worker("bench.engine.worker", self._artifact)


@dataclass(frozen=True)
class LlamaCppBuild:
    """How a build of llama.cpp is started: its server, and what prints a first token, and on standard error how it was
    built.
    """

    server: Sequence[str]
    first_token: Sequence[str]

    @classmethod
    def native(cls, directory: Path) -> LlamaCppBuild:
        """Of `.ci/llama_cpp.sh`."""
        one_token = ("-n", "1", "-c", "2048", "--temp", "0", "-no-cnv", "--no-warmup", "--no-display-prompt")
        return cls((str(directory / "llama-server"),), (str(directory / "llama-completion"), *one_token))

    @classmethod
    def wheel(cls) -> LlamaCppBuild:
        """What pip gives."""
        module = (sys.executable, "-m")
        return cls((*module, "bench.peers.wheel_server"), (*module, "bench.peers.wheel_start"))


class LlamaCppContestant:
    """llama.cpp with flash attention, which is faster everywhere but in single decode: there the better of both counts.

    Each number of streams has a server of its own, for its context is divided between them.
    """

    def __init__(self, name: str, build: LlamaCppBuild, gguf: Path, *, num_threads: int) -> None:
        self.name, self._build, self._gguf, self._num_threads = name, build, gguf, num_threads
        self._stack = ExitStack()
        self._workers: dict[tuple[int, bool], Worker] = {}

    def measure(self, figure: Figure, prompts: Prompts) -> dict[str, float]:
        """See `Contestant`."""
        if figure is START:
            return {START.name: seconds_to_first_output(self._first_token())}
        if figure is MEMORY:
            with self._open(1, True, MEMORY_CONTEXT) as worker:
                return _memory(worker, worker.call("pid"), prompts, self._gguf.stat().st_size)
        workers = [self._worker(figure.num_streams, True)]
        if figure is DECODE:
            workers.append(self._worker(1, False))
        return {figure.name: max(MEASURES[figure](worker, prompts) for worker in workers)}

    def system_info(self) -> str:
        """The instruction sets that this build uses."""
        done = subprocess.run(self._first_token(), cwd=ROOT, capture_output=True, text=True, check=True)
        found = re.search(r"CPU : .*", done.stderr)
        return found[0].strip(" |") if found else "unknown"

    def close(self) -> None:
        """See `Contestant`."""
        self._stack.close()

    def _first_token(self) -> list[str]:
        model = ("--model", str(self._gguf), "--prompt", _START_PROMPT, "--threads", str(self._num_threads))
        return [*self._build.first_token, *model]

    def _worker(self, num_parallel: int, flash_attention: bool) -> Worker:
        key = (num_parallel, flash_attention)
        if key not in self._workers:
            context = 4096 if num_parallel == 1 else 128
            self._workers[key] = self._stack.enter_context(self._open(num_parallel, flash_attention, context))
        return self._workers[key]

    def _open(self, num_parallel: int, flash_attention: bool, context: int) -> Worker:
        return Worker(
            "bench.peers.http_worker",
            *("llama.cpp", *self._build.server, "--model", self._gguf),
            *("--parallel", num_parallel, "--ctx-size", num_parallel * context, "--threads", self._num_threads),
            *("--flash-attn", "on" if flash_attention else "off"),
            *("--cache-ram", 0),  # a second tier of prompts, which would cost copies and serve no measurement here
        )


_ONE_TOKEN = ("--max-tokens", "1", "--temperature", "0")


def _memory(worker: Worker, pid: int, prompts: Prompts, model_bytes: int) -> dict[str, float]:
    peak = peak_memory_during(pid, lambda: fill_context(worker, prompts))
    return {MEMORY.name: (peak.anonymous + model_bytes) / _MIB, RESIDENT.name: peak.resident / _MIB}
