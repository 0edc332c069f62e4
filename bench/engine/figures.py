"""Figures that compare engines: the call to a worker, and the number made from its answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..prompts import Prompts
from ..worker import Worker

CACHED_TOKENS, NEW_TOKENS = 600, 80
MEMORY_CONTEXT = 2048
DECODE_PROMPT, DECODE_TOKENS = 16, 128
STREAM_PROMPT, STREAM_TOKENS = 32, 40  # tokens; the whole stream fits one context of 128


@dataclass(frozen=True)
class Figure:
    """One row of the table. `num_streams` is how many requests the engine must be able to compute at once."""

    name: str
    title: str
    unit: str
    higher_is_better: bool
    num_streams: int = 1

    def gain(self, ours: float, theirs: float) -> float:
        """Return how many times better `ours` is."""
        return ours / theirs if self.higher_is_better else theirs / ours


DECODE = Figure("decode", "decode, batch 1", "tok/s", True)
PREFILL_128 = Figure("prefill_128", "prefill 128", "tok/s", True)
PREFILL_512 = Figure("prefill_512", "prefill 512", "tok/s", True)
PREFILL_2048 = Figure("prefill_2048", "prefill 2,048", "tok/s", True)
STREAM_1 = Figure("streams_1", "1 stream over HTTP, steady decode", "tok/s", True)
STREAMS_8 = Figure("streams_8", "8 streams, steady decode in all", "tok/s", True, 8)
STREAMS_50 = Figure("streams_50", "50 streams, steady decode in all", "tok/s", True, 50)
CACHED_TTFT = Figure("cached_ttft", f"TTFT, {CACHED_TOKENS} cached + {NEW_TOKENS} new tokens", "ms", False)
START = Figure("start", "process start to first token", "s", False)
MEMORY = Figure("memory", "peak memory, batch 1, 2k context: anonymous + model files", "MiB", False)
RESIDENT = Figure("resident", "the same: peak resident set", "MiB", False)

# Measured by a worker: a function makes the call and the number from a worker and prompts.
Measure = Callable[[Worker, Prompts], float]


def _prefill(num_tokens: int) -> Measure:
    return lambda worker, prompts: num_tokens / float(worker.call("prefill", prompt=prompts.ids(num_tokens)))


def _measure_streams(num_streams: int) -> Measure:
    """Return a measurement: tokens per second of `num_streams` replies that a worker's engine decodes together."""

    def measure(worker: Worker, prompts: Prompts) -> float:
        batch = prompts.batch(num_streams, STREAM_PROMPT)
        return float(worker.call("streams", prompts=batch, num_tokens=STREAM_TOKENS))

    return measure


def _decode(worker: Worker, prompts: Prompts) -> float:
    return float(worker.call("decode", prompt=prompts.ids(DECODE_PROMPT), num_tokens=DECODE_TOKENS))


def _cached_ttft(worker: Worker, prompts: Prompts) -> float:
    return 1e3 * float(worker.call("resume", prefix=prompts.ids(CACHED_TOKENS), suffix=prompts.ids(NEW_TOKENS)))


PREFILLS: dict[Figure, int] = {PREFILL_128: 128, PREFILL_512: 512, PREFILL_2048: 2048}  # tokens
MEASURES: dict[Figure, Measure] = {
    DECODE: _decode,
    **{figure: _prefill(num_tokens) for figure, num_tokens in PREFILLS.items()},
    STREAM_1: _measure_streams(1),
    STREAMS_8: _measure_streams(8),
    STREAMS_50: _measure_streams(50),
    CACHED_TTFT: _cached_ttft,
}
OF_AN_ENGINE = tuple(figure for figure in MEASURES if figure is not STREAM_1)  # within a process it equals DECODE


def fill_context(worker: Worker, prompts: Prompts) -> Any:
    """Fill the context of `MEMORY_CONTEXT` with one request, to measure peak memory."""
    return worker.call("decode", prompt=prompts.ids(MEMORY_CONTEXT - 48), num_tokens=48)
