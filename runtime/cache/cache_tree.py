"""Describe the cached runs of one namespace: their tokens, their order in the tree, and the requests that use them.

Values, and how they are read off a cache between two steps. Knows nodes and counts; not text, and no other namespace.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from ..artifact.manifest import PAGE_SIZE
from .cache_uses import CacheUse
from .prefix_cache import PrefixCache
from .radix_node import PAGE_BYTES, Node, num_common_tokens, tokens_of

MAX_RUNS = 1_000  # listed in one `CacheTree`
MAX_RUNS_COUNTED = 20_000  # visited for the sums, while requests wait
MAX_FIRST_IDS = 24  # of a run: enough to recognize a text


@dataclass(frozen=True)
class TreeRun:
    """A run of consecutive tokens whose KV is cached.

    `parent` is the index in `CacheTree.runs` of the run that this one continues. It is None for the first run of
    prompts.
    """

    parent: int | None
    start: int  # tokens before it
    num_tokens: int
    num_generated: int  # tokens that the model generated
    num_pages: int
    num_users: int  # live requests that use its first page
    unused_s: float  # seconds since a request last ended in this run or continued it
    first_ids: tuple[int, ...]
    num_children: int
    num_states: int = 0  # recurrent models: state snapshots after its pages
    num_shared: int = 0  # first tokens that are equal to those of the sibling before it in `runs`
    node_id: int = 0  # the key for `CachedText.of`


@dataclass(frozen=True)
class CacheTree:
    """The cached runs of a namespace, parents first, and sums over all of its runs.

    The sums are complete if `is_counted`, the list of runs if `is_whole`.
    """

    num_runs: int
    num_tokens: int
    num_pages: int
    num_used_pages: int  # used by live requests; all other pages can be freed
    num_aliases: int
    runs: tuple[TreeRun, ...]
    is_whole: bool
    is_counted: bool
    uses: tuple[CacheUse, ...] = ()  # live requests, the newest first; then those that ended, the last first
    num_states: int = 0  # recurrent models: state snapshots
    now: float = field(default=0.0, compare=False)  # when the values were read, in seconds on the engine's clock

    @classmethod
    def of(
        cls,
        cache: PrefixCache,
        namespace: bytes,
        now: float,
        *,
        live: Sequence[CacheUse] = (),
        max_runs: int = MAX_RUNS,
    ) -> CacheTree:
        """Read the tree of a namespace from a cache that no other thread changes at the same time.

        Args:
            now: seconds, on the cache's clock.
            live: the cache use of each live request of the namespace.
            max_runs: the most runs to list.
        """
        root = cache.tree.root(namespace)
        runs: list[TreeRun] = []
        places: dict[int, int] = {}  # indices in `runs`, by node id
        num_runs = num_tokens = num_pages = num_used_pages = 0
        states = cache.states
        num_states = 0 if states is None else states.snapshots_behind([namespace])
        waiting: deque[tuple[Node, int | None, int]] = deque(_children(root, None) if root else ())
        while waiting and num_runs < MAX_RUNS_COUNTED:
            node, parent, num_shared = waiting.popleft()
            place = len(runs)
            num_runs += 1
            num_tokens += node.num_tokens
            num_pages += len(node.pages)
            num_own_states = 0 if states is None else states.snapshots_behind(node.pages)
            num_states += num_own_states
            num_users = cache.pool.num_users(node.pages[0])
            if num_users:  # a sequence that owns a page owns all before it
                num_used_pages += sum(cache.pool.num_users(page) > 0 for page in node.pages)
            if place < max_runs:
                runs.append(_describe_run(node, parent, num_users, now, num_own_states, num_shared))
                places[node.node_id] = place
            waiting.extend(_children(node, place))
        return cls(
            num_runs=num_runs,
            num_tokens=num_tokens,
            num_pages=num_pages,
            num_used_pages=num_used_pages,
            num_aliases=cache.aliases.num_aliases(namespace),
            runs=tuple(runs),
            is_whole=num_runs == len(runs) and not waiting,
            is_counted=not waiting,
            num_states=num_states,
            uses=tuple(_with_run(use, cache, namespace, places) for use in (*live, *cache.uses.ended(namespace))),
            now=now,
        )


@dataclass(frozen=True)
class CachedText:
    """All tokens of one cached run."""

    start: int  # tokens before it
    token_ids: tuple[int, ...]

    @classmethod
    def of(cls, cache: PrefixCache, namespace: bytes, node_id: int) -> CachedText | None:
        """Return all tokens of the run whose `TreeRun` had this node id.

        None if the run is gone, or too far from the root to be searched for.
        """
        root = cache.tree.root(namespace)
        waiting: deque[Node] = deque(root.children if root else ())
        for _ in range(MAX_RUNS_COUNTED):
            if not waiting:
                return None
            node = waiting.popleft()
            if node.node_id == node_id:
                return cls(node.start * PAGE_SIZE, tokens_of(node.run))
            waiting.extend(node.children)
        return None


@dataclass(frozen=True)
class CacheCleared:
    """Number of pages freed when a namespace was cleared, and number of pages that live requests keep."""

    num_freed_pages: int
    num_kept_pages: int
    num_discarded_pages: int = 0  # removed from disk


def _with_run(use: CacheUse, cache: PrefixCache, namespace: bytes, places: dict[int, int]) -> CacheUse:
    """Return a request's use with the index of the run at which it ended; unchanged if that run is gone.

    Args:
        places: index in the list of runs, by node id.
    """
    node = None if use.mark is None else use.mark.node(cache.tree, namespace)
    return use if node is None else replace(use, run=places.get(node.node_id))


def _children(node: Node, place: int | None) -> Iterator[tuple[Node, int | None, int]]:
    """Yield the children of the node at `place`, each with the number of tokens it shares with the sibling before it.

    Runs split between pages only, so siblings can share less than a page. Each has its own copy of those tokens.
    """
    before = b""
    for child in node.children:
        yield child, place, num_common_tokens(child.run, before, limit=PAGE_BYTES)
        before = child.key


def _describe_run(
    node: Node, parent: int | None, num_users: int, now: float, num_states: int, num_shared: int
) -> TreeRun:
    """Return the description of a node's run, for display.

    Args:
        parent: index of the parent's run in the list of runs; None for a run that begins the prompt.
        num_users: number of live requests that use the run.
        now: seconds, on the cache's clock.
        num_states: number of snapshots of recurrent states in the run.
        num_shared: number of first tokens that the sibling before it has, too.
    """
    return TreeRun(
        parent=parent,
        start=node.start * PAGE_SIZE,
        num_tokens=node.num_tokens,
        num_generated=node.generated.count(1),
        num_pages=len(node.pages),
        num_users=num_users,
        unused_s=max(0.0, now - node.used_at),
        first_ids=node.tokens(0, MAX_FIRST_IDS),
        num_children=len(node.children),
        num_states=num_states,
        num_shared=num_shared,
        node_id=node.node_id,
    )
