"""Compare a written file of weights with its source, without an evaluation.

Codes and scales that were only moved are all compared directly. In addition, a row of each matrix is unpacked from
kernel layout. It is compared, bit for bit, with the source's value by its format's own formula. Of other matrices, rows
at close intervals are compared in this way: a wrong tensor, a wrong offset in the file or a wrong layout shows in any
row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import product
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray
from radixlm.runtime.errors import VerificationFailed
from radixlm.runtime.system import read_at

from .stored_weights import StoredWeights, in_order
from .weights.layout import ROW_BLOCK, round_up
from .weights.packing import PackedBlocks
from .weights.plan import Array, Matrix, Vector, WeightPlan
from .weights.quantization import Float32

_ROWS_PER_SAMPLE = 1024  # one of this many rows of a matrix is compared
_STRIP_NUMBERS = 1 << 22  # numbers of a matrix that a worker compares at once
_SEED = 0


@dataclass(frozen=True)
class _PartRows:
    """Rows of one part of a matrix, which are rows `[first, ...)` of the matrix with padding; may be its last."""

    matrix: Matrix
    name: str
    rows: slice
    first: int
    is_last: bool


class WrittenWeights:
    """The weights of `plan` in a file, whose first tensor begins at byte `offset`.

    Args:
        file: a descriptor that can be read at any offset.
        weights: the weights to expect.
    """

    def __init__(self, file: int, offset: int, plan: WeightPlan, weights: StoredWeights) -> None:
        self._file, self._offset, self._plan, self._weights = file, offset, plan, weights

    def check(self, progress: Callable[[int, int], None]) -> int:
        """Compare everything. Returns the number of rows compared by the source's own formula.

        Args:
            progress: called with the compared numbers and the total.

        Raises:
            VerificationFailed: it names the tensor and the row that differ.
        """
        strips = list(self._yield_strips(lambda matrix: _STRIP_NUMBERS // matrix.num_inputs))
        done, total = 0, sum(_num_numbers(strip) for strip in strips)
        for vector in self._plan.vectors.values():
            self._check_vector(vector)
        num_rows = 0
        with closing(in_order(self._compare_strip, strips)) as compared:
            for strip, count in compared:
                done, num_rows = done + _num_numbers(strip), num_rows + count
                progress(done, total)
        self._weights.source.release()
        return num_rows

    def _yield_strips(self, size: Callable[[Matrix], int]) -> Iterator[_PartRows]:
        """Yield all matrices in strips of consecutive rows; `size` returns the rows of a strip of a matrix."""
        for matrix in self._plan.matrices.values():
            first, step = 0, max(ROW_BLOCK, size(matrix) // ROW_BLOCK * ROW_BLOCK)
            for (name, num_rows), expert in product(matrix.parts, range(matrix.num_experts)):
                for start in range(0, num_rows, step):
                    rows = slice(expert * num_rows + start, expert * num_rows + min(start + step, num_rows))
                    yield _PartRows(matrix, name, rows, first + start, start + step >= num_rows)
                first += round_up(num_rows, ROW_BLOCK)

    def _compare_strip(self, strip: _PartRows) -> int:
        """Compare a strip with the source; return the number of rows that were compared by the format's own formula.

        If the source has planes, all codes are compared, and only one row of each part by the formula.
        """
        matrix, num_rows = strip.matrix, strip.rows.stop - strip.rows.start
        planes = self._weights.read_planes(strip.name, strip.rows)
        if planes is not None and not self._read_blocks(matrix, strip.first, num_rows).hold(planes):
            self._fail(strip.name, strip.rows, "codes or scales")
        generator = np.random.default_rng((_SEED, strip.first, num_rows))
        starts: Sequence[int] = range(strip.rows.start, strip.rows.stop, _ROWS_PER_SAMPLE)
        if planes is not None:  # only their interpretation is left to compare
            starts = starts[-1:] if strip.is_last else ()
        for start in starts:
            row = int(generator.integers(start, min(start + _ROWS_PER_SAMPLE, strip.rows.stop)))
            self._check_row(strip, row)
        return len(starts)

    def _check_row(self, strip: _PartRows, row: int) -> None:
        """Compare a row, unpacked from kernel layout, with the source's own formula."""
        matrix, rows = strip.matrix, slice(row, row + 1)
        at = strip.first + row - strip.rows.start
        found = self._read_blocks(matrix, at // ROW_BLOCK * ROW_BLOCK, 1).values(at % ROW_BLOCK, matrix.num_inputs)
        if matrix.is_sorted:
            order = self._read(self._plan.offset(f"{matrix.name}.order"), matrix.num_inputs * 4).view(np.int32)
            found[:, order] = found.copy()
        if not np.array_equal(found, self._expected_values(strip.name, rows).reshape(1, -1)):
            self._fail(strip.name, rows, "numbers")

    def _expected_values(self, name: str, rows: slice) -> Float32:
        """Return rows of a tensor by the format's own formula, rounded if the artifact's are."""
        is_exact = self._weights.read(name, rows).is_exact
        return self._weights.source.read_float32(name, rows) if is_exact else self._weights.float32(name, rows)

    def _check_vector(self, vector: Vector) -> None:
        """Compare a vector with the source."""
        found = self._read(self._plan.offset(vector.name), vector.size * 4).view(np.float32)
        at, tensors = 0, self._weights.source.tensors()
        for name, size in vector.parts:
            padded = vector.num_experts * round_up(size, ROW_BLOCK)
            part, at = found[at : at + padded].reshape(vector.num_experts, -1), at + padded
            if name not in tensors:  # computed, not stored by the source
                continue
            expected = self._weights.source.read_float32(name).reshape(vector.num_experts, size)
            if not np.array_equal(part[:, :size], expected) or part[:, size:].any():
                self._fail(name, slice(0, size), "numbers")

    def _read_blocks(self, matrix: Matrix, first_row: int, num_rows: int) -> PackedBlocks:
        """Read the blocks of `num_rows` rows of a matrix from the file; `first_row` is the first of a block."""
        sizes, total = matrix.array_bytes(), matrix.num_experts * matrix.num_outputs // ROW_BLOCK
        first, count = first_row // ROW_BLOCK, round_up(num_rows, ROW_BLOCK) // ROW_BLOCK

        def read(array: Array) -> NDArray[np.uint8]:
            size = sizes.get(array, 0) // total
            if not size:
                return np.empty((count, 0), np.uint8)
            data = self._read(self._plan.offset(f"{matrix.name}.{array}") + first * size, count * size)
            return data.reshape(count, size)

        return PackedBlocks(matrix.kind, read("codes"), read("scales"), read("offsets"))

    def _read(self, offset: int, size: int) -> NDArray[np.uint8]:
        """Read bytes of the file. Raises VerificationFailed if it ends before."""
        data = bytearray(size)
        view = memoryview(data)
        while view:
            count = read_at(self._file, [view], self._offset + offset + size - len(view))
            if not count:
                raise VerificationFailed(f"the weights end after {self._offset + offset + size - len(view)} bytes")
            view = view[count:]
        return np.frombuffer(data, np.uint8)

    def _fail(self, name: str, rows: slice, what: str) -> NoReturn:
        """Raise VerificationFailed that names a tensor and its rows."""
        kind = self._weights.kinds.get(name)
        stored = "" if kind is None else f" ({kind.label})"
        raise VerificationFailed(
            f"{name}{stored} differs from the source in the {what} of rows {rows.start} to {rows.stop - 1}; nothing "
            "was published. Try again; if it differs again, please report the model"
        )


def _num_numbers(strip: _PartRows) -> int:
    """Return the size of a strip, in numbers."""
    num_rows: int = strip.rows.stop - strip.rows.start
    return num_rows * strip.matrix.num_inputs
