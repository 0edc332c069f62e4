"""One ragged forward pass as arrays, and the protocol of its runners.

Prefill, decode and a mix of both have the same form: rows of tokens, each with a slot for its KV, and its pages. Only
this module knows the arrays; `model_runner.py` runs them. Of requests and sequences it knows only the tokens that a
step computes, and their pages.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ..artifact.manifest import PAGE_SIZE
from ..errors import EngineError

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]
UInt8Array = npt.NDArray[np.uint8]
BatchShape = tuple[int, int, int, int]
"""Tokens, sequences, pages of the longest sequence, and rows of logits."""


NO_ADAPTER = -1


class BatchArrays(NamedTuple):
    """The arrays of a batch: `T` tokens of `B` sequences with at most `P` pages each; `R` of the tokens get logits.

    All are int32. A slot is `page_id * PAGE_SIZE + row`. Within a sequence, tokens come in order. Each token sees the
    rows `[0, kv_length)` of its sequence's pages, its own included: that is the causal mask. Unused entries of
    `page_table` are 0 and never read. Rows are not positions: `kv_length` is `position + 1`, or less if some positions
    of the sequence have no row. The tokens of a sequence are adjacent.
    """

    token_ids: Int32Array  # [T]
    positions: Int32Array  # [T], for RoPE
    slots: Int32Array  # [T], where the token's KV is written
    row_of_token: Int32Array  # [T], the token's row of page_table
    page_table: Int32Array  # [B, P], page ids
    kv_lengths: Int32Array  # [T], KV rows that the token sees, its own included
    logit_rows: Int32Array  # [R], indices into T

    @classmethod
    def of(cls, values: Int32Array, shape: BatchShape) -> BatchArrays:
        """Return views of the arrays that are concatenated in `values`."""
        num_tokens, num_sequences, width, _ = shape
        table = 4 * num_tokens
        lengths = table + num_sequences * width
        return cls(
            values[:num_tokens],
            values[num_tokens : 2 * num_tokens],
            values[2 * num_tokens : 3 * num_tokens],
            values[3 * num_tokens : table],
            values[table:lengths].reshape(num_sequences, width),
            values[lengths : lengths + num_tokens],
            values[lengths + num_tokens :],
        )


class Batch:
    """The arrays of a step, concatenated into one, because a step pays for each array that it handles.

    Attributes:
        shape: `(T, B, P, R)` of `BatchArrays`.
        values: its arrays in order, int32.
        state_in: int32 `[B]`, the slot of each sequence's state before its first token of the step; 0 for a sequence
            without earlier tokens. None if the model keeps no states.
        state_out: int32 `[B]`, the slot for the state after the last token; equal to `state_in` to overwrite it. It is
            never 0, and no other sequence of the step reads or writes it. A sequence without tokens leaves it
            unchanged.
        adapters: int32 `[T]`, the LoRA adapter of each token, by its place among those that are loaded; -1 for none.
            None if no token has one.
    """

    __slots__ = ("adapters", "shape", "state_in", "state_out", "values")

    def __init__(
        self,
        token_ids: Int32Array,
        positions: Int32Array,
        slots: Int32Array,
        row_of_token: Int32Array,
        page_table: Int32Array,
        kv_lengths: Int32Array,
        logit_rows: Int32Array,
        *,
        state_in: Int32Array | None = None,
        state_out: Int32Array | None = None,
        adapters: Int32Array | None = None,
    ) -> None:
        """Create a batch from such arrays, which are copied.

        Raises:
            EngineError: an array is not int32, or its shape does not fit the others.
        """
        arrays = BatchArrays(token_ids, positions, slots, row_of_token, page_table, kv_lengths, logit_rows)
        num_tokens = token_ids.size
        num_sequences, width = page_table.shape if page_table.ndim == 2 else (1, page_table.size)
        shapes = {"page_table": (num_sequences, width), "logit_rows": (logit_rows.size,)}
        for name, values in arrays._asdict().items():
            shape = shapes.get(name, (num_tokens,))
            if values.dtype != np.int32 or values.shape != shape:
                raise EngineError(f"{name} is {values.dtype} {values.shape}; int32 {shape} is needed")
        self.shape: BatchShape = (num_tokens, num_sequences, width, logit_rows.size)
        self.values: Int32Array = np.concatenate([values.reshape(-1) for values in arrays])
        self.state_in, self.state_out, self.adapters = state_in, state_out, adapters

    @classmethod
    def packed(
        cls,
        values: Int32Array,
        shape: BatchShape,
        *,
        state_in: Int32Array | None = None,
        state_out: Int32Array | None = None,
        adapters: Int32Array | None = None,
    ) -> Batch:
        """Return a batch of arrays that are concatenated already; arrays of states and adapters are separate."""
        batch = cls.__new__(cls)
        batch.shape, batch.values = shape, values
        batch.state_in, batch.state_out, batch.adapters = state_in, state_out, adapters
        return batch

    @classmethod
    def of_zeros(
        cls,
        start: int,
        stop: int,
        page_ids: Sequence[int],
        *,
        wants_logits: bool = False,
        state_out: int | None = None,
    ) -> Batch:
        """Return a batch of the tokens `[start, stop)` of a context of zeros on these pages.

        Args:
            wants_logits: compute the logits of the last token.
            state_out: the slot for the state of a recurrent model; None for all others.
        """
        positions, pages = np.arange(start, stop, dtype=np.int32), np.array(page_ids, np.int32)
        slots = pages[positions // PAGE_SIZE] * np.int32(PAGE_SIZE) + positions % np.int32(PAGE_SIZE)
        zeros, rows = np.zeros(stop - start, np.int32), np.arange(stop - start, dtype=np.int32)
        logit_rows = rows[-1:] if wants_logits else rows[:0]
        states = {}
        if state_out is not None:
            states = {"state_in": np.zeros(1, np.int32), "state_out": np.array([state_out], np.int32)}
        return cls(zeros, positions, slots, zeros, pages[None], positions + np.int32(1), logit_rows, **states)

    @property
    def arrays(self) -> BatchArrays:
        """Views of the single arrays."""
        return BatchArrays.of(self.values, self.shape)


class SequencePart(Protocol):
    """The tokens of one sequence that a step computes; a `Reservation` of the cache is one."""

    @property
    def start(self) -> int:
        """Position of the first token."""
        ...

    @property
    def stop(self) -> int:
        """Position after the last token."""
        ...

    @property
    def token_ids(self) -> Sequence[int]:
        """The `stop - start` tokens."""
        ...

    @property
    def rows(self) -> range:
        """The KV row of each token, counted from the first row of the sequence's pages."""
        ...

    @property
    def page_ids(self) -> array[int]:
        """The pages of all KV rows up to the last of `rows`; int32."""
        ...

    @property
    def state_in(self) -> int:
        """Slot of the state before the first token, for a recurrent model."""
        ...

    @property
    def state_out(self) -> int:
        """Slot for the state after the last token; 0 if the model keeps no states."""
        ...


