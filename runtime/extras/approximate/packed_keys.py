"""Pack keys of one KV head into 4 bits per number, keeping only the numbers that RoPE rotates slowly.

A number that rotates fast tells how far away a token is, one that rotates slowly which token it is. Of SmolLM2's 64,
the 32 slowest find the same rows as all of them in 32 bits, and the 32 of largest variance do not (bench/LOG.md).
Memory and ordered runs on disk use the same format. Knows keys and positions in them, not files or runs.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ...artifact.manifest import KVLayout, Manifest
from ...artifact.model_config import Attention
from ...model.batch import Float32Array

MEMORY_SHARE: Final = 0.04  # of the KV of a run, for its data in memory
ORDER_BYTES: Final = 2.5 / 4  # per token, layer and KV head: ranks of a quarter of the tokens, and checksums
PART_BYTES: Final = 0.5  # per token and layer: a sixteenth of the checksum of a page's part of the layer
_SCALE_BYTES: Final = 2
_MAX_CODE: Final = 7
_MIN_NUMBERS, _STEP = 8, 4
_SHAPE: Final = struct.Struct("<HHI")  # kept dimensions of a key, all its dimensions, tokens
Dims = npt.NDArray[np.int64]  # [layers, n]: kept dimensions of a key, ascending


def kept_dims(manifest: Manifest, share: float = MEMORY_SHARE) -> Dims:
    """Return the dimensions to keep of each layer's keys, so that a run's data in memory takes `share` of its KV.

    At least eight are kept: those that RoPE rotates most slowly.
    """
    attentions = manifest.model.attentions
    rotary = [each.rope.rotary_dim if isinstance(each, Attention) and each.rope else 0 for each in attentions]
    return slowest(rotary, manifest.kv.head_dim, num_kept(manifest.kv, share))


def num_kept(kv: KVLayout, share: float) -> int:
    """Return how many numbers of a key fit into a share of KV, after the orders and checksums of a run."""
    of_layer = share * kv.page_bytes / kv.page_size / kv.num_layers
    tables = ORDER_BYTES * kv.num_kv_heads + PART_BYTES
    most = int(2 * (of_layer - tables - _SCALE_BYTES)) // _STEP * _STEP
    return min(max(most, _MIN_NUMBERS), kv.head_dim // 2 * 2)


def slowest(rotary_dims: Sequence[int], head_dim: int, count: int) -> Dims:
    """Return the `count` slowest numbers of a key, by layer.

    Of the first `rotary_dim` numbers, the i-th ones of both halves rotate alike, and more slowly than those before
    them. The others do not rotate.

    >>> slowest([8], head_dim=8, count=4)  # halves of four
    array([[2, 3, 6, 7]])
    """
    dims = []
    for rotary in rotary_dims:
        half = max(rotary // 2, 1)
        turn = np.where(np.arange(head_dim) < rotary, half - np.arange(head_dim) % half, 0)
        dims.append(np.sort(np.argsort(turn, kind="stable")[:count]))
    return np.array(dims)


@dataclass(frozen=True)
class PackedKeys:
    """The packed keys of a run; indexed by layer they give keys, `[tokens, head_dim]`, dropped numbers are 0."""

    head_dim: int
    dims: Dims
    codes: npt.NDArray[np.uint8]  # [layers, tokens, n / 2]: numbers of the first half in the low bits
    scales: npt.NDArray[np.float16]  # [layers, tokens]
    means: Float32Array  # [layers, n]: subtracted before packing

    @classmethod
    def of(cls, keys: npt.NDArray[np.floating[Any]], dims: Dims) -> PackedKeys:
        """Pack the keys of one KV head, `[layers, tokens, head_dim]`, to 4 bits for each kept dimension."""
        kept = np.take_along_axis(keys, dims[:, None], axis=-1).astype(np.float32)
        np.nan_to_num(kept, copy=False, posinf=0.0, neginf=0.0)
        means = kept.mean(axis=1)
        kept -= means[:, None]
        largest = np.abs(kept).max(axis=-1) / _MAX_CODE
        scales = np.minimum(largest, np.finfo(np.float16).max).astype(np.float16)
        by = np.where(scales > 0, scales, np.float16(1)).astype(np.float32)
        codes = (np.clip(np.rint(kept / by[..., None]), -_MAX_CODE, _MAX_CODE) + _MAX_CODE).astype(np.uint8)
        half = dims.shape[1] // 2
        return cls(keys.shape[-1], dims, codes[..., :half] | codes[..., half:] << 4, scales, means)

    def encode(self) -> npt.NDArray[np.uint8]:
        """Return the keys as bytes, `[layers, n]`, for a run on disk."""
        num_layers, num_kept = self.dims.shape
        shape = np.frombuffer(_SHAPE.pack(num_kept, self.head_dim, self.shape[1]), np.uint8)
        parts = [np.broadcast_to(shape, (num_layers, len(shape)))]
        for array, dtype in ((self.dims, "<u2"), (self.means, "<f4"), (self.scales, "<f2"), (self.codes, "u1")):
            parts.append(np.ascontiguousarray(array.reshape(num_layers, -1), dtype).view(np.uint8))
        return np.concatenate(parts, axis=-1)

    @classmethod
    def decode(cls, packed: npt.NDArray[np.uint8]) -> PackedKeys | None:
        """Decode bytes of `encode`; None if they are invalid."""
        num_layers, num_bytes = packed.shape
        if not num_layers or num_bytes < _SHAPE.size:
            return None
        num_kept, head_dim, num_tokens = _SHAPE.unpack(packed[0, : _SHAPE.size].tobytes())
        sizes = _SHAPE.size, 2 * num_kept, 4 * num_kept, 2 * num_tokens, num_tokens * (num_kept // 2)
        if sum(sizes) != num_bytes or num_kept % 2:
            return None
        parts = np.split(packed, np.cumsum(sizes)[:-1], axis=-1)
        kinds = zip(parts[1:4], ("<u2", "<f4", "<f2"), strict=True)
        dims, means, scales = (np.ascontiguousarray(part).view(dtype) for part, dtype in kinds)
        if dims.size and dims.max() >= head_dim:
            return None
        codes = np.ascontiguousarray(parts[4]).reshape(num_layers, num_tokens, -1)
        return cls(head_dim, dims.astype(np.int64), codes, scales, means)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the keys: `[layers, tokens, head_dim]`."""
        return (*self.scales.shape, self.head_dim)

    @property
    def nbytes(self) -> int:
        """Bytes in memory, without `dims`, which all runs share."""
        return self.codes.nbytes + self.scales.nbytes + self.means.nbytes

    def kept(self, layer: int) -> Float32Array:
        """Return the kept dimensions of a layer's keys, `[tokens, n]`: those of `dims`."""
        codes = self.codes[layer]
        numbers = np.concatenate([codes & 15, codes >> 4], axis=-1).astype(np.float32)
        numbers -= _MAX_CODE
        numbers *= self.scales[layer, :, None]
        numbers += self.means[layer]
        return numbers

    def __getitem__(self, layer: int) -> Float32Array:
        keys = np.zeros((self.codes.shape[1], self.head_dim), np.float32)
        keys[:, self.dims[layer]] = self.kept(layer)
        return keys


@dataclass(frozen=True)
class JoinedKeys:
    """The keys of several consecutive runs of one model."""

    parts: Sequence[PackedKeys]

    @property
    def dims(self) -> Dims:
        """The kept dimensions of a key, the same in all runs of one model."""
        return self.parts[0].dims

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the keys: `[layers, tokens, head_dim]`."""
        layers, _, head_dim = self.parts[0].shape
        return layers, sum(part.shape[1] for part in self.parts), head_dim

    def kept(self, layer: int) -> Float32Array:
        """Return the kept dimensions of a layer's keys, `[tokens, n]`: those of `dims`."""
        return np.concatenate([part.kept(layer) for part in self.parts])

    def __getitem__(self, layer: int) -> Float32Array:
        return np.concatenate([part[layer] for part in self.parts])
