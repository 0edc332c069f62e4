"""Weights from a source into `weights.safetensors`, in kernel layout, a strip of rows at a time.

The file has no holes (safetensors allows none): the header is padded with spaces and every tensor with zeros to
multiples of 64 bytes, so that the mapped file can be used as it is.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from radixlm.runtime.artifact.cpu import default_num_threads
from radixlm.runtime.artifact.manifest import TensorKindInfo

from .ops.rope_frequencies import ROPE_FREQUENCIES, rope_frequencies
from .stored_weights import StoredWeights
from .weights.layout import ALIGNMENT, ROW_BLOCK, round_up
from .weights.packing import pack, packed_shape
from .weights.plan import Array, Matrix, Vector, WeightPlan
from .weights.quantization import Float32, WeightKind, rounding_error

_STRIP_NUMBERS = 1 << 21  # numbers of a matrix that a worker has in memory at once
_MAX_WORKERS = 8  # they bound the memory, with the strips


@dataclass
class _KindTotals:
    count: int = 0
    num_bytes: int = 0
    error: float = 0.0
    energy: float = 0.0


@dataclass(frozen=True)
class _Strip:
    """Rows of one part of a matrix; they become rows `[first_row, ...)` of the matrix, padding counted."""

    matrix: Matrix
    name: str
    rows: slice
    first_row: int


@dataclass(frozen=True)
class _Written:
    """Bytes, and the sums of squares that `rounding_error` gives."""

    num_bytes: int
    error: float
    energy: float


class WeightsWriter:
    """Writes the weights that `plan` asks for; `kind_infos` afterwards says what each kind costs."""

    def __init__(self, weights: StoredWeights, plan: WeightPlan) -> None:
        self._weights, self._source, self._plan = weights, weights.source, plan
        self._totals: dict[WeightKind, _KindTotals] = defaultdict(_KindTotals)
        self._types: dict[WeightKind, set[str]] = defaultdict(set)

    def write(self, path: Path, progress: Callable[[int, int], None]) -> None:
        """Write the file; `progress(done, total)` counts bytes."""
        header = self._header()
        with path.open("wb") as file:
            file.write(header)
            file.truncate(len(header) + self._plan.num_bytes)  # padding reads as zeros
            done = 0
            for vector in self._plan.vectors.values():
                numbers = self._vector(vector)
                os.pwrite(file.fileno(), numbers.tobytes(), len(header) + self._plan.offset(vector.name))
            for strip, written in self._write_strips(file.fileno(), len(header)):
                self._count(strip, written)
                done += written.num_bytes
                progress(min(done, self._plan.num_bytes), self._plan.num_bytes)
            file.flush()
            os.fsync(file.fileno())
        progress(self._plan.num_bytes, self._plan.num_bytes)

    def kind_infos(self) -> dict[str, TensorKindInfo]:
        """For the manifest: bytes and rounding error of each kind of matrix."""
        return {
            kind.label: TensorKindInfo(
                count=totals.count,
                bytes=totals.num_bytes,
                source=tuple(sorted(self._types[kind])),
                relative_error=math.sqrt(totals.error / totals.energy) if totals.energy else 0.0,
            )
            for kind, totals in sorted(self._totals.items(), key=lambda item: item[0].label)
        }

    def _header(self) -> bytes:
        entries = {
            name: {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
            for name, (begin, end) in self._plan.tensors().items()
        }
        text = json.dumps({"__metadata__": {"format": "radixlm"}, **entries}, separators=(",", ":")).encode()
        length = round_up(8 + len(text), ALIGNMENT) - 8
        return struct.pack("<Q", length) + text.ljust(length)

    def _vector(self, vector: Vector) -> Float32:
        out = np.zeros(vector.size, np.float32)
        start = 0
        for name, size in vector.parts:
            if name == ROPE_FREQUENCIES:
                numbers = rope_frequencies(self._source.config)
            else:
                numbers = self._source.read_float32(name)
            out[start : start + size] = numbers
            start += round_up(size, ROW_BLOCK)
        return out

    def _strips(self) -> Iterator[_Strip]:
        for matrix in self._plan.matrices.values():
            first_row = 0
            size = max(ROW_BLOCK, _STRIP_NUMBERS // matrix.num_inputs // ROW_BLOCK * ROW_BLOCK)
            for name, num_rows in matrix.parts:
                for start in range(0, num_rows, size):
                    rows = slice(start, min(start + size, num_rows))
                    yield _Strip(matrix, name, rows, first_row + start)
                first_row += round_up(num_rows, ROW_BLOCK)

    def _write_strips(self, file: int, base: int) -> Iterator[tuple[_Strip, _Written]]:
        """Round, pack and write on all processors (NumPy lets go of the lock), in order of the plan."""
        strips = list(self._strips())
        pool = ThreadPoolExecutor(min(_MAX_WORKERS, default_num_threads()))
        try:
            yield from zip(strips, pool.map(lambda strip: self._write_strip(strip, file, base), strips), strict=True)
        finally:  # an interrupt does not wait for what has not begun
            pool.shutdown(cancel_futures=True)

    def _write_strip(self, strip: _Strip, file: int, base: int) -> _Written:
        matrix = strip.matrix
        weight = self._weights.read(strip.name, strip.rows)
        error, energy = rounding_error(self._source.read_float32(strip.name, strip.rows), weight)
        packed = pack(weight)
        arrays: dict[Array, npt.NDArray[np.generic] | None] = {
            "codes": packed.codes,
            "scales": packed.scales,
            "minima": packed.minima,
        }
        before = packed_shape(matrix.kind, strip.first_row, matrix.num_inputs)  # rows are whole blocks, outermost
        num_bytes = 0
        for array, numbers in arrays.items():
            if numbers is not None:
                offset = base + self._plan.offset(f"{matrix.name}.{array}") + int(getattr(before, array))
                num_bytes += _write_all(file, numbers.tobytes(), offset)
        return _Written(num_bytes, error, energy)

    def _count(self, strip: _Strip, written: _Written) -> None:
        totals = self._totals[strip.matrix.kind]
        totals.count += strip.rows.start == 0
        totals.num_bytes += written.num_bytes
        totals.error += written.error
        totals.energy += written.energy
        self._types[strip.matrix.kind].add(self._source.tensors()[strip.name].type)


def _write_all(file: int, data: bytes, offset: int) -> int:
    view = memoryview(data)
    while view:
        count = os.pwrite(file, view, offset)
        view, offset = view[count:], offset + count
    return len(data)
