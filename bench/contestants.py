"""The engines that `peers.py` compares, each in processes of its own that start when they are first needed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from .figures import DECODE, MEASURES, MEMORY, MEMORY_CONTEXT, RESIDENT, START, Figure, fill_context
from .processes import peak_memory_during, seconds_to_first_output
from .prompts import Prompts
from .worker import Worker

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
    """One engine with its defaults serves every figure."""

    def __init__(self, name: str, artifact: Path) -> None:
        self.name, self._artifact = name, artifact
        self._stack = ExitStack()
        self._worker: Worker | None = None

    def measure(self, figure: Figure, prompts: Prompts) -> dict[str, float]:
        """See `Contestant`."""
        if figure is START:
            command = [*_RADIXLM, "generate", str(self._artifact), _START_PROMPT, *_ONE_TOKEN]
            return {START.name: seconds_to_first_output(command)}
        if figure is MEMORY:
            with Worker("bench.radixlm_worker", self._artifact) as worker:
                return _memory(worker, prompts, sum(f.stat().st_size for f in self._artifact.iterdir()))
        if self._worker is None:
            self._worker = self._stack.enter_context(Worker("bench.radixlm_worker", self._artifact))
        return {figure.name: MEASURES[figure](self._worker, prompts)}

    def close(self) -> None:
        """See `Contestant`."""
        self._stack.close()


class LlamaCppContestant:
    """llama.cpp with flash attention, which is faster everywhere but in single decode: there the better of both counts.

    Each number of streams has a server of its own, for its context is divided between them.
    """

    def __init__(self, name: str, gguf: Path, *, python: str, num_threads: int) -> None:
        self.name, self._gguf, self._python, self._num_threads = name, gguf, python, num_threads
        self._stack = ExitStack()
        self._workers: dict[tuple[int, bool], Worker] = {}

    def measure(self, figure: Figure, prompts: Prompts) -> dict[str, float]:
        """See `Contestant`."""
        if figure is START:
            command = [self._python, "-m", "bench.llama_cpp_start", str(self._gguf), _START_PROMPT]
            return {START.name: seconds_to_first_output([*command, str(self._num_threads)])}
        if figure is MEMORY:
            with self._open(1, True, MEMORY_CONTEXT) as worker:
                return _memory(worker, prompts, self._gguf.stat().st_size)
        workers = [self._worker(figure.num_streams, True)]
        if figure is DECODE:
            workers.append(self._worker(1, False))
        return {figure.name: max(MEASURES[figure](worker, prompts) for worker in workers)}

    def system_info(self) -> str:
        """The instruction sets that this build uses."""
        return str(self._worker(1, True).call("system_info"))

    def close(self) -> None:
        """See `Contestant`."""
        self._stack.close()

    def _worker(self, num_parallel: int, flash_attention: bool) -> Worker:
        key = (num_parallel, flash_attention)
        if key not in self._workers:
            context = 4096 if num_parallel == 1 else 128
            self._workers[key] = self._stack.enter_context(self._open(num_parallel, flash_attention, context))
        return self._workers[key]

    def _open(self, num_parallel: int, flash_attention: bool, context: int) -> Worker:
        return Worker(
            "bench.llama_cpp_worker",
            self._gguf,
            *("--num-parallel", num_parallel, "--context", context, "--threads", self._num_threads),
            *("--flash-attention", "on" if flash_attention else "off"),
            python=self._python,
        )


_RADIXLM: Sequence[str] = (str(Path(sys.executable).with_name("radixlm")),)
_ONE_TOKEN = ("--max-tokens", "1", "--temperature", "0")


def _memory(worker: Worker, prompts: Prompts, model_bytes: int) -> dict[str, float]:
    peak = peak_memory_during(worker.pid, lambda: fill_context(worker, prompts))
    return {MEMORY.name: (peak.anonymous + model_bytes) / _MIB, RESIDENT.name: peak.resident / _MIB}
