"""Find prefixes among the pages on disk: a prefix cache whose page ids are numbers of records on disk.

Knows page keys and tokens; reads and writes nothing. The engine's thread owns it.
"""

from __future__ import annotations

import collections.abc
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from ..artifact.manifest import PAGE_SIZE
from ..cache.cache_namespace import adapted_prefix
from ..cache.page_pool import PagePool
from ..cache.prefix_cache import PrefixCache
from ..cache.radix_node import encode_key, tokens_of
from ..states.state_pool import MIN_SLOTS, SPARE_SLOTS, StatePool
from ..store.page_key import NO_PARENT, PageKey


@dataclass(frozen=True)
class StoredPrefix:
    """The pages on disk of the first `PAGE_SIZE * len(page_keys)` tokens of a prompt, and the token after them.

    `generated` has one byte per token of the pages, 1 if a model generated it.
    """

    namespace: bytes
    token_ids: tuple[int, ...]
    generated: bytes
    page_keys: tuple[PageKey, ...]

    @cached_property
    def key(self) -> bytes:
        """Tokens of the pages as a key of the tree. They are looked up in each step until all are in memory."""
        return encode_key(self.token_ids[: len(self.page_keys) * PAGE_SIZE])


class DiskIndex:
    """The pages on disk, by prefix. `cache.match` finds them like pages in memory; no sequence is ever opened on it.

    A record whose parent is not known can never be found, and is left out.

    Args:
        num_records: the most records; only known ones take memory.
        num_states: recurrent models: the most states; each match ends at a state. None: the model keeps none.
    """

    def __init__(self, num_records: int, *, num_states: int | None = None, clock: Callable[[], float]) -> None:
        # slots are numbers of states on disk instead of in memory
        states = None if num_states is None else StatePool(num_states + MIN_SLOTS + SPARE_SLOTS)
        self.cache = PrefixCache(PagePool(num_records), states=states, clock=clock)
        self._keys: list[bytes] = []  # by record
        self._depths = array("I")  # by record: pages from the start of the prompt to its end
        self._record_of: dict[bytes, int] = {}  # by key

    def __len__(self) -> int:
        """Return the number of records that can be found."""
        return len(self._record_of)

    @property
    def num_states(self) -> int:
        """Number of states that can be found."""
        return 0 if self.cache.states is None else self.cache.states.num_snapshots

    def __contains__(self, key: bytes) -> bool:
        return key in self._record_of

    def add(self, page_keys: Iterable[PageKey]) -> None:
        """Add pages that are on disk now, parents before children; fastest if the pages of a chain are adjacent."""
        run: list[PageKey] = []
        for page in page_keys:
            if page.key in self._record_of:
                continue
            if run and page.parent_key != run[-1].key:
                self._add_run(run)
                run = []
            run.append(page)
        self._add_run(run)

    def has_state(self, key: bytes) -> bool:
        """Return whether the state after the page with this key is on disk."""
        record, states = self._record_of.get(key), self.cache.states
        return states is not None and record is not None and states.at_page_end(record) is not None

    def add_state(self, key: bytes) -> None:
        """Record that the state after the page with this key is on disk; without the page it is not found."""
        record, states = self._record_of.get(key), self.cache.states
        if states is not None and record is not None and states.at_page_end(record) is None:
            slot = states.allocate()
            states.keep(record, b"", slot, num_saved=PAGE_SIZE)
            states.release(slot)

    def remove_states(self, keys: Iterable[bytes]) -> None:
        """Forget the states after these pages."""
        if self.cache.states is not None:
            self.cache.states.forget(self._record_of[key] for key in keys if key in self._record_of)

    def remove(self, keys: Iterable[bytes]) -> list[bytes]:
        """Forget pages, and those that cannot be found without them; return the keys of all of them."""
        records = [self._record_of[key] for key in keys if key in self._record_of]
        return self._forget(self.cache.tree.remove(records))

    def parts(self, namespace: bytes) -> list[bytes]:
        """Return the namespace, and those of LoRA adapters within it that have pages."""
        prefix = adapted_prefix(namespace)
        return [namespace, *(part for part in self.cache.tree.namespaces if part.startswith(prefix))]

    def clear(self, namespace: bytes) -> list[bytes]:
        """Forget a namespace; return the keys of its pages."""
        root = self.cache.tree.root(namespace)
        children = [] if root is None else list(root.children)
        return self._forget([page for child in children for page in self.cache.tree.remove(child.pages[:1])])

    def drop_unused(self, since: float) -> list[bytes]:
        """Forget pages that were last used before `since`, on the index's clock; return their keys.

        Visits all records if there are any such pages.
        """
        if not self.cache.tree.eviction.drop_unused(since):
            return []
        pool = self.cache.pool
        return self._forget([record for record in self._record_of.values() if not pool.is_in_tree(record)])

    def keys(self, namespace: bytes, token_ids: collections.abc.Sequence[int]) -> list[bytes]:
        """Return the keys of the longest prefix of these tokens that is on disk, and record its use."""
        found = self.cache.tree.find(namespace, token_ids)
        self.cache.tree.touch(found.pages)
        return [self._keys[record] for record in found.pages]

    def prefix(self, namespace: bytes, token_ids: tuple[int, ...], num_pages: int) -> StoredPrefix:
        """Return the first pages of these tokens, and record their use.

        The disk must have these pages, and a token must follow them.
        """
        found = self.cache.tree.find(namespace, token_ids[: num_pages * PAGE_SIZE])
        assert len(found.pages) == num_pages and len(token_ids) > num_pages * PAGE_SIZE
        self.cache.tree.touch(found.pages)
        page_keys = self._page_keys(namespace, token_ids, found.pages, found.generated)
        return StoredPrefix(namespace, token_ids[: num_pages * PAGE_SIZE + 1], found.generated, page_keys)

    def run(self, namespace: bytes, token_ids: tuple[int, ...], start: int, stop: int) -> tuple[PageKey, ...] | None:
        """Return pages `[start, stop)` of these tokens; None unless all pages before `stop` are on disk."""
        found = self.cache.tree.find(namespace, token_ids[: stop * PAGE_SIZE])
        if len(found.pages) < stop:
            return None
        return self._page_keys(namespace, token_ids, found.pages, found.generated)[start:]

    def any_chain(self, num_pages: int) -> tuple[PageKey, ...]:
        """Return the first pages, at most `num_pages`, of an arbitrary prompt; empty if nothing is on disk."""
        record = next(iter(self._record_of.values()), None)
        node = None if record is None else self.cache.tree.node_of(record)
        if node is None:
            return ()
        path = node.path()
        return self._page_keys(path.namespace, tokens_of(path.key), path.page_ids[:num_pages], path.generated)

    def check(self) -> None:
        """Raise AssertionError unless keys, records and tree agree."""
        self.cache.check()
        assert sorted(self._record_of.values()) == sorted(self.cache.tree.page_ids())
        assert all(self._keys[record] == key for key, record in self._record_of.items())

    def _page_keys(
        self, namespace: bytes, token_ids: tuple[int, ...], records: list[int], generated: bytes
    ) -> tuple[PageKey, ...]:
        """Return the keys of a prompt's first pages, whose records are given in order."""
        keys = [NO_PARENT, *(self._keys[record] for record in records)]
        spans = (slice(number * PAGE_SIZE, (number + 1) * PAGE_SIZE) for number in range(len(records)))
        return tuple(
            PageKey(key, parent_key, namespace, token_ids[span], generated[span])
            for (parent_key, key), span in zip(pairwise(keys), spans, strict=True)
        )

    def _add_run(self, run: list[PageKey]) -> None:
        """Add a chain of pages, as far as there is room."""
        pool = self.cache.pool
        run = run[: pool.num_free]
        if not run:
            return
        last_above = self._record_of.get(run[0].parent_key)
        if last_above is None and run[0].parent_key != NO_PARENT:
            return
        num_above = 0 if last_above is None else self._depths[last_above]
        records = pool.allocate(len(run))
        num_missing = max(records) + 1 - len(self._keys)
        self._keys += [b""] * num_missing
        self._depths.extend([0] * num_missing)
        token_ids = [token_id for page in run for token_id in page.token_ids]
        generated = b"".join(page.generated for page in run)
        kept = self.cache.tree.insert_after(run[0].namespace, last_above, num_above, token_ids, records, generated)
        pool.release(records)
        for depth, (page, record, ours) in enumerate(zip(run, kept, records, strict=True), num_above + 1):
            if record == ours:  # else the tree has the same tokens under a forged key
                self._keys[record], self._depths[record] = page.key, depth
                self._record_of[page.key] = record

    def _forget(self, records: list[int]) -> list[bytes]:
        """Remove records from the index, and return the keys that they had."""
        keys = [self._keys[record] for record in records]
        for record in records:
            self._keys[record] = b""
        for key in keys:
            self._record_of.pop(key, None)
        return keys
