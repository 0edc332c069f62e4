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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from radixlm.runtime.manifest import TensorKindInfo

from .kernels.layout import ALIGNMENT, ROW_BLOCK, PackedWeight, pack, packed_shape, round_up
from .quantization import Float32, Mode, Weight, WeightKind, requantize, rounding_error
from .rope_frequencies import ROPE_FREQUENCIES, rope_frequencies
from .sources import Source
from .weight_plan import Array, Matrix, Vector, WeightPlan

_STRIP_NUMBERS = 1 << 22  # numbers of a matrix that are in memory at once


@dataclass
class _KindTotals:
    count: int = 0
    num_bytes: int = 0
    error: float = 0.0
    energy: float = 0.0


class WeightsWriter:
    """Writes what `plan` asks for, stored as `modes` says; `kind_infos` afterwards says what each kind cost."""

    def __init__(self, source: Source, plan: WeightPlan, modes: Mapping[str, Mode | None]) -> None:
        self._source, self._plan, self._modes = source, plan, modes
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
            for matrix in self._plan.matrices.values():
                for size in self._write_matrix(matrix, file.fileno(), len(header)):
                    done += size
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

    def _write_matrix(self, matrix: Matrix, file: int, base: int) -> list[int]:
        sizes, first_row = [], 0
        strip = max(ROW_BLOCK, _STRIP_NUMBERS // matrix.num_inputs // ROW_BLOCK * ROW_BLOCK)
        totals = self._totals[matrix.kind]
        for name, num_rows in matrix.parts:
            self._types[matrix.kind].add(self._source.tensors()[name].type)
            totals.count += 1
            for start in range(0, num_rows, strip):
                weight = self._read(name, slice(start, min(start + strip, num_rows)))
                packed, begin = pack(weight), first_row + start
                sizes.append(self._write_strip(matrix, packed, begin, file, base))
                totals.num_bytes += sizes[-1]
            first_row += round_up(num_rows, ROW_BLOCK)
        return sizes

    def _write_strip(self, matrix: Matrix, packed: PackedWeight, first_row: int, file: int, base: int) -> int:
        arrays: dict[Array, np.ndarray[tuple[int, ...], np.dtype[np.generic]] | None] = {
            "codes": packed.codes,
            "scales": packed.scales,
            "minima": packed.minima,
        }
        before = packed_shape(matrix.kind, first_row, matrix.num_inputs)  # rows are whole blocks, outermost
        written = 0
        for array, numbers in arrays.items():
            if numbers is None:
                continue
            data = numbers.tobytes()
            offset = base + self._plan.offset(f"{matrix.name}.{array}") + int(getattr(before, array))
            view = memoryview(data)
            while view:
                count = os.pwrite(file, view, offset)
                view, offset = view[count:], offset + count
            written += len(data)
        return written

    def _read(self, name: str, rows: slice) -> Weight:
        weight = stored_weight(self._source, name, self._modes[name], rows)
        error, energy = rounding_error(self._source.read_float32(name, rows), weight)
        self._totals[weight.kind].error += error
        self._totals[weight.kind].energy += energy
        return weight


def stored_weight(source: Source, name: str, mode: Mode | None, rows: slice | None = None) -> Weight:
    """The numbers that an artifact holds: the source's own, or `mode`'s rounding of them."""
    weight = source.read(name, rows)
    return weight if mode is None else requantize(weight, mode)
