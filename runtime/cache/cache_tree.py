"""Picture what is cached for one namespace: its runs of tokens, which run continues which, and the requests on them.

Values, and how they are read off a cache between two steps. Knows nodes and counts; not text, and no other namespace.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..artifact.manifest import PAGE_SIZE
from .cache_uses import CacheUse
from .prefix_cache import PrefixCache
from .radix_node import Node

MAX_RUNS = 1_000  # in a picture
MAX_RUNS_COUNTED = 20_000  # looked at for the sums, while requests wait
MAX_FIRST_IDS = 24  # of a run: enough to know a text by


@dataclass(frozen=True)
class TreeRun:
    """Tokens in a row whose keys and values are cached.

    `parent` is the index in `CacheTree.runs` of the run that this one continues; None where prompts begin.
    """

    parent: int | None
    start: int  # tokens before it
    num_tokens: int
    num_generated: int  # tokens that the model made
    num_pages: int
    num_users: int  # live requests whose pages it holds
    unused_s: float  # since a request last ended in this run or continued it
    first_ids: tuple[int, ...]
    num_children: int
    num_states: int = 0  # of a recurrent model: snapshots behind its pages


@dataclass(frozen=True)
class CacheTree:
    """Sums over a namespace, and its runs, parents first.

    The sums are complete if `is_counted`, the runs if `is_whole`.
    """

    num_runs: int
    num_tokens: int
    num_pages: int
    num_used_pages: int  # of live requests; all other pages can be freed
    num_aliases: int
    runs: tuple[TreeRun, ...]
    is_whole: bool
    is_counted: bool
    uses: tuple[CacheUse, ...] = ()  # live requests, the newest first; then those that ended, the last first
    num_states: int = 0  # of a recurrent model: snapshots
    now: float = field(default=0.0, compare=False)  # when the picture was taken, on the engine's clock

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
        """The picture of a cache that no other thread changes meanwhile.

        Args:
            now: seconds, on the cache's clock.
            live: what the namespace's live requests use.
        """
        root = cache.tree.root(namespace)
        runs: list[TreeRun] = []
        places: dict[int, int] = {}  # of nodes, by id
        num_runs = num_tokens = num_pages = num_used_pages = 0
        states = cache.states
        num_states = 0 if states is None else states.snapshots_behind([namespace])
        waiting: deque[tuple[Node, int | None]] = deque((child, None) for child in (root.children if root else ()))
        while waiting and num_runs < MAX_RUNS_COUNTED:
            node, parent = waiting.popleft()
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
                runs.append(_run_of(node, parent, num_users, now, num_own_states))
                places[node.node_id] = place
            waiting.extend((child, place) for child in node.children)
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
            uses=tuple(_placed(use, cache, namespace, places) for use in (*live, *cache.uses.ended(namespace))),
            now=now,
        )


@dataclass(frozen=True)
class CacheCleared:
    """How many pages were freed when a namespace was forgotten, and how many live requests keep."""

    num_freed_pages: int
    num_kept_pages: int
    num_discarded_pages: int = 0  # taken off the disk


def _placed(use: CacheUse, cache: PrefixCache, namespace: bytes, places: dict[int, int]) -> CacheUse:
    node = None if use.mark is None else use.mark.node(cache.tree, namespace)
    return use if node is None else replace(use, run=places.get(node.node_id))


def _run_of(node: Node, parent: int | None, num_users: int, now: float, num_states: int) -> TreeRun:
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
    )
