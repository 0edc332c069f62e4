"""Keep count of the sequences that are open, and find them by id.

Knows sequences, and how a KV log writes them down; neither the tree nor how sequences get their pages.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..artifact.manifest import PAGE_SIZE
from ..errors import UnknownSequence
from .page_pool import PagePool
from .sequence import Sequence


class LiveSequences:
    """The open sequences of one cache, in the order in which they were opened.

    Attributes:
        next_id: for the next sequence that is added.
    """

    def __init__(self) -> None:
        self._by_id: dict[int, Sequence] = {}
        self.next_id = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Sequence]:
        """As a copy: another thread may look at them while the engine's opens and closes some."""
        return iter(list(self._by_id.values()))

    def add(self, sequence: Sequence) -> None:
        """Add an open sequence, whose id is `next_id`."""
        assert sequence.seq_id == self.next_id
        self.next_id += 1
        self._by_id[sequence.seq_id] = sequence

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence that was closed."""
        del self._by_id[sequence.seq_id]

    def clear(self) -> None:
        """Take out all sequences, whatever state they are in; ids go on."""
        self._by_id.clear()

    def get(self, seq_id: int) -> Sequence:
        """The sequence with this id.

        Raises:
            UnknownSequence: there is none.
        """
        sequence = self._by_id.get(seq_id)
        if sequence is None:
            raise UnknownSequence(f"no live sequence has the id {seq_id}; {len(self._by_id)} are live")
        return sequence

    def require(self, sequence: Sequence) -> None:
        """Raise UnknownSequence if the sequence is closed, or of another cache."""
        if self.get(sequence.seq_id) is not sequence:
            raise UnknownSequence(f"sequence {sequence.seq_id} is of another cache")

    @property
    def num_unused_rows(self) -> int:
        """Rows of the sequences' pages that no token is in yet; from another thread an approximate number."""
        return sum(max(0, len(each.page_ids) * PAGE_SIZE - each.num_rows) for each in self)

    def log_state(self) -> list[dict[str, object]]:
        """The `sequences` of a KV log's `state` line."""
        return [
            {
                "request": each.request_id,
                "seq": each.seq_id,
                "length": len(each),
                "computed": each.num_computed,
                "pages": list(each.page_ids),
                "pruned": None if (span := each.sparse) is None else [span.start, span.stop, span.num_rows],
                "private": each.namespace is None,
            }
            for each in self
        ]

    def check(self, pool: PagePool) -> None:
        """Raise AssertionError unless all are open and whole, and share what they may; not inside a transaction."""
        for seq_id, sequence in self._by_id.items():
            sequence.check()
            assert sequence.seq_id == seq_id and not sequence.is_closed and not sequence.is_reserved
            num_full = sequence.num_shareable // PAGE_SIZE
            full, rest = sequence.page_ids[:num_full], sequence.page_ids[num_full:]
            assert all(map(pool.is_in_tree, full)), f"{sequence} has full pages that are not in the tree"
            is_private = sequence.sparse is not None or sequence.namespace is None
            assert not (is_private and any(map(pool.is_in_tree, rest))), f"the tree has pages of {sequence} alone"
