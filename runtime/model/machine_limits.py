"""Measure the limits of this machine, with loops that an artifact contains besides its model.

Knows entry points and rates, not models. The best of many runs counts, because other load on the machine is not a limit
of it.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..artifact import Artifact
from ..errors import EngineError
from ..system import use_huge_pages
from .batch import Int32Array
from .library import choose_num_threads, load_functions
from .memory import map_weights

_SUMS_PER_THREAD = 16
_PRODUCTS = 1 << 28  # per thread: some milliseconds
_LAUNCHES = 1000
_RUNS = 8


@dataclass(frozen=True)
class MachineLimits:
    """The best measured rates, by number of threads.

    Attributes:
        read_gb_per_s: from memory that no cache holds; each thread reads the memory that it wrote first.
        weights_gb_per_s: from the artifact's mapped weights, by all threads.
        integer_gop_per_s: products and sums of 8-bit integers with 4-bit weights in registers; a product counts as two.
        launch_us: time to start all threads of the pool and wait for them, which each parallel kernel does.
    """

    num_threads: int
    read_gb_per_s: dict[int, float]
    weights_gb_per_s: float
    integer_gop_per_s: dict[int, float]
    launch_us: float

    def or_better(self, other: MachineLimits) -> MachineLimits:
        """Return the better of each two values, from two measurements on the same threads."""
        return MachineLimits(
            self.num_threads,
            {count: max(rate, other.read_gb_per_s[count]) for count, rate in self.read_gb_per_s.items()},
            max(self.weights_gb_per_s, other.weights_gb_per_s),
            {count: max(rate, other.integer_gop_per_s[count]) for count, rate in self.integer_gop_per_s.items()},
            min(self.launch_us, other.launch_us),
        )


class LimitsMeter:
    """The measuring loops of one artifact, and the memory that they read.

    Args:
        num_threads: of TVM's pool, like `ModelRunner`'s.
        read_bytes: size of the memory; several times the size of all caches.

    Raises:
        EngineError: the artifact was compiled before modules had these loops.
        UnsupportedCPU, CorruptArtifact: see `ModelRunner`.
    """

    def __init__(self, artifact: Artifact, *, num_threads: int | None = None, read_bytes: int) -> None:
        artifact.check_cpu()
        self._functions = load_functions(artifact, num_threads)
        if "read_memory" not in self._functions:
            raise EngineError(f"{artifact.path} has no loops that measure the machine; compile it again")
        self.num_threads = choose_num_threads()
        self._sums = np.zeros(self.num_threads * _SUMS_PER_THREAD, np.int32)
        weights = map_weights(artifact)
        self._weights = weights[: weights.nbytes // 4 * 4].view(np.int32)
        pages = mmap.mmap(-1, read_bytes)
        self._memory = np.frombuffer(pages, np.int32)
        use_huge_pages(self._memory.ctypes.data, self._memory.nbytes)
        self._functions["touch_memory"](self._memory, self._sums, self.num_threads)

    def measure(self) -> MachineLimits:
        """Measure all limits: a second or two."""
        powers = (1 << exponent for exponent in range((self.num_threads - 1).bit_length()))
        counts = [*powers, self.num_threads]
        return MachineLimits(
            self.num_threads,
            {count: self.read_gb_per_s(count) for count in counts},
            self._rate(self._weights.nbytes, "read_memory", self._weights, self.num_threads),
            {count: self._rate(2 * count * _PRODUCTS, "multiply_integers", _PRODUCTS, count) for count in counts},
            1e-3 / self._rate(_LAUNCHES, "launch_threads", _LAUNCHES, self.num_threads),
        )

    def read_gb_per_s(self, num_threads: int | None = None) -> float:
        """Measure the memory's bandwidth, with all threads by default."""
        return self._rate(self._memory.nbytes, "read_memory", self._memory, num_threads or self.num_threads)

    def _rate(self, amount: int, name: str, what: Int32Array | int, parts: int) -> float:
        """Return 10^9 of `amount` per second, in the best of several calls."""
        best = min(_seconds(lambda: self._functions[name](what, self._sums, parts)) for _ in range(_RUNS))
        return amount / best / 1e9


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
