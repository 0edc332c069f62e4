"""Remember what the last requests of each namespace found in the cache.

Values, and a bounded store of them. Knows counts, times, and the page at which each request ended, which places the
request in the tree. Knows no tokens, except the few that explain a miss.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from cachetools import Cache, LRUCache

from ..artifact.manifest import PAGE_SIZE
from .radix_node import PAGE_BYTES, Node, encode_key
from .radix_tree import RadixTree
from .sequence import Sequence
from .why_not_more import WhyNotMore

MAX_ENDED = 16  # requests remembered per namespace
MAX_NAMESPACES = 256

UseState = Literal["waiting", "running", "ended"]


@dataclass(frozen=True)
class PageMark:
    """The end of a sequence's exact KV: the last full page, its tokens, and the tokens after it.

    The page can belong to another run by the time the mark is looked up, so its tokens are compared.
    """

    num_pages: int  # full pages, counted from the root
    page_id: int | None  # the last full page
    page: bytes  # its tokens, as a key
    tail: bytes  # the tokens after it, as a key

    @classmethod
    def of(cls, sequence: Sequence) -> PageMark:
        """Return the mark of a live sequence, between two steps."""
        num_pages = sequence.num_shareable // PAGE_SIZE
        start = max(0, num_pages - 1) * PAGE_SIZE
        key = encode_key(sequence.token_ids[start : sequence.num_shareable])
        cut = PAGE_BYTES if num_pages else 0
        return cls(num_pages, sequence.page_ids[num_pages - 1] if num_pages else None, key[:cut], key[cut:])

    def node(self, tree: RadixTree, namespace: bytes) -> Node | None:
        """Return the run that holds the mark, or the longest cached part before it. None if nothing of it is cached."""
        node = tree.root(namespace) if self.page_id is None else tree.node_of(self.page_id)
        if node is None:
            return None
        if self.page_id is not None:
            place = self.num_pages - 1 - node.start
            is_same = 0 <= place < len(node.pages) and node.pages[place] == self.page_id
            if not is_same or bytes(node.run[place * PAGE_BYTES : (place + 1) * PAGE_BYTES]) != self.page:
                return None
            if place + 1 < len(node.pages):
                return node
        longer = node.beginning_with(self.tail) if self.tail else None
        return longer or (None if node.parent is None else node)


@dataclass(frozen=True)
class CacheUse:
    """The cache use of one request.

    `run` is the index in `CacheTree.runs` of the run that it ends in, if that is listed.
    """

    request_id: str
    state: UseState
    num_prompt_tokens: int
    tokens_by_kind: Mapping[str, int]  # found in the cache when it was admitted
    num_generated: int
    arrived_at: float  # seconds on the engine's clock, like `ended_at`
    ended_at: float | None
    finish_reason: str | None  # as in its completion
    why_not_more: WhyNotMore | None
    mark: PageMark | None
    run: int | None = None


class CacheUses:
    """The last requests of each namespace, kept for the most recently used namespaces."""

    def __init__(self) -> None:
        self._ended: LRUCache[bytes, deque[CacheUse]] = LRUCache(MAX_NAMESPACES)

    def record(self, namespace: bytes, use: CacheUse) -> None:
        """Remember a request that ended; beyond the limits the oldest are forgotten."""
        self._ended.setdefault(namespace, deque(maxlen=MAX_ENDED)).append(use)

    def ended(self, namespace: bytes) -> tuple[CacheUse, ...]:
        """Return the ended requests of a namespace, the last one first."""
        return tuple(reversed(self._ended.get(namespace, ())))

    def forget(self, namespace: bytes | None) -> None:
        """Forget the requests of a namespace, or of all."""
        if namespace is None:
            self._ended.clear()
        else:
            self._ended.pop(namespace, None)

    def forget_unused(self, since: float) -> None:
        """Forget the requests that ended before the time `since`."""
        for namespace in list(self._ended):
            uses = Cache.__getitem__(self._ended, namespace)  # does not count as a use
            while uses and (uses[0].ended_at or 0.0) < since:
                uses.popleft()
            if not uses:
                del self._ended[namespace]
