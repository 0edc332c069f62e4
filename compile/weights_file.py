"""Write a source's weights into `weights.safetensors`, in kernel layout, a strip of rows at a time.

The file has no holes, because safetensors allows none. The header is padded with spaces, and every tensor with zeros,
to multiples of 64 bytes. The mapped file can be used as it is.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice, product

import numpy as np
import numpy.typing as npt
from radixlm.runtime.artifact.manifest import TensorKindInfo
from radixlm.runtime.artifact.model_config import Rope
from radixlm.runtime.errors import VerificationFailed

from .ops.rope_frequencies import rope_frequencies
from .ops.step_buffers import frequencies_name
from .stored_weights import StoredWeights, in_order
from .weights.kinds import F32, WeightKind
from .weights.layout import ALIGNMENT, ROW_BLOCK, round_up
from .weights.packing import PackedWeight, pack, pack_planes
from .weights.plan import Array, Matrix, Vector, WeightPlan
from .weights.quantization import Float32, Weight, rounding_error

_STRIP_NUMBERS = 1 << 21  # numbers of a matrix that a worker has in memory at once
_MOST_ROUNDING = 0.5  # relative error of a matrix: 4 bits have 0.1, codes in a wrong order 1.4
_HUGE_PAGE = 2 << 20  # bytes
_RELEASED_BYTES = 64 << 20  # after this many written bytes, the source's pages are released


@dataclass
class _TensorTotals:
    """Totals of one tensor: bytes, and `rounding_error`'s sums of squares, except for `exact` rows."""

    kind: WeightKind
    type: str
    num_bytes: int = 0
    error: float = 0.0
    energy: float = 0.0
    exact: list[slice] = field(default_factory=list)


@dataclass(frozen=True)
class RoundedTensor:
    """A matrix whose numbers differ from the source's: its type there, its kind here, and the rounding error.

    `relative_error` is the root mean square of the rounding errors, over that of the source's numbers.
    """

    name: str
    type: str
    kind: str
    relative_error: float


@dataclass(frozen=True)
class _Strip:
    """Rows of one part of a matrix."""

    matrix: Matrix
    name: str
    rows: slice


@dataclass(frozen=True)
class _PackedStrip:
    """A strip in kernel layout, and its `rounding_error`; None if nothing was rounded."""

    weight: PackedWeight
    error_and_energy: tuple[float, float] | None

    def arrays(self) -> dict[Array, npt.NDArray[np.generic]]:
        """Return the codes, and the scales and offsets, if any, by name."""
        weight = self.weight
        found: dict[Array, npt.NDArray[np.generic] | None] = {
            "codes": weight.codes,
            "scales": weight.scales,
            "offsets": weight.offsets,
        }
        return {array: numbers for array, numbers in found.items() if numbers is not None}


