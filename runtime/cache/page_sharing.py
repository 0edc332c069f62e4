"""Hold the open sequences of a cache, and move pages between them and the tree: matched, shared, or newly allocated.

Knows pages, counts of tokens, and how a KV log records sequences. Not when any of it is done: `prefix_cache.py` and
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
from .window_rows import WindowRows


class LiveSequences:
    """The open sequences of one cache, in the order in which they were opened.

    Attributes:
        next_id: id for the next sequence that is added.
    """

    def __init__(self) -> None:
        self._by_id: dict[int, Sequence] = {}
        self.next_id = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over a copy: another thread can read while the engine's thread opens and closes sequences."""
        return iter(list(self._by_id.values()))

    def add(self, sequence: Sequence) -> None:
        """Add an open sequence, whose id is `next_id`."""
        assert sequence.seq_id == self.next_id
        self.next_id += 1
        self._by_id[sequence.seq_id] = sequence

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that was closed."""
        del self._by_id[sequence.seq_id]

    def clear(self) -> None:
        """Remove all sequences, whatever state they are in; ids continue."""
        self._by_id.clear()

    def get(self, seq_id: int) -> Sequence:
        """Return the sequence with this id.

        Raises:
            UnknownSequence: there is none.
        """
        sequence = self._by_id.get(seq_id)
        if sequence is None:
            raise UnknownSequence(f"no live sequence has the id {seq_id}; {len(self._by_id)} are live")
        return sequence

    def require(self, sequence: Sequence) -> None:
        """Raise UnknownSequence if the sequence is closed, or belongs to another cache."""
        if self.get(sequence.seq_id) is not sequence:
            raise UnknownSequence(f"sequence {sequence.seq_id} is of another cache")

    @property
    def num_unused_rows(self) -> int:
        """Number of rows of the sequences' pages without a token; approximate when read from another thread."""
        return sum(max(0, len(each.page_ids) * PAGE_SIZE - each.num_rows) for each in self)

    def pages_read_next(self, windows: WindowRows) -> set[int]:
        """Return the pages whose rows the next token of any sequence reads in layers with a sliding window."""
        return {page for each in self for page in each.page_ids[windows.first_page(each.num_computed) :]}

    def log_state(self) -> list[dict[str, object]]:
        """Return the `sequences` field of a KV log's `state` line."""
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
        """Raise AssertionError unless all are open and consistent, with their full pages shared.

        Not inside a transaction.
        """
        for seq_id, sequence in self._by_id.items():
            sequence.check()
            assert sequence.seq_id == seq_id and not sequence.is_closed and not sequence.is_reserved
            num_full = sequence.num_shareable // PAGE_SIZE
            full, rest = sequence.page_ids[:num_full], sequence.page_ids[num_full:]
            assert all(map(pool.is_in_tree, full)), f"{sequence} has full pages that are not in the tree"
            is_private = sequence.sparse is not None or sequence.namespace is None
            assert not (is_private and any(map(pool.is_in_tree, rest))), f"the tree has pages of {sequence} alone"


def take_pages(pool: PagePool, tree: RadixTree, num_pages: int) -> list[int]:
    """Allocate pages, evicting from the tree, least recently used first, if too few are free.

    Raises:
        OutOfPages: too few pages are free or evictable: nothing is taken or evicted. Or there is no room for rows of
            sliding windows: nothing is taken.
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
    """Share the cached KV of the first `limit` tokens if that is more than is computed; return the gain.

    The gain is a number of tokens.
    """
    assert not sequence.is_reserved, f"{sequence} is reserved"
    before = sequence.num_computed
    if limit <= before:
        return 0
    found = tree.find_resumable(sequence.namespace, encode_key(sequence.token_ids[:limit]))
    if found.num_with_kv > max(found.num_tokens, before):
        sequence.want_resumable_at(found.num_with_kv)  # where prefixes diverge: the next one resumes from there
    if found.num_tokens <= before:
        return 0
    page_ids = found.pages if found.partial_page is None else [*found.pages, found.partial_page]
    pool.retain(page_ids)
    if tree.states is not None:
        tree.states.retain(found.state_slot)
        tree.states.touch(found.state_slot)
    sequence.take_kv(page_ids, found.num_tokens, found.generated, state_slot=found.state_slot)
    if pool.windows is not None:
        pool.windows.keep(page_ids, found.num_tokens)
    tree.touch(found.pages)  # not the partial page: one common row does not make a run recent
    return found.num_tokens - before


def begin_sparse(pool: PagePool, tree: RadixTree, sequence: Sequence, limit: int, sparse: SparseSpan) -> int:
    """Give a new sequence the shared pages before its sparse span, and new pages for the span's rows.

    Returns:
        The number of new pages.

    Raises:
        OutOfPages: too few pages are free or can be evicted.
        SparseSpanError: the span does not cover the first `limit` tokens, or the pages before it are not cached. In
            each case nothing is taken or evicted.
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
    pool.retain(found.pages)  # otherwise taking the span's pages could evict them
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
    """Put the pages `[first, last)`, which are full now, into the tree, if they can be shared.

    If the tree has the same page already, the sequence uses that one and releases its own.
    """
    if first == last or sequence.namespace is None or sequence.sparse is not None:
        return
    tokens = slice(first * PAGE_SIZE, last * PAGE_SIZE)
    own, after = sequence.page_ids[first:last], sequence.page_ids[last:]
    last_above = sequence.page_ids[first - 1] if first else None
    shared = tree.insert_after(
        sequence.namespace, last_above, first, sequence.token_ids[tokens], own, sequence.generated[tokens]
    )
    num_free = pool.num_free  # read after `insert_after`, which logs the pages that it superseded itself
    _regain_rows(pool, shared, own)
    pool.retain(theirs for theirs, ours in zip(shared, own, strict=True) if theirs != ours)
    pool.release(ours for theirs, ours in zip(shared, own, strict=True) if theirs != ours)
    sequence.replace_kv([*shared, *after], sequence.num_computed, num_kept_pages=first)
    if kv_log is not None:
        free = [num_free, pool.num_free]
        kv_log.write("share", sequence, kept=first, shared=last, pages=[*shared, *after], free=free)


