"""The LoRA adapters of an engine, by name: each is put into the memory that the compiled module reads.

An adapter is identified by its content: equal numbers under two names are one adapter, and another file under a known
name is another. Knows names, digests and places; not requests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ..artifact.lora import LORA_BLOCK, LoraDType, LoraInfo, LoraPlace, LoraSource, no_room
from ..errors import InvalidAdapter, InvalidParameter
from ..model.memory import AdapterRows
from .adapter_files import AdapterFile, LowRank, read_adapter
from .tensor_files import Float32Array

_JOINED = {"q_proj": "qkv_proj", "gate_proj": "gate_up_proj"}  # in checkpoints that join it with those after it
_BF16_EXPONENT = np.uint16(0x7F80)  # all of these bits are set in infinities and NaN


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
        rows: what the compiled module reads adapters from; None: it has no room for any.

    Raises:
        InvalidAdapter: one of them cannot be used with this artifact, or there are too many.
    """

    def __init__(self, files: Mapping[str, str | Path], rows: AdapterRows | None) -> None:
        self._by_name: dict[str, Adapter] = {}
        if not files:
            return
        if rows is None:
            raise InvalidAdapter(no_room(len(files)))
        info, by_digest = rows.info, dict[str, int]()
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
                found.put(rows, by_digest[digest])
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

    def of_model(self, model: object) -> str | None:
        """Return the adapter in a request's `model`, `MODEL:ADAPTER` or `ADAPTER`; None if it names none of these."""
        names = (model, model.rpartition(":")[2]) if isinstance(model, str) else ()
        return next((name for name in names if name in self._by_name), None)


class _Fitted:
    """An adapter's numbers, in the layout of the kernels.

    Raises:
        InvalidAdapter: a matrix is not the model's, or has a larger rank or another shape than the artifact allows.
    """

    def __init__(self, adapter: AdapterFile, info: LoraInfo) -> None:
        self._parts: dict[int, npt.NDArray[Any]] = {}  # by their first place in an adapter
        self._ranks = np.zeros(info.num_matrices, np.int32)
        self._dtype, self._adapter, num_rows = info.dtype, adapter, dict[str, int]()
        for places in info.places():
            for place, source in zip(places, _sources(places, adapter), strict=True):
                if source is not None and source.name in adapter.changes:
                    num_rows[source.name] = num_rows.get(source.name, 0) + place.matrix.num_outputs
                    self._add(place, source, adapter.changes[source.name])
        for name, expected in num_rows.items():
            if (found := adapter.changes[name].b.shape[0]) != expected:
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
        """Return the sha256 of ranks, places and numbers."""
        digest = hashlib.sha256(self._ranks.data)
        for first, values in self._parts.items():
            digest.update(first.to_bytes(8, "little"))
            digest.update(values.data)
        return digest.hexdigest()

    def put(self, rows: AdapterRows, index: int) -> None:
        """Write the numbers to the place of an adapter."""
        rows.ranks[index] = self._ranks
        for first, values in self._parts.items():
            rows.memory[index, first : first + values.size] = values.reshape(-1)

    def _add(self, place: LoraPlace, source: LoraSource, change: LowRank) -> None:
        """Add the rank, A and B of one of the model's matrices."""
        where, most, num_outputs = f"{self._adapter.path}: {source.name}", place.max_rank, place.matrix.num_outputs
        if change.rank > most:
            raise InvalidAdapter(
                f"{where} has rank {change.rank}, and the artifact has room for {most}; compile it again with "
                f"--max-lora-rank {change.rank}"
            )
        if change.a.shape[1] != place.num_inputs or change.b.shape[0] < source.first_row + num_outputs:
            raise InvalidAdapter(
                f"{where} has A {list(change.a.shape)} and B {list(change.b.shape)}, and the model's matrix has "
                f"{num_outputs} outputs of {place.num_inputs} inputs; use the adapter's own model"
            )
        a = np.zeros((most, place.num_inputs), np.float32)
        a[: change.rank] = change.a.values * np.float32(change.scale)
        b = np.zeros((-(-num_outputs // LORA_BLOCK) * LORA_BLOCK, most), np.float32)
        b[:num_outputs, : change.rank] = change.b.values[_rows(source, num_outputs)]
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            raise InvalidAdapter(f"{where} has numbers that are not finite; fetch it again")
        self._ranks[place.number] = -(-change.rank // LORA_BLOCK)
        for first, matrix in ((place.a_at, a), (place.b_at, b)):
            self._parts[first] = values = _rounded(_blocks(matrix), self._dtype)
            if not _is_finite(values, self._dtype):
                raise InvalidAdapter(
                    f"{where} has numbers beyond {self._dtype}; compile the artifact again with --lora-dtype f32"
                )


def _sources(places: Sequence[LoraPlace], adapter: AdapterFile) -> Iterator[LoraSource | None]:
    """Yield where the adapter has the matrices of a group; None if its format has no name for one."""
    first = places[0].matrix.huggingface.name
    role = first.split(".")[-2]
    joined = first.replace(f".{role}.", f".{_JOINED.get(role, role)}.")
    is_joined = adapter.format == "huggingface" and joined != first and joined in adapter.changes
    row = 0
    for place in places:
        source = place.matrix.source(adapter.format)
        yield msgspec.structs.replace(source, name=joined, first_row=row) if is_joined and source else source
        row += place.matrix.num_outputs


def _blocks(matrix: Float32Array) -> Float32Array:
    """Return a matrix in the layout of float weights: blocks of 16 rows, each `[columns, 16]`."""
    blocks: Float32Array = np.ascontiguousarray(matrix.reshape(-1, LORA_BLOCK, matrix.shape[1]).swapaxes(1, 2))
    return blocks


def _rounded(values: Float32Array, dtype: LoraDType) -> npt.NDArray[Any]:
    """Return numbers rounded to the nearest of a type, on ties to the even one; bf16 as its 16 bits.

    Numbers beyond the type become infinite.
    """
    if dtype == "f32":
        return values
    if dtype == "f16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16)
    bits = values.view(np.uint32)
    half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return ((bits + half) >> np.uint32(16)).astype(np.uint16)


def _is_finite(values: npt.NDArray[Any], dtype: LoraDType) -> bool:
    """Return whether numbers that `_rounded` returned are all finite."""
    if dtype == "bf16":
        return bool(((values & _BF16_EXPONENT) != _BF16_EXPONENT).all())
    return bool(np.isfinite(values).all())


def _rows(source: LoraSource, num_outputs: int) -> np.ndarray:
    """Return the stored position of each row of a matrix. Rows that rotate as neighbours are taken apart."""
    rows = np.arange(num_outputs)
    if source.head_dim:
        head, row = np.divmod(rows, source.head_dim)
        i, j = np.divmod(row, source.rotary_dim // 2)
        rows = head * source.head_dim + np.where(row < source.rotary_dim, 2 * j + i, row)
    return source.first_row + rows
