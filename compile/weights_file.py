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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import numpy.typing as npt
from radixlm.runtime.artifact.cpu import default_num_threads
from radixlm.runtime.artifact.manifest import TensorKindInfo
from radixlm.runtime.artifact.model_config import Rope

from .ops.rope_frequencies import rope_frequencies
from .ops.step_places import frequencies_name
from .stored_weights import StoredWeights
from .weights.kinds import WeightKind
from .weights.layout import ALIGNMENT, ROW_BLOCK, round_up
from .weights.packing import pack, packed_shape
from .weights.plan import Array, Matrix, Vector, WeightPlan
from .weights.quantization import Float32, rounding_error

_STRIP_NUMBERS = 1 << 21  # numbers of a matrix that a worker has in memory at once
_MAX_WORKERS = 8  # they bound the memory, with the strips


@dataclass
class _Totals:
    """Of one tensor: bytes, and the sums of squares that `rounding_error` gives."""

    kind: WeightKind
    type: str
    num_bytes: int = 0
    error: float = 0.0
    energy: float = 0.0


@dataclass(frozen=True)
class RoundedTensor:
    """A matrix whose numbers are not the source's: its type there, its kind here, and how far it is off.

    `relative_error` is the root mean square of what rounding changed, over that of the source's numbers.
    """

    name: str
    type: str
    kind: str
    relative_error: float


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
    """Writes the weights that `plan` asks for; `kind_infos` afterwards says what each kind costs.

    `ropes` are all rotary positions of the model, in the order of `ModelConfig.ropes`."""

    def __init__(self, weights: StoredWeights, plan: WeightPlan, ropes: Sequence[Rope]) -> None:
        self._weights, self._source, self._plan = weights, weights.source, plan
        self._ropes = {frequencies_name(index): rope for index, rope in enumerate(ropes)}
        self._totals: dict[str, _Totals] = {}

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
            for matrix in self._plan.matrices.values():
                if matrix.is_sorted:
                    order = self._weights.read(matrix.parts[0][0], slice(0, 1)).input_order
                    assert order is not None
                    _write_all(file.fileno(), order.tobytes(), len(header) + self._plan.offset(f"{matrix.name}.order"))
            for strip, written in self._write_strips(file.fileno(), len(header)):
                self._count(strip, written)
                done += written.num_bytes
                progress(min(done, self._plan.num_bytes), self._plan.num_bytes)
            file.flush()
            os.fsync(file.fileno())
        progress(self._plan.num_bytes, self._plan.num_bytes)

    def kind_infos(self) -> dict[str, TensorKindInfo]:
        """For the manifest: bytes and rounding error of each kind of matrix."""
        kinds = defaultdict[str, list[_Totals]](list)
        for totals in self._totals.values():
            kinds[totals.kind.label].append(totals)
        return {
            label: TensorKindInfo(
                count=len(tensors),
                bytes=sum(totals.num_bytes for totals in tensors),
                source=tuple(sorted({totals.type for totals in tensors})),
                relative_error=_relative_error(tensors),
            )
            for label, tensors in sorted(kinds.items())
        }

    def rounded(self) -> tuple[RoundedTensor, ...]:
        """The matrices whose numbers are not the source's."""
        return tuple(
            RoundedTensor(name, totals.type, totals.kind.label, _relative_error([totals]))
            for name, totals in self._totals.items()
            if totals.error
        )

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
            rope = self._ropes.get(name)
            numbers = self._source.read_float32(name) if rope is None else rope_frequencies(rope)
            for expert in range(vector.num_experts):
                out[start : start + size] = numbers.reshape(vector.num_experts, -1)[expert]
                start += round_up(size, ROW_BLOCK)
        return out

    def _strips(self) -> Iterator[_Strip]:
        for matrix in self._plan.matrices.values():
            first_row = 0
            size = max(ROW_BLOCK, _STRIP_NUMBERS // matrix.num_inputs // ROW_BLOCK * ROW_BLOCK)
            for (name, num_rows), expert in product(matrix.parts, range(matrix.num_experts)):
                before = expert * num_rows
                for start in range(0, num_rows, size):
                    rows = slice(before + start, before + min(start + size, num_rows))
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
            "offsets": packed.offsets,
        }
        before = packed_shape(matrix.kind, strip.first_row, matrix.num_inputs)  # rows are whole blocks, outermost
        num_bytes = 0
        for array, numbers in arrays.items():
            if numbers is not None:
                offset = base + self._plan.offset(f"{matrix.name}.{array}") + int(getattr(before, array))
                num_bytes += _write_all(file, numbers.tobytes(), offset)
        return _Written(num_bytes, error, energy)

    def _count(self, strip: _Strip, written: _Written) -> None:
        of_tensor = _Totals(strip.matrix.kind, self._source.tensors()[strip.name].type)
        totals = self._totals.setdefault(strip.name, of_tensor)
        totals.num_bytes += written.num_bytes
        totals.error += written.error
        totals.energy += written.energy


def _relative_error(tensors: Sequence[_Totals]) -> float:
    energy = sum(totals.energy for totals in tensors)
    return math.sqrt(sum(totals.error for totals in tensors) / energy) if energy else 0.0


def _write_all(file: int, data: bytes, offset: int) -> int:
    view = memoryview(data)
    while view:
        count = os.pwrite(file, view, offset)
        view, offset = view[count:], offset + count
    return len(data)
