"""Measure radixlm's engine alone, in separate processes that start when first needed."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from ..processes import RADIXLM, peak_memory_during, seconds_to_first_output
from ..prompts import Prompts
from ..worker import Worker
from .figures import MEASURES, MEMORY, RESIDENT, START, Figure, fill_context

_START_PROMPT = "The capital of France is"
_ONE_TOKEN = ("--max-tokens", "1", "--temperature", "0")
_MIB = 1 << 20


class MeasuredEngine:
    """One engine with its defaults for every figure; `close` ends it."""

    def __init__(self, artifact: Path) -> None:
        self._artifact = artifact
        self._stack = ExitStack()
        self._worker: Worker | None = None

    def measure(self, figure: Figure, prompts: Prompts) -> dict[str, float]:
        """Return values by the names of figures: that of `figure`, and of others that come along."""
        if figure is START:
            command = [RADIXLM, "generate", str(self._artifact), _START_PROMPT, *_ONE_TOKEN]
            return {START.name: seconds_to_first_output(command)}
        if figure is MEMORY:
            with self._open() as worker:
                peak = peak_memory_during(worker.pid, lambda: fill_context(worker, prompts))
            size = sum(file.stat().st_size for file in self._artifact.iterdir())
            return {MEMORY.name: (peak.anonymous + size) / _MIB, RESIDENT.name: peak.resident / _MIB}
        if self._worker is None:
            self._worker = self._stack.enter_context(self._open())
        return {figure.name: MEASURES[figure](self._worker, prompts)}

    def close(self) -> None:
        """End its processes."""
        self._stack.close()

    def _open(self) -> Worker:
        return Worker("bench.engine.worker", self._artifact)
