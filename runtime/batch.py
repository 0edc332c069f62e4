"""One ragged forward pass as arrays, and the protocol of whatever runs it.

Prefill, decode and both mixed look the same here: rows of tokens, each with a slot to write its KV to and the
pages that it reads. Knows array shapes and reservations, not requests; `model_runner.py` runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from .kv_transaction import Reservation

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Batch:
    """`T` tokens of `B` sequences that each hold at most `P` pages; `R` of the tokens want logits, one at least.

    All arrays are int32 and C-contiguous. A slot is `page_id * PAGE_SIZE + row`. Within a sequence, tokens
    come in order and each sees the rows `[0, kv_length)` of its sequence's pages, its own included: that is
    the causal mask. Unused places of `page_table` are 0 and never read.
    """

    token_ids: Int32Array  # [T]
    positions: Int32Array  # [T], for RoPE
    slots: Int32Array  # [T], where the token's KV is written
    row_of_token: Int32Array  # [T], the token's row of page_table
    page_table: Int32Array  # [B, P], page ids
    kv_lengths: Int32Array  # [T], KV rows that the token sees, its own included
    logit_rows: Int32Array  # [R], indices into T


@dataclass(frozen=True)
class PageCopy:
    """Copy the first `num_rows` KV rows of page `src_page` to `dst_page`, in every layer."""

    src_page: int
    dst_page: int
    num_rows: int


class Forward(Protocol):
    """What the engine needs of a model; `ModelRunner` is the real one, tests bring their own."""

    def forward(self, batch: Batch) -> Float32Array:
        """Write the KV of `batch` and return logits `[R, vocab_size]`, valid until the next call."""
        ...

    def copy_rows(self, copies: Sequence[PageCopy]) -> None:
        """Do the copies, in order."""
        ...


def make_batch(reservations: Sequence[Reservation], wants_logits: Sequence[bool]) -> Batch:
    """The arrays of a step: sequences in the order given, each one's tokens in order of position.

    `wants_logits` says of which reservations the last token's logits are needed.
    """
    lengths = np.array([reservation.num_tokens for reservation in reservations])
    positions = np.concatenate([np.arange(r.start, r.stop, dtype=np.int32) for r in reservations])
    page_table = np.zeros((len(reservations), max(len(r.page_ids) for r in reservations)), np.int32)
    for row, reservation in zip(page_table, reservations, strict=True):
        row[: len(reservation.page_ids)] = reservation.page_ids
    return Batch(
        token_ids=np.array([token for r in reservations for token in r.token_ids], np.int32),
        positions=positions,
        slots=np.array([slot for r in reservations for slot in r.slots], np.int32),
        row_of_token=np.repeat(np.arange(len(reservations), dtype=np.int32), lengths),
        page_table=page_table,
        kv_lengths=positions + np.int32(1),
        logit_rows=(np.cumsum(lengths) - 1)[np.array(wants_logits, np.bool_)].astype(np.int32),
    )
