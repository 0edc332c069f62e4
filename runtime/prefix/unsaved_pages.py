"""Find the pages of a run of the prefix tree that the disk lacks, and their keys on disk.

Knows nodes and keys; reads and writes no pages. A key is computed once and kept in its page's node. So a run that is
saved or evicted in small portions is not walked from its start each time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..artifact.manifest import PAGE_SIZE
from ..cache.radix_node import PAGE_BYTES, Node, tokens_of
from ..store.page_key import NO_PARENT, PageKey, StoreIdentity


@dataclass
class UnsavedPages:
    """Consecutive pages of a prompt, after `num_before` pages that are all saved or skipped."""

    num_before: int
    parent_key: bytes  # the key of the last page before them
    page_keys: list[PageKey] = field(default_factory=list)
    page_ids: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class UnsavedFinder:
    """Finds unsaved pages in the nodes of one tree.

    Args:
        is_saved: returns whether the disk has the page with a key, or will have it. It has all pages before that, too.
        is_whole: returns whether memory has all rows of a page; no page is found after one that is not whole.
    """

    identity: StoreIdentity
    is_saved: Callable[[bytes], bool]
    is_whole: Callable[[int], bool] = lambda page_id: True

    def find(self, node: Node, stop: int, *, most: int, num_done: int = 0) -> UnsavedPages:
        """Return the first unsaved pages among those from the root to the first `stop` of a node.

        Args:
            most: the most pages to return.
            num_done: number of pages from the root to skip.
        """
        if self._num_saved(node, stop, num_done) == stop:
            return UnsavedPages(node.start + stop, node.disk_keys[stop - 1])
        namespace, path = _path_to(node, stop)
        found, above = UnsavedPages(0, NO_PARENT), NO_PARENT
        for each, end in path:
            for at in range(0 if found.page_keys else self._num_saved(each, end, num_done), end):
                parent_key = each.disk_keys[at - 1] if at else above
                page = self._page_key(namespace, parent_key, each, at)
                if not found.page_keys:
                    if each.start + at < num_done or self.is_saved(page.key):
                        continue
                    found.num_before, found.parent_key = each.start + at, parent_key
                if len(found.page_keys) == most or not self.is_whole(each.pages[at]):
                    return found
                found.page_keys.append(page)
                found.page_ids.append(each.pages[at])
            above = each.disk_keys[end - 1]
        return found if found.page_keys else UnsavedPages(node.start + stop, above)

    def _num_saved(self, node: Node, stop: int, num_done: int) -> int:
        """Return how many first pages of a node are saved or skipped, as far as their keys are known."""
        keys, num_passed = node.disk_keys, num_done - node.start
        known = range(min(len(keys), stop))
        if known and (known[-1] < num_passed or self.is_saved(keys[known[-1]])):
            return len(known)
        return bisect_left(known, True, key=lambda at: at >= num_passed and not self.is_saved(keys[at]))

    def _page_key(self, namespace: bytes, parent_key: bytes, node: Node, at: int) -> PageKey:
        """Return the key on disk of page `at` of a node, which has the keys of the pages before it."""
        tokens = tokens_of(node.run[at * PAGE_BYTES : (at + 1) * PAGE_BYTES])
        generated = bytes(node.generated[at * PAGE_SIZE : (at + 1) * PAGE_SIZE])
        if at < len(node.disk_keys):
            return PageKey(node.disk_keys[at], parent_key, namespace, tokens, generated)
        page = PageKey.of(self.identity, namespace, parent_key, tokens, generated)
        node.disk_keys.append(page.key)
        return page


def page_key_of(identity: StoreIdentity, node: Node, at: int) -> PageKey:
    """Return the key on disk of page `at` of a node."""
    finder = UnsavedFinder(identity, is_saved=lambda key: False)
    return finder.find(node, at + 1, most=1, num_done=node.start + at).page_keys[0]


def note_keys(node: Node, stop: int, keys: Sequence[bytes]) -> None:
    """Keep the keys on disk of the first pages among those from the root to the first `stop` of a node."""
    for each, end in _path_to(node, stop)[1]:
        each.disk_keys += keys[each.start + len(each.disk_keys) : each.start + end]


def _path_to(node: Node, stop: int) -> tuple[bytes, list[tuple[Node, int]]]:
    """Return the namespace of a node, and the nodes from the root to it, each with its number of pages on the path."""
    path = []
    while (parent := node.parent) is not None:
        path.append((node, stop))
        node, stop = parent, len(parent.pages)
    return node.namespace, path[::-1]
