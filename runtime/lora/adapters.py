"""The LoRA adapters of an engine, by name: each is put into the memory that the compiled module reads.

An adapter is identified by its content: equal numbers under two names are one adapter, and another file under a known
name is another. Knows names, digests and places; not requests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from ..artifact.lora import LORA_BLOCK, LoraGroup, LoraInfo, LoraMatrix, LoraPlace, LoraSource
from ..errors import InvalidAdapter, InvalidParameter
from .adapter_files import AdapterFile, LowRank, read_adapter
from .tensor_files import Float32Array

_JOINED = {"q_proj": "qkv_proj", "gate_proj": "gate_up_proj"}  # in checkpoints that join it with those after it


@dataclass(frozen=True)
class Adapter:
    """A loaded adapter.

    Attributes:
        digest: sha256 of its numbers as the kernels read them, scale included, in hexadecimal.
        index: its place in the memory of all adapters.
    """

    name: str
    digest: str
    index: int


class Adapters:
    """The adapters that requests may name; none can be added later.

    Args:
        files: the path of each, by name.
        info: the room that the artifact has; None: it has none.
        memory: float32 `[info.num_items]`, zeros, which the adapters are put into.

    Raises:
        InvalidAdapter: one of them cannot be used with this artifact, or there are too many.
    """

    def __init__(self, files: Mapping[str, str | Path], info: LoraInfo | None, memory: Float32Array | None) -> None:
        self._by_name: dict[str, Adapter] = {}
        if not files:
            return
        if info is None or memory is None:
            raise InvalidAdapter(
                f"the artifact has no room for LoRA adapters, and there are {len(files)}; compile it again with "
                f"--max-loras {max(len(files), 8)}"
            )
        by_digest: dict[str, int] = {}
        for name, path in files.items():
            found = _Fitted(read_adapter(path), info)
            digest = found.digest()
            if digest not in by_digest:
                if len(by_digest) == info.max_loras:
                    raise InvalidAdapter(
                        f"there are more than {info.max_loras} different adapters, and the artifact has room for "
                        f"{info.max_loras}; compile it again with a larger --max-loras"
                    )
                by_digest[digest] = len(by_digest)
                found.put(memory, by_digest[digest])
            self._by_name[name] = Adapter(name, digest, by_digest[digest])

    @property
    def names(self) -> tuple[str, ...]:
        """Their names, in the order given."""
        return tuple(self._by_name)

    @property
    def digests(self) -> frozenset[str]:
        """The digests of all of them."""
        return frozenset(adapter.digest for adapter in self._by_name.values())

    def named(self, name: str) -> Adapter:
        """Return the adapter of a name.

        Raises:
            InvalidParameter: there is none.
        """
        if name not in self._by_name:
            known = f"there are {', '.join(map(repr, self.names))}" if self.names else "the engine has none"
            raise InvalidParameter(f"lora is {name!r:.200}, and {known}", param="lora")
        return self._by_name[name]


class _Fitted:
    """An adapter's matrices, in the layout of the kernels.

    Raises:
        InvalidAdapter: a matrix is not the model's, or has a larger rank or another shape than the artifact allows.
    """

    def __init__(self, adapter: AdapterFile, info: LoraInfo) -> None:
        self._parts: list[tuple[int, int, Float32Array]] = []  # first item, items of an adapter, numbers
        self._adapter, num_rows = adapter, dict[str, int]()
        for place in info.places():
            for part, (matrix, source) in enumerate(_sources(place.group, adapter)):
                if source is not None and source.name in adapter.changes:
                    num_rows[source.name] = num_rows.get(source.name, 0) + matrix.num_outputs
                    self._add(place, part, matrix, source, adapter.changes[source.name])
        for name, expected in num_rows.items():
            if (found := len(adapter.changes[name].b)) != expected:
                raise InvalidAdapter(
                    f"{adapter.path}: {name} has {found} outputs, the model's {expected}; use the adapter's own model"
                )
        if left := sorted(adapter.changes.keys() - num_rows.keys()):
            of = "the adapter's own model" if adapter.base is None else f"its own model, {adapter.base!r:.200}"
            raise InvalidAdapter(
                f"{adapter.path} changes {left[0]}{f' and {len(left) - 1} others' if left[1:] else ''}, which this "
                f"model's attention and feed-forward layers do not have; use {of}"
            )

    def digest(self) -> str:
        """Return the sha256 of places and numbers."""
        digest = hashlib.sha256()
        for first, _, values in self._parts:
            digest.update(first.to_bytes(8, "little"))
            digest.update(values.data)
        return digest.hexdigest()

    def put(self, memory: Float32Array, index: int) -> None:
        """Write the matrices to the adapter's place in the memory of all adapters."""
        for first, size, values in self._parts:
            start = first + index * size
            memory[start : start + values.size] = values.reshape(-1)

    def _add(self, place: LoraPlace, part: int, matrix: LoraMatrix, source: LoraSource, change: LowRank) -> None:
        """Add the matrices A and B of one of the model's matrices."""
        where, most = f"{self._adapter.path}: {source.name}", place.max_rank
        if change.rank > most:
            raise InvalidAdapter(
                f"{where} has rank {change.rank}, and the artifact has room for {most}; compile it again with "
                f"--max-lora-rank {change.rank}"
            )
        num_inputs, num_outputs = place.group.num_inputs, matrix.num_outputs
        rows = _rows(source, num_outputs)
        if change.a.shape[1] != num_inputs or len(change.b) < source.first_row + num_outputs:
            raise InvalidAdapter(
                f"{where} has A {list(change.a.shape)} and B {list(change.b.shape)}, and the model's matrix has "
                f"{num_outputs} outputs of {num_inputs} inputs; use the adapter's own model"
            )
        a = np.zeros((most, num_inputs), np.float32)
        a[: change.rank] = change.a * np.float32(change.scale)
        b = np.zeros((-(-num_outputs // LORA_BLOCK) * LORA_BLOCK, most), np.float32)
        b[:num_outputs, : change.rank] = change.b[rows]
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            raise InvalidAdapter(f"{where} has numbers that are not finite; fetch it again")
        offset = part * most * num_inputs
        self._parts.append((place.first + offset, place.a_items, _blocks(a)))
        self._parts.append((place.first_of_b(part), place.b_items(matrix), _blocks(b)))


def _sources(group: LoraGroup, adapter: AdapterFile) -> Iterator[tuple[LoraMatrix, LoraSource | None]]:
    """Yield the matrices of a group, each with its place in the adapter; None if the format has no name for it."""
    first = group.matrices[0].huggingface.name
    role = first.split(".")[-2]
    joined = first.replace(f".{role}.", f".{_JOINED.get(role, role)}.")
    is_joined = adapter.format == "huggingface" and joined != first and joined in adapter.changes
    row = 0
    for matrix in group.matrices:
        source = matrix.source(adapter.format)
        yield matrix, msgspec.structs.replace(source, name=joined, first_row=row) if is_joined and source else source
        row += matrix.num_outputs


def _blocks(matrix: Float32Array) -> Float32Array:
    """Return a matrix in the layout of float weights: blocks of 16 rows, each `[columns, 16]`."""
    blocks: Float32Array = np.ascontiguousarray(matrix.reshape(-1, LORA_BLOCK, matrix.shape[1]).swapaxes(1, 2))
    return blocks


def _rows(source: LoraSource, num_outputs: int) -> np.ndarray:
    """Return the stored position of each row of a matrix. Rows that rotate as neighbours are taken apart."""
    rows = np.arange(num_outputs)
    if source.head_dim:
        head, row = np.divmod(rows, source.head_dim)
        i, j = np.divmod(row, source.rotary_dim // 2)
        rows = head * source.head_dim + np.where(row < source.rotary_dim, 2 * j + i, row)
    return source.first_row + rows