def make_batch(
    parts: Sequence[SequencePart], num_logits: Sequence[int], adapters: Sequence[int] | None = None
) -> Batch:
    """Return the arrays of a step: sequences in the order given, each one's tokens in order of position.

    `num_logits` is the number of last tokens of each part that get logits, `adapters` is the LoRA adapter of each part.
    """
    # array("i") grows, and accepts other arrays directly: half of the time that NumPy's constructors need here
    token_ids, positions, slots, row_of_token, page_table, kv_lengths, logit_rows = (array("i") for _ in range(7))
    pages = [part.page_ids for part in parts]
    width = max(map(len, pages))
    for row, (part, page_ids, num_wanted) in enumerate(zip(parts, pages, num_logits, strict=True)):
        start, stop, rows = part.start, part.stop, part.rows
        token_ids.extend(part.token_ids)
        positions.extend(range(start, stop))
        slots.extend(slots_of(page_ids, rows))
        row_of_token.extend([row] * (stop - start))
        page_table.extend(page_ids)
        page_table.frombytes(bytes(page_table.itemsize * (width - len(page_ids))))
        kv_lengths.extend(range(rows.start + 1, rows.stop + 1))
        if num_wanted:
            logit_rows.extend(range(len(token_ids) - num_wanted, len(token_ids)))
    values = token_ids + positions + slots + row_of_token + page_table + kv_lengths + logit_rows
    shape = (len(token_ids), len(parts), width, len(logit_rows))
    packed = np.frombuffer(values, np.int32)
    adapted: Int32Array | None = None
    if adapters is not None and any(adapter != NO_ADAPTER for adapter in adapters):
        adapted = np.repeat(np.array(adapters, np.int32), [part.stop - part.start for part in parts])
    if not any(part.state_out for part in parts):
        return Batch.packed(packed, shape, adapters=adapted)
    state_in = np.array([part.state_in for part in parts], np.int32)
    state_out = np.array([part.state_out for part in parts], np.int32)
    return Batch.packed(packed, shape, state_in=state_in, state_out=state_out, adapters=adapted)


