"""The open sequences of a cache, and the pages that pass between them and the tree: found, left there, or taken afresh.

Knows pages, counts of tokens, and how a KV log writes sequences down. Not when any of it is done: `prefix_cache.py` and
`kv_transaction.py` decide that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as AnySequence
from typing import NamedTuple

from ..artifact.manifest import PAGE_SIZE
from ..errors import OutOfPages, SparseSpanError, UnknownSequence
from ..kv_log.log import KVLog
from .page_pool import PagePool, num_pages_for
from .radix_node import encode_key
from .radix_tree import RadixTree
from .sequence import Sequence
from .sparse_span import SparseSpan


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


def take_pages(pool: PagePool, tree: RadixTree, num_pages: int) -> list[int]:
    """Allocate pages, evicting from the tree, least recently used first, when too few are free.

    Raises:
        OutOfPages: free and evictable pages together do not suffice; nothing is taken or evicted.
    """
    if num_pages == 0:
        return []
    num_free, num_cached = pool.num_free, pool.num_cached
    if num_pages > num_free + num_cached:
        raise OutOfPages(
            f"request needs {num_pages} pages of {PAGE_SIZE} tokens, {num_free} are free and "
            f"{num_cached} can be evicted; lower --max-num-seqs or raise --kv-cache-gb"
        )
    if num_pages > num_free:
        tree.eviction.evict(num_pages - num_free)
    return pool.allocate(num_pages)


def reuse(pool: PagePool, tree: RadixTree, sequence: Sequence, limit: int) -> int:
    """Share what the tree has of the first `limit` tokens if that is more than is computed; returns the gain."""
    assert not sequence.is_reserved, f"{sequence} is reserved"
    before = sequence.num_computed
    if limit <= before:
        return 0
    found = tree.find_resumable(sequence.namespace, encode_key(sequence.token_ids[:limit]))
    if found.num_with_kv > max(found.num_tokens, before):
        sequence.state.want_at(found.num_with_kv)  # where prefixes part: the next one finds a state there
    if found.num_tokens <= before:
        return 0
    page_ids = found.pages if found.partial_page is None else [*found.pages, found.partial_page]
    pool.retain(page_ids)
    if tree.states is not None:
        tree.states.retain(found.state_slot)
        tree.states.touch(found.state_slot)
    sequence.take_kv(page_ids, found.num_tokens, found.generated, state_slot=found.state_slot)
    tree.touch(found.pages)  # not the partial page: one common row does not make a run recent
    return found.num_tokens - before


def begin_sparse(pool: PagePool, tree: RadixTree, sequence: Sequence, limit: int, sparse: SparseSpan) -> int:
    """Give a new sequence the pages before the span, and its own for the span's rows; returns how many are its own.

    Raises:
        OutOfPages: too few pages are free or can be evicted.
        SparseSpanError: the span is not of the first `limit` tokens, or the pages before it are not cached. In each
            case nothing is taken or evicted.
    """
    if sparse.stop > limit or tuple(sequence.token_ids[: sparse.stop]) != sparse.token_ids:
        raise SparseSpanError(
            f"{sparse!r} has rows of {sparse.stop} tokens, and not the first of the {limit} that this prompt may "
            f"reuse; open it without"
        )
    found = tree.find(sequence.namespace, sparse.token_ids[: sparse.start])
    if found.num_tokens < sparse.start:
        raise SparseSpanError(
            f"{sparse!r} goes on from {sparse.start} tokens, {found.num_tokens} are cached; open it without"
        )
    pool.retain(found.pages)  # or the span's pages might evict them
    try:
        own = take_pages(pool, tree, num_pages_for(sparse.start + sparse.num_rows) - len(found.pages))
    except OutOfPages:
        pool.release(found.pages)
        raise
    sequence.take_kv([*found.pages, *own], sparse.stop, found.generated, sparse=sparse)
    sequence.inherit_generated(sparse.generated)
    tree.touch(found.pages)
    return len(own)


def share_full_pages(
    pool: PagePool, tree: RadixTree, sequence: Sequence, first: int, last: int, kv_log: KVLog | None
) -> None:
    """Put the pages `[first, last)`, which are full now, into the tree, if they may be shared.

    Where the tree has the same page already, the sequence takes that one and gives its own back.
    """
    if first == last or sequence.namespace is None or sequence.sparse is not None:
        return
    tokens = slice(first * PAGE_SIZE, last * PAGE_SIZE)
    own, after = sequence.page_ids[first:last], sequence.page_ids[last:]
    last_above = sequence.page_ids[first - 1] if first else None
    shared = tree.insert_after(
        sequence.namespace, last_above, first, sequence.token_ids[tokens], own, sequence.generated[tokens]
    )
    num_free = pool.num_free  # after pages that the new ones superseded, which have lines
    pool.retain(theirs for theirs, ours in zip(shared, own, strict=True) if theirs != ours)
    pool.release(ours for theirs, ours in zip(shared, own, strict=True) if theirs != ours)
    sequence.replace_kv([*shared, *after], sequence.num_computed, num_kept_pages=first)
    if kv_log is not None:
        free = [num_free, pool.num_free]
        kv_log.write("share", sequence, kept=first, shared=last, pages=[*shared, *after], free=free)


class TreeEnd(NamedTuple):
    """Where a run of full pages from the root on ends in the tree.

    Args:
        page_id: of the last of them; None: there is none.
        num_dropped: pages that had left the tree when these were in it.
    """

    namespace: bytes
    page_id: int | None
    num_pages: int
    num_dropped: int


def insert_after(
    pool: PagePool,
    tree: RadixTree,
    end: TreeEnd,
    token_ids: AnySequence[int],
    generated: bytes,
    write: Callable[[list[int]], None],
) -> TreeEnd | None:
    """Put full pages into the tree behind others, whatever their number; returns where they end.

    None, with nothing changed, if pages have left the tree since, maybe those, or too few are free.

    Args:
        generated: one byte a token, 1 where a model made it.
        write: fills fresh pages, of these ids.
    """
    num_pages = len(token_ids) // PAGE_SIZE
    if tree.num_dropped != end.num_dropped or pool.num_free < num_pages:
        return None
    own = pool.allocate(num_pages)
    try:
        write(own)
        kept = tree.insert_after(end.namespace, end.page_id, end.num_pages, token_ids, own, generated)
    finally:
        pool.release(own)
    return TreeEnd(end.namespace, kept[-1], end.num_pages + num_pages, tree.num_dropped)


def leave_in_tree(tree: RadixTree, sequence: Sequence) -> None:
    """Keep the rows of the last page that may be shared, which is partial; the full pages are in the tree already."""
    num_full, num_tail = divmod(sequence.num_shareable, PAGE_SIZE)
    full, tail = sequence.page_ids[:num_full], sequence.page_ids[num_full:]
    if not num_tail or sequence.sparse is not None or sequence.namespace is None:  # the tail may not be shared
        tree.touch(full)
        return
    tokens = slice(num_full * PAGE_SIZE, sequence.num_shareable)  # may be there: found there, or popped to
    tree.insert_tail(sequence.namespace, full, sequence.token_ids[tokens], tail[0], sequence.generated[tokens])


def keep_states(tree: RadixTree, sequence: Sequence) -> None:
    """Leave the state after a sequence's last full page, and that after all its computed tokens, where others find
    them."""
    state = sequence.state
    if 0 < state.num_page_tokens < sequence.num_computed:
        _keep(tree, sequence, state.num_page_tokens, state.page_slot)
    keep_state(tree, sequence)


def keep_state(tree: RadixTree, sequence: Sequence) -> None:
    """Leave the state after a sequence's computed tokens where others find it, if these tokens may be shared."""
    _keep(tree, sequence, sequence.num_computed, sequence.state.slot)


def forget_states(tree: RadixTree, sequence: Sequence) -> None:
    """Drop the states that a sequence left within its last page, which is partial and is not left in the tree."""
    num_full, num_tail = divmod(sequence.num_shareable, PAGE_SIZE)
    if num_tail and sequence.namespace is not None:
        tokens = sequence.token_ids[num_full * PAGE_SIZE : sequence.num_shareable]
        tree.forget_states(sequence.namespace, sequence.page_ids[:num_full], tokens)


def _keep(tree: RadixTree, sequence: Sequence, stop: int, slot: int) -> None:
    states, namespace = tree.states, sequence.namespace
    if states is None or namespace is None or not 0 < stop <= sequence.num_shareable or tree.root(namespace) is None:
        return
    num_full, num_rows = divmod(stop, PAGE_SIZE)
    key, full = encode_key(sequence.token_ids[:stop]), sequence.page_ids[:num_full]
    before = states.find(namespace, full, key, stop - 1)
    place = full[-1] if num_full else namespace
    rows = encode_key(sequence.token_ids[stop - num_rows : stop])
    states.keep(place, rows, slot, num_saved=stop - before.num_tokens, before=before.slot)
