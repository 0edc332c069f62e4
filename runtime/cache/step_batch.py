"""The batch of a step: the reservations of its sequences as one ragged forward's arrays."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from ..model.batch import Batch, slots_of
from .kv_transaction import Reservation


def make_batch(reservations: Sequence[Reservation], wants_logits: Sequence[bool]) -> Batch:
    """The arrays of a step: sequences in the order given, each one's tokens in order of position.

    `wants_logits` says of which reservations the last token's logits are needed.
    """
    # array("i") grows, and takes other arrays as they are: half of the time that NumPy's constructors need here
    token_ids, positions, slots, row_of_token, page_table, kv_lengths, logit_rows = (array("i") for _ in range(7))
    width = max(reservation.num_pages for reservation in reservations)
    for row, (reservation, is_wanted) in enumerate(zip(reservations, wants_logits, strict=True)):
        start, stop, rows, page_ids = reservation.start, reservation.stop, reservation.rows, reservation.page_ids
        token_ids.extend(reservation.token_ids)
        positions.extend(range(start, stop))
        slots.extend(slots_of(page_ids, rows))
        row_of_token.extend([row] * (stop - start))
        page_table.extend(page_ids)
        page_table.frombytes(bytes(page_table.itemsize * (width - len(page_ids))))
        kv_lengths.extend(range(rows.start + 1, rows.stop + 1))
        if is_wanted:
            logit_rows.append(len(token_ids) - 1)
    values = token_ids + positions + slots + row_of_token + page_table + kv_lengths + logit_rows
    shape = (len(token_ids), len(reservations), width, len(logit_rows))
    return Batch.packed(np.frombuffer(values, np.int32), shape)
