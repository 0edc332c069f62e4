"""Evaluate a model in plain NumPy, as a slow and obvious reference for compiled kernels.

The same model file that calls the kernels is evaluated; goldens of `transformers` verify the model files. Some of the
layers can be evaluated alone. A layer whose weights are all zeros adds nothing to its rows, whatever its kind. A
compiled module computes all layers; with zeros for some of them, it computes a shorter model.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.artifact.model_config import ModelConfig
from radixlm.runtime.errors import CompileError
from radixlm.runtime.system import use_huge_pages

from .families.registry import decoder_of
from .ops.functions import Array
from .ops.reference_ops import GetWeight, ReferenceOps
from .weights.plan import WeightPlan


def reference_logits(
    config: ModelConfig,
    weight: GetWeight,
    token_ids: Sequence[int] | npt.NDArray[np.integer[Any]],
    *,
    layers: Sequence[int] | None = None,
    **options: Any,
) -> Array:
    """Return logits after each token of one sequence, `[len(token_ids), vocab_size]`, with positions from 0.

    `weight(name)` returns a dequantized tensor under its Hugging Face name, matrices as `[out, in]`; `options` are
    those of `ReferenceOps`. With `layers`, tokens pass these layers only, as if the others added nothing.

    >>> weight = lambda name: source.read(name).dequantize()  # doctest: +SKIP
    >>> logits = reference_logits(source.config, weight, [1, 15043])  # doctest: +SKIP
    """
    return evaluate(config, ReferenceOps(weight, token_ids, **options), layers)


def evaluate(config: ModelConfig, op: ReferenceOps, layers: Sequence[int] | None = None) -> Array:
    """Return the logits of the tokens of `op`, after all layers or after `layers`."""
    decoder = decoder_of(config)
    if layers is not None:
        decoder.layers = [decoder.layers[index] for index in layers]
    return decoder.forward(op)[0]


def draft_after_last(config: ModelConfig, op: ReferenceOps) -> Array:
    """Return an MTP head's logits `[1, vocab_size]` after the last token of `op`, which must be evaluated."""
    logits: Array = decoder_of(config).draft(op)[0][-1:]
    return logits


Weights = npt.NDArray[np.uint8]

_MAP_FIXED = 0x10


@contextmanager
def weights_of_layers(artifact: Artifact, plan: WeightPlan, layers: Sequence[int]) -> Iterator[Weights | None]:
    """Yield the artifact's mapped weights, with zeros for all layers but `layers`; None if there are no others.

    A factor of a layer's output is 1 for the others.
    """
    decoder = decoder_of(artifact.manifest.model)
    others = [layer for index, layer in enumerate(decoder.layers) if index not in layers]
    if not others:
        yield None
        return
    names = {name for layer in others for part in layer.parts() for name in part.tensors}
    offset = artifact.data_offset()
    with artifact.weights_path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    mapped = np.frombuffer(memory, np.uint8)
    for begin, end in _ranges(plan, names):
        _clear(mapped[offset + begin : offset + end])
    for layer in others:
        if layer.scalar is not None:
            begin, end = plan.tensors()[layer.scalar.name]
            mapped[offset + begin : offset + end].view(np.float32)[:] = 1
    yield mapped[offset:]


def _ranges(plan: WeightPlan, names: set[str]) -> list[tuple[int, int]]:
    """Return the ranges of the tensors of `names` in the plan; neighbours are one range."""
    parts = {vector.name: vector.parts for vector in plan.vectors.values()}
    for matrix in plan.matrices.values():
        parts |= {f"{matrix.name}.{array}": matrix.parts for array in matrix.array_bytes()}
    found: list[tuple[int, int]] = []
    for tensor, (begin, end) in plan.tensors().items():
        if not all(name in names for name, _ in parts[tensor]):
            continue
        if found and found[-1][1] == begin:
            begin = found.pop()[0]
        found.append((begin, end))
    return found


def _clear(memory: Weights) -> None:
    """Set mapped weights to zeros: whole pages are replaced by empty ones, the rest is overwritten."""
    address = memory.ctypes.data
    first = -address % mmap.PAGESIZE
    size = (len(memory) - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if size <= 0:
        memory[:] = 0
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64)
    flags, target = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED, address + first
    if libc.mmap(target, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) != target:
        raise CompileError(f"{size} bytes of zeros cannot be mapped (errno {ctypes.get_errno()})")
    # one page fault for each 2 MiB instead of each 4 KiB
    use_huge_pages(target, size)
    memory[:first] = 0
    memory[first + size :] = 0
