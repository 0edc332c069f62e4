"""Pages that know what each row holds, so that any wrong reuse shows."""

from __future__ import annotations

from collections.abc import Sequence

from radixlm.runtime.cache.kv_transaction import Reservation
from radixlm.runtime.cache.sparse_span import SparseSpan
from radixlm.runtime.model.batch import PageCopy, slots_of


class FakePages:
    """Each row holds the hash of all tokens up to its own, as the KV of a token depends on them all.

    The chosen rows of a pruned prefix hold something else, and so does whatever is computed over them.
    """

    def __init__(self) -> None:
        self.rows: dict[tuple[int, int], int] = {}

    def copy(self, copies: list[PageCopy]) -> None:
        for copy in copies:
            for row in range(copy.num_rows):
                self.rows[copy.dst_page, row] = self.rows[copy.src_page, row]

    def write(self, namespace: bytes, pruned: SparseSpan, page_ids: Sequence[int]) -> None:
        """The chosen rows come from somewhere."""
        rows = expected_rows(namespace, pruned.token_ids, pruned)
        for row in range(pruned.start, len(rows)):
            self.rows[page_ids[row // 16], row % 16] = rows[row]

    def forward(self, reservation: Reservation) -> None:
        sequence = reservation.sequence
        rows = expected_rows(sequence.namespace, sequence.token_ids[: reservation.stop], sequence.sparse)
        slots = slots_of(reservation.page_ids, reservation.rows)
        for row, slot in zip(rows[-reservation.num_tokens :], slots, strict=True):
            self.rows[divmod(slot, 16)] = row

    def check(
        self, namespace: bytes, tokens: Sequence[int], page_ids: Sequence[int], pruned: SparseSpan | None = None
    ) -> None:
        for place, expected in enumerate(expected_rows(namespace, tokens, pruned)):
            row = self.rows[page_ids[place // 16], place % 16]
            assert row == expected, f"row {place} is another's"


def expected_rows(namespace: bytes, tokens: Sequence[int], pruned: SparseSpan | None) -> list[int]:
    """What the rows of these tokens hold, in order."""
    exact = [hash((namespace, *tokens[: position + 1])) for position in range(len(tokens))]
    if pruned is None:
        return exact
    chosen = [hash(("chosen", row, namespace, *pruned.token_ids)) for row in range(pruned.num_rows)]
    tainted = [hash(("tainted", pruned, namespace, *tokens[: at + 1])) for at in range(pruned.stop, len(tokens))]
    return [*exact[: pruned.start], *chosen, *tainted]