class WeightsWriter:
    """A writer of the weights in `plan`; afterwards `kind_infos` returns the cost of each kind.

    `ropes` are all rotary positions of the model, in the order of `ModelConfig.ropes`.
    """

    def __init__(self, weights: StoredWeights, plan: WeightPlan, ropes: Sequence[Rope]) -> None:
        self._weights, self._source, self._plan = weights, weights.source, plan
        self._ropes = {frequencies_name(index): rope for index, rope in enumerate(ropes)}
        self._totals: dict[str, _TensorTotals] = {}

    def write(self, file: int, progress: Callable[[int, int], None]) -> str:
        """Write all bytes in order, each once. Returns their sha256.

        Args:
            file: a descriptor that is written from its position: of a file, of memory, or of a pipe.
            progress: called with the written bytes and the total.
        """
        output, header, total = _HashedOutput(file), self._header(), self._plan.num_bytes
        output.write(header)
        num_released = 0
        with closing(in_order(self._pack, list(self._strips()))) as packed:
            tensors = self._tensors(packed)
            for _, end in self._plan.tensors().values():
                for numbers in next(tensors):
                    output.write(numbers)
                    progress(min(output.num_bytes - len(header), total), total)
                output.write(bytes(len(header) + end - output.num_bytes))
                if output.num_bytes - num_released > _RELEASED_BYTES:
                    num_released = output.num_bytes
                    self._source.release()
        output.flush()
        self._measure_exact()
        self._source.release()
        progress(total, total)
        return output.digest.hexdigest()

    def kind_infos(self) -> dict[str, TensorKindInfo]:
        """Return bytes and rounding error of each kind of matrix, for the manifest."""
        kinds = defaultdict[str, list[_TensorTotals]](list)
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

    def check_rounding(self) -> None:
        """Raise VerificationFailed if a matrix lost its content: it was misread, or its numbers fit no kind."""
        for tensor in self.rounded():
            if not tensor.relative_error <= _MOST_ROUNDING:
                raise VerificationFailed(
                    f"{tensor.name} ({tensor.type}) as {tensor.kind} has a relative error of "
                    f"{tensor.relative_error:.2g}, at most {_MOST_ROUNDING} is rounding; nothing was published"
                )

    def rounded(self) -> tuple[RoundedTensor, ...]:
        """Return the matrices whose numbers differ from the source's."""
        return tuple(
            RoundedTensor(name, totals.type, totals.kind.label, _relative_error([totals]))
            for name, totals in self._totals.items()
            if totals.error
        )

    def _header(self) -> bytes:
        """Return the header of the safetensors file, padded."""
        entries = {
            name: {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
            for name, (begin, end) in self._plan.tensors().items()
        }
        text = json.dumps({"__metadata__": {"format": "radixlm"}, **entries}, separators=(",", ":")).encode()
        length = round_up(8 + len(text), ALIGNMENT) - 8
        return struct.pack("<Q", length) + text.ljust(length)

    def _padded_vector(self, vector: Vector) -> Float32:
        """Return the numbers of a vector, with padding."""
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
        """Yield all matrices in the order of the plan; each strip is whole blocks of outputs, except for padding."""
        for matrix in self._plan.matrices.values():
            size = max(ROW_BLOCK, _STRIP_NUMBERS // matrix.num_inputs // ROW_BLOCK * ROW_BLOCK)
            for (name, num_rows), expert in product(matrix.parts, range(matrix.num_experts)):
                before = expert * num_rows
                for start in range(before, before + num_rows, size):
                    yield _Strip(matrix, name, slice(start, min(start + size, before + num_rows)))

    def _pack(self, strip: _Strip) -> _PackedStrip:
        """Read a strip, and return its bytes in the kernels' layout, with its rounding error; None if it is exact."""
        planes = self._weights.read_planes(strip.name, strip.rows)
        if planes is not None:
            return _PackedStrip(pack_planes(planes, strip.matrix.num_inputs), None)
        weight = self._weights.read(strip.name, strip.rows)
        if weight.is_exact:
            return _PackedStrip(pack(weight), None)
        return _PackedStrip(pack(weight), rounding_error(self._source.read_float32(strip.name, strip.rows), weight))

    def _tensors(self, packed: Iterator[tuple[_Strip, _PackedStrip]]) -> Iterator[Iterator[npt.NDArray[np.generic]]]:
        """Yield the numbers of each tensor of the file, in order, each to be consumed before the next."""
        num_strips = Counter(strip.matrix.name for strip in self._strips())
        matrices = {
            f"{name}.{array}": (matrix, array)
            for name, matrix in self._plan.matrices.items()
            for array in matrix.array_bytes()
        }
        # arrays that follow the codes, which are already written
        other_arrays: dict[str, list[npt.NDArray[np.generic]]] = defaultdict(list)
        for name in self._plan.tensors():
            if name in self._plan.vectors:
                yield iter([self._padded_vector(self._plan.vectors[name])])
                continue
            matrix, array = matrices[name]
            if array == "codes":
                yield self._yield_codes(islice(packed, num_strips[matrix.name]), other_arrays)
            elif array == "order":
                yield iter([self._input_order(matrix)])
            else:
                yield iter(other_arrays.pop(name))

    def _yield_codes(
        self, packed: Iterator[tuple[_Strip, _PackedStrip]], other_arrays: dict[str, list[npt.NDArray[np.generic]]]
    ) -> Iterator[npt.NDArray[np.generic]]:
        """Yield the codes of a matrix; its other arrays are added to `other_arrays`, by the names of their tensors."""
        for strip, found in packed:
            arrays = found.arrays()
            self._count(strip, found.error_and_energy, sum(numbers.nbytes for numbers in arrays.values()))
            yield arrays.pop("codes")
            for array, numbers in arrays.items():
                other_arrays[f"{strip.matrix.name}.{array}"].append(numbers)

    def _input_order(self, matrix: Matrix) -> npt.NDArray[np.int32]:
        """Return the input order of a matrix with sorted inputs."""
        order = self._weights.read(matrix.parts[0][0], slice(0, 1)).input_order
        assert order is not None
        return order

    def _count(self, strip: _Strip, error_and_energy: tuple[float, float] | None, num_bytes: int) -> None:
        """Add a strip's bytes and rounding error to the totals of its tensor."""
        of_tensor = _TensorTotals(strip.matrix.kind, self._source.tensors()[strip.name].type)
        totals = self._totals.setdefault(strip.name, of_tensor)
        totals.num_bytes += num_bytes
        if error_and_energy is None:
            totals.exact.append(strip.rows)
        else:
            totals.error += error_and_energy[0]
            totals.energy += error_and_energy[1]

    def _measure_exact(self) -> None:
        """Add the squares of unchanged rows, if others of their kind are rounded."""
        rounded = {totals.kind for totals in self._totals.values() if totals.error}
        for name, totals in self._totals.items():
            for rows in totals.exact if totals.kind in rounded else ():
                values = self._source.read_float32(name, rows)
                totals.energy += rounding_error(values, Weight(F32, values))[1]


class _HashedOutput:
    """A descriptor's writer, which also hashes the bytes.

    It writes whole huge pages: file systems with large folios keep them so in the page cache, from which they are
    mapped.
    """

    def __init__(self, file: int) -> None:
        self._file, self.digest = file, hashlib.sha256()
        self.num_bytes = 0
        self._waiting = bytearray()

    def write(self, data: bytes | npt.NDArray[np.generic]) -> None:
        """Write `data`; the end of it may wait for `flush`."""
        numbers = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else np.ascontiguousarray(data)
        view = memoryview(numbers.reshape(-1).view(np.uint8))  # type: ignore[arg-type]  # arrays are buffers
        self.digest.update(view)
        self.num_bytes += len(view)
        while view:
            part = view[: _HUGE_PAGE - len(self._waiting)]
            self._waiting += part
            view = view[len(part) :]
            if len(self._waiting) == _HUGE_PAGE:
                self.flush()

    def flush(self) -> None:
        """Write the remaining bytes."""
        view = memoryview(self._waiting)
        while view:
            view = view[os.write(self._file, view) :]
        self._waiting = bytearray()


def _relative_error(tensors: Sequence[_TensorTotals]) -> float:
    """Return the relative error of tensors together."""
    energy = sum(totals.energy for totals in tensors)
    return math.sqrt(sum(totals.error for totals in tensors) / energy) if energy else 0.0