class TopLogits(NamedTuple):
    """The largest logits of `R` rows, and whether all logits of each row are finite.

    Sorted from the largest; among equals the lower id comes first. For a row that is not finite, the rest is undefined.

    Attributes:
        running_sums: returns, for a row and a temperature, the running sum of `exp((logit - largest) / temperature)`
            after each `WEIGHT_BLOCK` logits, to 1e-12. None if the module cannot compute it. Valid as long as the rest.
    """

    values: Float32Array  # [R, K]
    token_ids: Int32Array  # [R, K]
    is_finite: Int32Array  # [R], 1 or 0
    running_sums: Callable[[int, float], Float64Array] | None = None

    def one(self, row: int) -> TopLogits:
        """Return the values of one row."""
        own, sums = slice(row, row + 1), self.running_sums
        of_row = None if sums is None else lambda _, temperature: sums(row, temperature)
        return TopLogits(self.values[own], self.token_ids[own], self.is_finite[own], of_row)


@dataclass(frozen=True)
class PageCopy:
    """A copy of the first `num_rows` KV rows of page `src_page` to `dst_page`, in every layer."""

    src_page: int
    dst_page: int
    num_rows: int


class Forward(Protocol):
    """The model as the engine needs it; `ModelRunner` is the real one, tests have their own."""

    def forward(self, batch: Batch) -> Float32Array:
        """Write the KV of `batch` and return logits `[R, vocab_size]`, valid until the next call.

        Embedding models return hidden states `[R, hidden_size]` in their place.
        """
        ...

    def top_logits(self, num_rows: int, vocab_size: int) -> TopLogits:
        """Return the largest logits of the first `num_rows` rows of the last `forward`, for ids below `vocab_size`.

        Valid until the next call.
        """
        ...

    def copy_rows(self, copies: Sequence[PageCopy]) -> None:
        """Do the copies, in order."""
        ...


class Runner(Forward, Protocol):
    """A model that can be run and freed."""

    def close(self) -> None:
        """Free the model."""
        ...


NEVER_DRAFTED = np.float32(-1e30)  # a logit that a draft did not compute; finite, because samplers expect that


@runtime_checkable
class Drafting(Protocol):
    """A model with an MTP head, which drafts tokens. `forward` computes the head's rows together with the model's."""

    @property
    def num_frequent(self) -> int | None:
        """Number of the vocabulary's first tokens, among which it can draft faster; None if it cannot."""
        ...

    def draft(self, batch: Batch, *, is_frequent: bool = False) -> Float32Array:
        """Return the head's logits `[R, vocab_size]` for the token after each of these, valid until the next call.

        All rows before `batch` must exist. The rows of the batch's own tokens are provisional, computed by the head
        alone; `forward` writes them again. With `is_frequent`, the logits of all but the first `num_frequent` tokens
        are `NEVER_DRAFTED`.
        """
        ...

    def top_logits(self, num_rows: int, vocab_size: int) -> TopLogits:
        """Return the largest logits of the last `draft`, like `Forward.top_logits`."""
        ...

    def copy_rows(self, copies: Sequence[PageCopy]) -> None:
        """Do the copies, in order."""
        ...


@runtime_checkable
class PageIO(Protocol):
    """Reads whole pages from the pool, and writes them; `ModelRunner` implements it.

    A page is `page_bytes` bytes of all layers, as defined by the manifest's `KVLayout`.
    """

    def read_pages(self, page_ids: Sequence[int], out: UInt8Array) -> None:
        """Copy pages to `out[:len(page_ids)]`, uint8 `[N, page_bytes]`.

        Raises:
            EngineError: a page is outside the pool, or `out` has another shape.
        """
        ...

    def write_pages(self, page_ids: Sequence[int], pages: UInt8Array) -> None:
        """Copy `pages`, uint8 `[len(page_ids), page_bytes]`, into the pool.

        Raises:
            EngineError: as in `read_pages`; nothing was written.
        """
        ...


@runtime_checkable
class StateIO(Protocol):
    """Reads states of recurrent layers from their slots, and writes them."""

    @property
    def state_bytes(self) -> int:
        """Bytes of a state."""
        ...

    def read_state(self, slot: int) -> UInt8Array:
        """Return a copy of a slot's state, uint8 `[state_bytes]`."""
        ...

    def write_state(self, slot: int, state: UInt8Array) -> None:
        """Write `state`, uint8 `[state_bytes]`, to a slot other than the first."""
        ...


def slots_of(page_ids: Sequence[int], rows: range) -> list[int]:
    """Return the slots of the KV rows `rows` of a sequence with these pages: `page_id * PAGE_SIZE + row`."""
    return [page_ids[row // PAGE_SIZE] * PAGE_SIZE + row % PAGE_SIZE for row in rows]
