"""Choose the storage of each tensor of a source: unchanged or rounded to fewer bits; and count its bytes.

Knows numbers, sizes and kinds; nothing of kernel layout and files. Also processes strips of tensors on all cores, and
yields the results in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from typing import Literal, TypeVar

import gguf
import numpy as np
from radixlm.runtime.artifact.cpu import default_num_threads
from radixlm.runtime.artifact.model_config import ModelConfig
from radixlm.runtime.errors import UnsupportedTensor

from .families.registry import decoder_of
from .ops.layers import Embedding, ExpertLinear, HeadLinear, Linear, Part
from .sources import Source
from .weights.kinds import WeightKind
from .weights.layout import ALIGNMENT, ROW_BLOCK, round_up
from .weights.plan import Matrix
from .weights.quantization import GROUP, Float32, Mode, Weight, WeightPlanes, keeps, requantize

Quantize = Literal["keep", "q4", "q8", "f16", "f32"]

_STRIP_NUMBERS = 1 << 19  # numbers of a matrix that are converted to float32 at a time

# An error in these costs most, and they are read once per token: with q4 they keep 8 bits, as in llama.cpp.
_KEPT_IN_8_BITS = ("model.embed_tokens.weight", "lm_head.weight", "model.embeddings.word_embeddings.weight")


class StoredWeights:
    """The tensors of `source` as `quantize` stores them. Vectors are always float32.

    Attributes:
        kinds: storage kind of each matrix, by its checkpoint name.
        sorted_inputs: the names of the matrices whose inputs are not in the model's order.

    Raises:
        UnsupportedTensor: the inputs of a stack of matrices are sorted.
    """

    def __init__(self, source: Source, quantize: Quantize) -> None:
        self.source = source
        matrices = {name: tensor for name, tensor in source.tensors().items() if _is_matrix(name, tensor.shape)}
        parts = list(decoder_of(source.config).parts())
        exact = {part.name for part in parts if isinstance(part, Linear) and part.exact}
        stacks = {part.name: "experts" for part in parts if isinstance(part, ExpertLinear)}
        stacks |= {part.name: "heads of latent attention" for part in parts if isinstance(part, HeadLinear)}
        self._modes = {
            name: _rounding_kind(name, tensor.shape[-1], quantize, is_exact=name in exact)
            for name, tensor in matrices.items()
        }
        is_sorted = {name for name in stacks if source.read(name, slice(0, 1)).input_order is not None}
        for name in sorted(name for name in is_sorted if self._modes[name] is None):
            raise UnsupportedTensor(
                f"{source.name}: {name} is of {stacks[name]}, and its inputs are sorted (act-order), which no kernel "
                "computes; take a checkpoint without desc_act, or round it with --quantize q8"
            )
        # Each matrix of a stack has its own order.
        self._from_floats = {name for name, mode in self._modes.items() if mode in ("f16", "f32") or name in is_sorted}
        first_rows = {name: self.read(name, slice(0, 1)) for name in matrices}
        self.kinds: dict[str, WeightKind] = {name: row.kind for name, row in first_rows.items()}
        self._kept = {name for name, mode in self._modes.items() if mode is None or self._is_stored_as(name, mode)}
        self.sorted_inputs = frozenset(name for name, row in first_rows.items() if row.input_order is not None)

    def read(self, name: str, rows: slice | None = None) -> Weight:
        """Return the artifact's numbers of a tensor, or of rows `[start, stop)` of a matrix."""
        mode = self._modes.get(name)
        if mode is None:
            return self.source.read(name, rows)
        if name in self._from_floats:  # avoids the rounding of `Source.read`
            values = self.source.read_float32(name, rows)
            return requantize(values.reshape(-1, values.shape[-1]), mode)
        return requantize(self.source.read(name, rows), mode)

    def read_planes(self, name: str, rows: slice) -> WeightPlanes | None:
        """Return the same rows as `read`, their codes in bit planes.

        None if the source has no planes of them, or if the rows are rounded.
        """
        return self.source.read_planes(name, rows) if name in self._kept else None

    def _is_stored_as(self, name: str, mode: Mode) -> bool:
        """Return whether the source stores a matrix as `mode` would, so that it need not be rounded."""
        return name not in self._from_floats and keeps(self.source.read(name, slice(0, 1)).kind, mode)

    def float32(self, name: str, rows: slice | None = None) -> Float32:
        """Return `read`'s numbers as float32. A whole tensor has its own shape; rows of experts are concatenated."""
        shape = self.source.tensors()[name].shape
        if name not in self.kinds:
            values = self.read(name, rows).dequantize()
            return values.reshape(shape) if rows is None else values
        start, stop, _ = (rows or slice(None)).indices(prod(shape[:-1]))
        values = np.empty((max(stop - start, 0), shape[-1]), np.float32)
        step = max(1, _STRIP_NUMBERS // shape[-1])
        for first in range(start, stop, step):  # temporaries stay in the CPU's cache
            last = min(first + step, stop)
            values[first - start : last - start] = self.read(name, slice(first, last)).dequantize()
        return values.reshape(shape) if rows is None else values


def _is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor is a matrix, or a stack of them. Biases of experts are not."""
    return len(shape) > 1 and not name.endswith("bias")


def _rounding_kind(name: str, num_inputs: int, quantize: Quantize, *, is_exact: bool) -> Mode | None:
    """Return the kind to which a matrix is rounded; None if it is kept as it is."""
    if quantize == "keep" or (is_exact and quantize in ("q4", "q8")):
        return None
    mode: Mode = "q8" if quantize == "q4" and name in _KEPT_IN_8_BITS else quantize
    return "f16" if mode in ("q4", "q8") and num_inputs % GROUP else mode  # rows that are not a multiple of a group


T = TypeVar("T")
R = TypeVar("R")

_MAX_WORKERS = 8  # limits the memory, of which each worker needs some


def in_order(work: Callable[[T], R], items: Iterable[T]) -> Generator[tuple[T, R]]:
    """Yield each item and the result of `work`, computed a few items ahead in threads.

    NumPy releases the interpreter's lock.
    """
    num_workers = min(_MAX_WORKERS, default_num_threads())
    pool = ThreadPoolExecutor(num_workers)
    waiting = deque[tuple[T, Future[R]]]()
    try:
        for item in items:
            waiting.append((item, pool.submit(work, item)))
            if len(waiting) > num_workers + 1:
                first, future = waiting.popleft()
                yield first, future.result()
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()
    finally:  # an interrupt does not wait for items that have not begun
        pool.shutdown(cancel_futures=True)


_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # bytes of a number in safetensors


def source_token_bytes(source: Source) -> int | None:
    """Return the bytes of the source that a decoded token reads; None if scales are stored in separate tensors."""
    sizes = {name: _stored_bytes(info.shape, info.type) for name, info in source.tensors().items()}
    known = {name: size for name, size in sizes.items() if size is not None}
    return _count_for_token(known, source.config) if len(known) == len(sizes) else None


def artifact_token_bytes(weights: StoredWeights) -> int:
    """Return the bytes of the artifact that a decoded token reads."""
    return _count_for_token(_artifact_sizes(weights), weights.source.config)


def token_weights(weights: StoredWeights) -> int:
    """Return the number of matrix elements that a decoded token reads."""
    tensors = weights.source.tensors()
    return _count_for_token({name: prod(tensors[name].shape) for name in weights.kinds}, weights.source.config)


def artifact_bytes(weights: StoredWeights) -> int:
    """Return the bytes of all of the artifact's weights."""
    return sum(_artifact_sizes(weights).values())


def _token_shares(config: ModelConfig) -> dict[str, float]:
    """Return, by tensor, the share of it that a decoded token reads: all, one row, or those of the chosen experts."""
    active = {each.num_experts: each.num_active for layer in config.all_layers if (each := layer.experts) is not None}
    decoder = decoder_of(config)
    tied = decoder.embed_tokens if config.tie_word_embeddings else None

    def share(part: Part) -> float:
        if isinstance(part, ExpertLinear):
            return active[part.num_experts] / part.num_experts
        # a tied embedding is also the output matrix, which is read whole
        return 1 / part.num_rows if isinstance(part, Embedding) and part != tied else 1.0

    return {name: share(part) for part in decoder.parts() for name in part.tensors}


def _count_for_token(sizes: Mapping[str, int], config: ModelConfig) -> int:
    """Return the sum of `sizes` (bytes or numbers by tensor) that a decoded token reads."""
    shares = _token_shares(config)
    return round(sum(size * shares[name] for name, size in sizes.items()))


def _stored_bytes(shape: tuple[int, ...], type_: str) -> int | None:
    """Return the bytes of a tensor in its file; None for types with separate scales."""
    if type_ in _BYTES:
        return prod(shape) * _BYTES[type_]
    if type_ not in gguf.GGMLQuantizationType.__members__:
        return None
    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_]]
    return prod(shape) // values * size


def _artifact_sizes(weights: StoredWeights) -> dict[str, int]:
    """Return the artifact's bytes of each tensor."""
    return {name: _artifact_bytes(name, info.shape, weights) for name, info in weights.source.tensors().items()}


def _artifact_bytes(name: str, shape: tuple[int, ...], weights: StoredWeights) -> int:
    """Return the bytes of a tensor in kernel layout, as in `WeightPlan`."""
    kind = weights.kinds.get(name)
    if kind is None:
        return round_up(round_up(prod(shape), ROW_BLOCK) * 4, ALIGNMENT)
    matrix = Matrix(((name, prod(shape[:-1])),), kind, shape[-1], name in weights.sorted_inputs)
    return sum(round_up(size, ALIGNMENT) for size in matrix.array_bytes().values())
