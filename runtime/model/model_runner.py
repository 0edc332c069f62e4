"""Run an artifact's compiled module: map its weights, allocate the KV pool, and check each forward before calling it.

Knows arrays; the library is loaded by `library.py`, pages belong to `page_pool.py`, tokens to `sequence.py`. One thread
owns a runner. Closing one ends the threads that kernels run on; other runners of the artifact start them again.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ..artifact import Artifact
from ..artifact.artifact_use import ArtifactUse
from ..artifact.manifest import MAX_POSITION, PAGE_SIZE, TOP_LOGITS, WEIGHT_BLOCK
from ..artifact.window_layers import WindowLayers
from ..errors import EngineError, InvalidParameter
from .batch import (
    NEVER_DRAFTED,
    Batch,
    BatchArrays,
    BatchShape,
    Float32Array,
    Float64Array,
    Int32Array,
    PageCopy,
    TopLogits,
    UInt8Array,
)
from .library import load_functions, tensor_maker
from .memory import AdapterRows, StateSlots, WindowPool, map_in, map_weights, zeros

_KV_DTYPES = {"f16": np.float16, "f32": np.float32, "k12v8": np.int8}
_PADDED_VOCABULARY = 16
_MAX_SHAPES = 256  # shapes of batches whose arguments are kept
_NO_ROWS: Int32Array = np.zeros(1, np.int32)[:0]  # TVM refuses the strides of an array created empty


class ModelRunner:
    """An artifact ready to run, with a KV pool of `num_pages` pages.

    Args:
        num_threads: threads that kernels run on, the caller's included; by default `TVM_NUM_THREADS`, or all CPUs that
            this process can use. Runners of one artifact share their threads: the last one sets the number.
        keep_scores: allocate `attention_sums` next to the pool, for `forward_scored`.
        weights: replaces the artifact's own weights; uint8, aligned to 64 bytes.
        num_state_slots: at least two for models that keep states; ignored for others.
        drops_rows: the caller drops rows of sliding windows, so that all pages together can exceed the memory.

    Attributes:
        state_pool: float32 `[num_state_slots, state_bytes / 4]`, a sequence's state in each slot; None for models
            without states. Callers can copy, read and write slots between calls; the first one stays zeros.
        adapters: the memory of LoRA adapters; None for modules without room for any.
        attention_sums: float32 `[layers, kv_heads, num_pages, PAGE_SIZE]`, the softmax weights of each KV row of the
            pool, summed over the tokens and query heads of all calls of `forward_scored`. None unless scores are kept.
            Callers can change it: the rows of a page that is taken again still have their sums.
        attention_counts: int32 `[num_pages, PAGE_SIZE]`, the number of tokens in each row's sum. None unless scores are
            kept.
        queries: float32 `[layers, max_num_tokens, heads, head_dim]`, the queries of the last call of `forward_scored`,
            with RoPE, in the order of its tokens. None unless scores are kept.

    Raises:
        UnsupportedCPU: the module needs features that this machine lacks.
        CorruptArtifact: the module cannot be loaded, or is not the one that the manifest describes.
        InvalidParameter: there are no pages, or too few slots for states.
        EngineError: the memory for the pools cannot be allocated, or the module has no `forward_scored`.
    """

    def __init__(
        self,
        artifact: Artifact,
        *,
        num_pages: int,
        num_threads: int | None = None,
        keep_scores: bool = False,
        num_state_slots: int = 0,
        drops_rows: bool = False,
        weights: npt.NDArray[np.uint8] | None = None,
    ) -> None:
        if num_pages < 1:
            raise InvalidParameter(f"num_pages is {num_pages}, must be at least 1")
        artifact.check_cpu()
        manifest = artifact.manifest
        layout, module, num_outputs = manifest.kv, manifest.module, manifest.model.num_outputs
        self._layout = layout
        self._module, self._num_outputs, self._num_pages = module, num_outputs, num_pages
        self._vocab_size = manifest.model.vocab_size
        self._max_pages = -(-manifest.context_length // PAGE_SIZE)
        if keep_scores and "forward_scored" not in module.entry_points:
            why = manifest.model.why_not_partial or "compile it again"
            raise EngineError(f"{artifact.module_path} cannot score KV rows, which a KV budget needs: {why}")
        if manifest.model.state_bytes and num_state_slots < 2:
            raise InvalidParameter(
                f"num_state_slots is {num_state_slots}, and {manifest.name} keeps a state of each sequence: 2 at least"
            )
        self._functions = load_functions(artifact, num_threads)
        if weights is None:
            weights = map_weights(artifact)
            threading.Thread(target=map_in, args=(weights,), name="radixlm-weights", daemon=True).start()
        pool_shape = (num_pages, layout.page_items)
        heads = manifest.model.num_attention_heads
        scores_shapes: tuple[tuple[tuple[int, ...], type], ...] = ()
        if keep_scores:
            scores_shapes = (
                ((layout.num_layers, layout.num_kv_heads, num_pages, PAGE_SIZE), np.float32),
                ((num_pages, PAGE_SIZE), np.int32),
                ((layout.num_layers, module.max_num_tokens, heads, layout.head_dim), np.float32),
            )
        num_logits, padded = module.max_num_logits, -(-num_outputs // _PADDED_VOCABULARY) * _PADDED_VOCABULARY
        try:
            pool = zeros(pool_shape, _KV_DTYPES[layout.dtype], is_sparse=drops_rows)
            lora = manifest.lora or None
            adapters = None if lora is None else AdapterRows(lora, module.max_num_tokens)
            states = StateSlots.of(manifest.model, num_state_slots, module.max_num_tokens)
            workspace = zeros((module.workspace_bytes,), np.uint8)
            scores = [zeros(shape, dtype) for shape, dtype in scores_shapes]
            self._logits: Float32Array = zeros((num_logits, padded), np.float32)
            scratch = zeros((num_logits, module.top_logits_scratch), np.float32)
            top = TopLogits(
                zeros((num_logits, TOP_LOGITS), np.float32),
                zeros((num_logits, TOP_LOGITS), np.int32),
                zeros((num_logits,), np.int32),
            )
        except (MemoryError, OSError, ValueError, OverflowError) as error:
            raise EngineError(
                f"{num_pages} pages of {layout.page_bytes} bytes cannot be allocated ({error}); lower --kv-cache-gb"
            ) from None
        self._tensor = tensor_maker()
        layers = WindowLayers.of(manifest.model, layout)
        self._windows = None if layers is None else WindowPool(pool, num_pages, layers)
        self.states, self.state_pool = states, None if states is None else states.pool
        self.adapters = adapters
        pools = [pool]
        if states is not None:
            pools.append(states.pool)
        if adapters is not None:
            pools += [adapters.ranks, adapters.memory.reshape(-1)]
        self._state = [self._tensor(array) for array in (*pools, weights, workspace)]
        self.attention_sums: Float32Array | None = scores[0] if keep_scores else None
        self.attention_counts: Int32Array | None = scores[1] if keep_scores else None
        self.queries: Float32Array | None = scores[2] if keep_scores else None
        self._scores = [self._tensor(array) for array in scores]
        # by number of rows, made once: making a tensor takes longer than finding the largest logits of a row
        self._tops = [
            TopLogits(top.values[:num_rows], top.token_ids[:num_rows], top.is_finite[:num_rows])
            for num_rows in range(num_logits + 1)
        ]
        self._outputs = [
            [self._tensor(array) for array in (self._logits[:num_rows], scratch[:num_rows], *self._tops[num_rows][:3])]
            for num_rows in range(num_logits + 1)
        ]
        self._scale: Float64Array = zeros((1,), np.float64)
        self._sums: Float64Array = zeros((-(-num_outputs // WEIGHT_BLOCK),), np.float64)
        self._of_sums = [*map(self._tensor, (self._logits, top.values, self._scale, self._sums))]
        num_values = module.max_num_tokens * (self._max_pages + 6)
        self._values: Int32Array = zeros((num_values,), np.int32)
        self._arguments: dict[BatchShape, tuple[Any, ...]] = {}
        self._use = ArtifactUse.begin(artifact.path)

    def forward(self, batch: Batch) -> Float32Array:
        """Write the KV of `batch` to the pool; return logits `[R, num_outputs]`, valid until the next call.

        Raises:
            EngineError: the batch does not fit the module or the pool; nothing was written.
        """
        return self._forward("forward", batch)

    @property
    def num_frequent(self) -> int | None:
        """Number of the vocabulary's first tokens, among which the MTP head can draft faster; None if it cannot."""
        return self._module.num_frequent or None

    def draft(self, batch: Batch, *, is_frequent: bool = False) -> Float32Array:
        """Return the logits of the MTP head, as `Drafting.draft` does. It reads and writes no states.

        Raises:
            EngineError: as in `forward`, or the model has no head.
        """
        if "draft" not in self._functions:
            raise EngineError("this model has no MTP head, which drafts")
        if not is_frequent:
            return self._forward("draft", batch)
        if self.num_frequent is None:
            raise EngineError("this model's MTP head drafts among all tokens only")
        logits = self._forward("draft_frequent", batch)
        logits[:, self.num_frequent :] = NEVER_DRAFTED
        return logits

    def forward_scored(self, batch: Batch, *, stride: int) -> Float32Array:
        """Run `forward`, with bit-identical results; also add softmax weights to `attention_sums`, and set `queries`.

        Args:
            stride: weights of one in `stride` tokens of each sequence are added, counted from its last token. With more
                than 1, a sequence with a single token in the step adds none.

        Raises:
            EngineError: as in `forward`, or no scores are kept.
        """
        if not self._scores:
            raise EngineError("this runner keeps no attention scores; make it with keep_scores=True")
        return self._forward("forward_scored", batch, *self._scores, stride)

    def _forward(self, name: str, batch: Batch, *more: Any) -> Float32Array:
        arguments = self._arguments.get(batch.shape) or self._make_arguments(batch.shape)
        if self.states is not None and name.startswith("draft"):
            self.states.leave_alone(batch.shape[1])
        elif self.states is not None:
            self.states.set_rows(batch)
        if self.adapters is not None:
            self.adapters.set_rows(batch)
        elif batch.adapters is not None:
            raise EngineError("the batch has LoRA adapters, and the module has no room for any")
        self._values[: batch.values.size] = batch.values
        try:
            self._functions[name](*arguments, *more)
        except Exception as error:  # the module checks all indices before it writes anything
            self._explain(batch)
            raise EngineError(f"the module failed: {error}") from error
        return self._logits[: batch.shape[3], : self._num_outputs]

    def top_logits(self, num_rows: int, vocab_size: int) -> TopLogits:
        """Return the largest logits of the first `num_rows` rows of the last `forward`, for ids below `vocab_size`.

        Valid until the next call.
        """
        if not 0 < vocab_size <= self._num_outputs or not 0 <= num_rows <= self._module.max_num_logits:
            raise EngineError(f"{num_rows} rows of {vocab_size} logits; {self._num_outputs} logits are a row")
        self._functions["top_logits"](*self._outputs[num_rows], vocab_size)
        values, token_ids, is_finite, _ = self._tops[num_rows]
        sums = partial(self._running_sums, vocab_size) if "weight_sums" in self._functions else None
        return TopLogits(values[:, :vocab_size], token_ids[:, :vocab_size], is_finite, sums)

    def _running_sums(self, vocab_size: int, row: int, temperature: float) -> Float64Array:
        """Return `TopLogits.running_sums` of the first `vocab_size` logits."""
        self._scale[0] = 1.0 / (temperature * math.log(2.0))
        self._functions["weight_sums"](*self._of_sums, row, vocab_size)
        return np.cumsum(self._sums[: -(-vocab_size // WEIGHT_BLOCK)])

    def copy_rows(self, copies: Sequence[PageCopy]) -> None:
        """Do the copies, in order."""
        for copy in copies:  # one at a time: a page can be the target of one and the source of the next
            pages = (copy.src_page, copy.dst_page)
            if not all(0 <= page < self._num_pages for page in pages) or not 0 <= copy.num_rows <= PAGE_SIZE:
                raise EngineError(f"{copy} is outside the pool of {self._num_pages} pages of {PAGE_SIZE} rows")
            arrays = (np.array([value], np.int32) for value in (*pages, copy.num_rows))
            self._functions["copy_pages"](self._state[0], *map(self._tensor, arrays))

    def drop_window_rows(self, runs: Iterable[range]) -> None:
        """Release the memory of these runs of pages in layers with a sliding window to the system."""
        if self._windows is not None:
            self._windows.drop(runs)

    def read_pages(self, page_ids: Sequence[int], out: UInt8Array) -> None:
        """Copy pages to `out[:len(page_ids)]`, uint8 `[N, page_bytes]`, in the layout of the pool.

        Raises:
            EngineError: a page is outside the pool, or `out` has another shape.
        """
        self._move_pages("read_pages", page_ids, out[: len(page_ids)])

    def write_pages(self, page_ids: Sequence[int], pages: UInt8Array) -> None:
        """Copy `pages`, uint8 `[len(page_ids), page_bytes]`, into the pool.

        Raises:
            EngineError: as in `read_pages`; nothing was written.
        """
        self._move_pages("write_pages", page_ids, pages)

    def close(self) -> None:
        """Free pool, weights and workspace, and end the kernels' threads, which another runner starts again."""
        if set_num_threads := self._functions.get("set_num_threads"):
            set_num_threads(0)
        self._state, self._outputs, self._of_sums, self._functions, self._scores = [], [], [], {}, []
        self.states = self.state_pool = self.adapters = self._windows = None
        self.attention_sums = self.attention_counts = self.queries = None
        self._arguments.clear()
        self._use.end()

    def _move_pages(self, entry_point: str, page_ids: Sequence[int], data: UInt8Array) -> None:
        """Copy whole pages after checking their indices, because the entry points do not check them."""
        layout = self._layout
        shape = (len(page_ids), layout.page_bytes)
        if data.dtype != np.uint8 or data.shape != shape or not data.flags.c_contiguous:
            raise EngineError(f"the pages are {data.dtype} {data.shape}; contiguous uint8 {shape} is needed")
        pages = np.array(page_ids, np.int32)
        if not pages.size:
            return
        if pages.min() < 0 or pages.max() >= self._num_pages:
            raise EngineError(f"pages {pages.min()}..{pages.max()} are outside the pool of {self._num_pages}")
        buffer = data.view(_KV_DTYPES[layout.dtype])
        self._functions[entry_point](self._state[0], *map(self._tensor, (pages, buffer)))

    def _make_arguments(self, shape: BatchShape) -> tuple[Any, ...]:
        """Return the arguments of `forward` for batches of this shape.

        They are kept, because making them takes longer than the rest of a call. A decode step has the shape of the one
        before for some `PAGE_SIZE` steps; a prefill's shape seldom comes again.
        """
        num_tokens, num_sequences, width, num_logits = shape
        module = self._module
        if not 1 <= num_tokens <= module.max_num_tokens or num_logits > module.max_num_logits:
            raise EngineError(
                f"a step of {num_tokens} tokens and {num_logits} logits; the module takes 1 to {module.max_num_tokens} "
                f"and up to {module.max_num_logits}"
            )
        if not 1 <= num_sequences <= module.max_num_tokens or not 1 <= width <= self._max_pages:
            raise EngineError(
                f"the page_table has shape {(num_sequences, width)}; the module takes 1 to {module.max_num_tokens} "
                f"rows and 1 to {self._max_pages} columns"
            )
        size = 5 * num_tokens + num_sequences * width + num_logits
        arrays = BatchArrays.of(self._values[:size], shape)
        if not num_logits:
            arrays = arrays._replace(logit_rows=_NO_ROWS)
        if len(self._arguments) == _MAX_SHAPES:
            self._arguments.clear()
        slots = () if self.states is None else self.states.rows(num_sequences)
        adapters = () if self.adapters is None else (self.adapters.rows(num_tokens),)
        arguments = (*map(self._tensor, (*arrays, *slots, *adapters)), *self._state, self._outputs[num_logits][0])
        self._arguments[shape] = arguments
        return arguments

    def _explain(self, batch: Batch) -> None:
        """Raise an EngineError that names the value that the module refused, and the valid range."""
        num_tokens, num_sequences, width, _ = batch.shape
        ranges = {
            "token_ids": (0, self._vocab_size),
            "positions": (0, MAX_POSITION),
            "slots": (0, self._num_pages * PAGE_SIZE),
            "row_of_token": (0, num_sequences),
            "page_table": (0, self._num_pages),
            "kv_lengths": (1, width * PAGE_SIZE + 1),
            "logit_rows": (0, num_tokens),
        }
        for name, array in batch.arrays._asdict().items():
            low, high = ranges[name]
            if array.size and (array.min() < low or array.max() >= high):
                raise EngineError(f"{name} holds {array.min()}..{array.max()}, must be in {low}..{high - 1}")
