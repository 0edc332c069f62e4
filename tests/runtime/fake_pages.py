"""Pages that know what each row holds, so that any wrong reuse shows."""

from __future__ import annotations

from radixlm.runtime.batch import PageCopy
from radixlm.runtime.kv_transaction import Reservation


class FakePages:
    """Each row holds the hash of all tokens up to its own, as the KV of a token depends on them all."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, int], int] = {}

    def copy(self, copies: list[PageCopy]) -> None:
        for copy in copies:
            for row in range(copy.num_rows):
                self.rows[copy.dst_page, row] = self.rows[copy.src_page, row]

    def forward(self, reservation: Reservation) -> None:
        tokens = list(reservation.sequence.token_ids)
        positions = range(reservation.start, reservation.stop)
        for position, slot in zip(positions, reservation.slots, strict=True):
            prefix = (reservation.sequence.namespace, *tokens[: position + 1])
            self.rows[divmod(slot, 16)] = hash(prefix)

    def check(self, namespace: bytes, tokens: list[int], page_ids: list[int]) -> None:
        for position in range(len(tokens)):
            row = self.rows[page_ids[position // 16], position % 16]
            assert row == hash((namespace, *tokens[: position + 1])), f"row {position} is another's"