class TreeEnd(NamedTuple):
    """The end in the tree of a run of full pages that starts at the root.

    Args:
        page_id: the last page; None if the run is empty.
        num_dropped: pages that had left the tree when this run was in it.
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
    """Put full pages into the tree after others; return the new end.

    None, with nothing changed, if any pages have left the tree since `end` was taken, or if too few are free.

    Args:
        generated: one byte a token, 1 if a model generated it.
        write: fills the new pages, given their ids.
    """
    num_pages = len(token_ids) // PAGE_SIZE
    if tree.num_dropped != end.num_dropped:
        return None
    try:
        own = pool.allocate(num_pages)
    except OutOfPages:
        return None
    try:
        write(own)
        kept = tree.insert_after(end.namespace, end.page_id, end.num_pages, token_ids, own, generated)
        _regain_rows(pool, kept, own)
    finally:
        pool.release(own)
    return TreeEnd(end.namespace, kept[-1], end.num_pages + num_pages, tree.num_dropped)


def _regain_rows(pool: PagePool, shared: AnySequence[int], own: AnySequence[int]) -> None:
    """Restore dropped window rows of shared pages from the sequence's own pages of the same tokens."""
    if pool.windows is not None:
        pool.windows.regain(shared, own)


def leave_in_tree(pool: PagePool, tree: RadixTree, sequence: Sequence) -> None:
    """Keep the shareable rows of the last, partial page in the tree; the full pages are there already."""
    _share_tail(tree, sequence)
    keep_window(pool, sequence, sequence.num_shareable)


def _share_tail(tree: RadixTree, sequence: Sequence) -> None:
    """Put the sequence's partial last page into the tree, for others to copy its rows, and mark the full pages as used.

    Without a partial page, a namespace, or with a sparse span, only mark the full pages as used.
    """
    num_full, num_tail = divmod(sequence.num_shareable, PAGE_SIZE)
    full, tail = sequence.page_ids[:num_full], sequence.page_ids[num_full:]
    if not num_tail or sequence.sparse is not None or sequence.namespace is None:  # no tail to share
        tree.touch(full)
        return
    tokens = slice(num_full * PAGE_SIZE, sequence.num_shareable)  # after a match or a pop the tree can have them
    tree.insert_tail(sequence.namespace, full, sequence.token_ids[tokens], tail[0], sequence.generated[tokens])


def keep_windows(pool: PagePool, sequence: Sequence, start: int) -> None:
    """Keep the window rows before each resume point that a sequence passed since `start` tokens were computed."""
    if pool.windows is not None:
        stop = sequence.num_computed
        wanted = (point for point in sequence.resume_points if start < point <= stop)
        for point in (*pool.windows.points(start, stop), *wanted):
            keep_window(pool, sequence, point)


def keep_window(pool: PagePool, sequence: Sequence, num_tokens: int) -> None:
    """Keep the window rows before token `num_tokens` of a sequence, because others are likely to resume there."""
    if pool.windows is not None:
        pool.windows.keep(sequence.page_ids, num_tokens)


def keep_states(tree: RadixTree, sequence: Sequence) -> None:
    """Leave the states after a sequence's last full page and after all computed tokens, for others to resume from."""
    state = sequence.state
    if 0 < state.num_page_tokens < sequence.num_computed:
        _keep_snapshot(tree, sequence, state.num_page_tokens, state.page_slot)
    keep_state(tree, sequence)


def keep_state(tree: RadixTree, sequence: Sequence) -> None:
    """Leave the state after a sequence's computed tokens for others to resume from, if these tokens can be shared."""
    _keep_snapshot(tree, sequence, sequence.num_computed, sequence.state.slot)


def forget_states(tree: RadixTree, sequence: Sequence) -> None:
    """Drop the states that a sequence left within its last page, which is partial and does not stay in the tree."""
    num_full, num_tail = divmod(sequence.num_shareable, PAGE_SIZE)
    if num_tail and sequence.namespace is not None:
        tokens = sequence.token_ids[num_full * PAGE_SIZE : sequence.num_shareable]
        tree.forget_states(sequence.namespace, sequence.page_ids[:num_full], tokens)


def _keep_snapshot(tree: RadixTree, sequence: Sequence, stop: int, slot: int) -> None:
    """Keep the recurrent state in `slot` as a snapshot after the first `stop` tokens, for others to resume from.

    Nothing is kept if the model has no states, the tokens cannot be shared, or the namespace has no run.
    """
    states, namespace = tree.states, sequence.namespace
    if states is None or namespace is None or not 0 < stop <= sequence.num_shareable or tree.root(namespace) is None:
        return
    num_full, num_rows = divmod(stop, PAGE_SIZE)
    key, full = encode_key(sequence.token_ids[:stop]), sequence.page_ids[:num_full]
    before = states.find(namespace, full, key, stop - 1)
    place = full[-1] if num_full else namespace
    rows = encode_key(sequence.token_ids[stop - num_rows : stop])
    states.keep(place, rows, slot, num_saved=stop - before.num_tokens, before=before.slot)
