"""Find the pages of a run of the prefix tree that the disk lacks, and the keys that it is to have them under.

Knows nodes and keys; reads and writes no pages. A key is computed once and kept in its page's node, so that a run that
is saved or evicted bit by bit is not walked from its start each time.
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
    """Pages one after the other, with `num_before` pages before them in their prompt, all saved or passed over."""

    num_before: int
    parent_key: bytes  # of the last page before them
    heads: list[PageKey] = field(default_factory=list)
    page_ids: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class UnsavedFinder:
    """Finds pages in the nodes of one tree.

    Args:
        is_saved: whether the disk has the page with a key, or is about to. It has all pages before that, too.
    """

    identity: StoreIdentity
    is_saved: Callable[[bytes], bool]

    def find(self, node: Node, stop: int, *, most: int, num_done: int = 0) -> UnsavedPages:
        """Return the first pages that are not saved, of those from the root to the first `stop` of a node.

        Args:
            most: how many pages are wanted.
            num_done: of the pages from the root on, which are passed over.
        """
        if self._num_saved(node, stop, num_done) == stop:
            return UnsavedPages(node.start + stop, node.disk_keys[stop - 1])
        namespace, path = _path_to(node, stop)
        found, above = UnsavedPages(0, NO_PARENT), NO_PARENT
        for each, end in path:
            for at in range(0 if found.heads else self._num_saved(each, end, num_done), end):
                parent_key = each.disk_keys[at - 1] if at else above
                head = self._head(namespace, parent_key, each, at)
                if not found.heads:
                    if each.start + at < num_done or self.is_saved(head.key):
                        continue
                    found.num_before, found.parent_key = each.start + at, parent_key
                if len(found.heads) == most:
                    return found
                found.heads.append(head)
                found.page_ids.append(each.pages[at])
            above = each.disk_keys[end - 1]
        return found if found.heads else UnsavedPages(node.start + stop, above)

    def _num_saved(self, node: Node, stop: int, num_done: int) -> int:
        """How many of the first pages of a node are saved or passed over, as far as their keys are known."""
        keys, num_passed = node.disk_keys, num_done - node.start
        known = range(min(len(keys), stop))
        if known and (known[-1] < num_passed or self.is_saved(keys[known[-1]])):
            return len(known)
        return bisect_left(known, True, key=lambda at: at >= num_passed and not self.is_saved(keys[at]))

    def _head(self, namespace: bytes, parent_key: bytes, node: Node, at: int) -> PageKey:
        """What the disk has page `at` of a node under; the node has the keys of the pages before it."""
        tokens = tokens_of(node.run[at * PAGE_BYTES : (at + 1) * PAGE_BYTES])
        generated = bytes(node.generated[at * PAGE_SIZE : (at + 1) * PAGE_SIZE])
        if at < len(node.disk_keys):
            return PageKey(node.disk_keys[at], parent_key, namespace, tokens, generated)
        head = PageKey.of(self.identity, namespace, parent_key, tokens, generated)
        node.disk_keys.append(head.key)
        return head


def head_of(identity: StoreIdentity, node: Node, at: int) -> PageKey:
    """Return what the disk has page `at` of a node under."""
    finder = UnsavedFinder(identity, is_saved=lambda key: False)
    return finder.find(node, at + 1, most=1, num_done=node.start + at).heads[0]


def note_keys(node: Node, stop: int, keys: Sequence[bytes]) -> None:
    """Note what the disk has the first pages under, of those from the root to the first `stop` of a node."""
    for each, end in _path_to(node, stop)[1]:
        each.disk_keys += keys[each.start + len(each.disk_keys) : each.start + end]


def _path_to(node: Node, stop: int) -> tuple[bytes, list[tuple[Node, int]]]:
    """The namespace of a node, and the nodes from the root to it with how many pages each has, it the first `stop`."""
    path = []
    while (parent := node.parent) is not None:
        path.append((node, stop))
        node, stop = parent, len(parent.pages)
    return node.namespace, path[::-1]
