"""What other orders of eviction would find of a trace, page by page and leaves first.

Knows a trace of page ids and a pool size. `mooncake.py` replays the same trace on the engine's own cache, whose order
is `LRU` here: both must find the same.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Trace = list[list[int]]  # the page ids of each request, those of its prefix first
NEVER = 2**31


@dataclass
class Page:
    """A cached page: the clock counts the pages that were asked for."""

    parent: int | None
    last_used: int
    num_finds: int = 0
    num_children: int = 0


Order = Callable[[Page, int], float]
"""What makes room first has the least, of a page that nothing goes on from and the number of pages of the pool."""

ORDERS: Mapping[str, Order] = {
    "LRU": lambda page, _: page.last_used,
    "LRU, a doubling of finds worth 0.1 pools of age": lambda page, pool: _aged(page, 0.1 * pool),
    "LRU, a doubling of finds worth 0.3 pools of age": lambda page, pool: _aged(page, 0.3 * pool),
    "LRU, a doubling of finds worth 1 pool of age": lambda page, pool: _aged(page, 1.0 * pool),
    "LRU, any find worth 1 pool of age": lambda page, pool: page.last_used + pool * (page.num_finds > 0),
    "fewest finds first (LFU)": lambda page, _: page.last_used + NEVER * page.num_finds,
}


def hit_rate(trace: Trace, num_pages: int, order: Order) -> float:
    """The share of the trace's pages that is found in a pool of `num_pages`."""
    pages: dict[int, Page] = {}
    queue: list[tuple[float, int]] = []
    num_found = clock = 0
    for request in trace:
        for place, page_id in enumerate(request):
            page = pages.get(page_id)
            if page is not None:
                page.last_used, page.num_finds = clock + place, page.num_finds + 1
                num_found += 1
        clock += len(request)
        own = set(request)
        waiting = []  # the request's own pages, which it needs now
        num_new = sum(page_id not in pages for page_id in request)
        while len(pages) + num_new > num_pages:
            entry = heapq.heappop(queue)
            leaf = pages.get(entry[1])
            if leaf is None or leaf.num_children or order(leaf, num_pages) != entry[0]:
                continue
            if entry[1] in own:
                waiting.append(entry)
                continue
            del pages[entry[1]]
            if leaf.parent is not None:
                parent = pages[leaf.parent]
                parent.num_children -= 1
                if not parent.num_children:
                    heapq.heappush(queue, (order(parent, num_pages), leaf.parent))
        for entry in waiting:
            heapq.heappush(queue, entry)
        above: int | None = None
        for place, page_id in enumerate(request):
            if page_id not in pages:
                pages[page_id] = Page(above, clock - len(request) + place)
                if above is not None:
                    pages[above].num_children += 1
            above = page_id
        if above is not None and not pages[above].num_children:
            heapq.heappush(queue, (order(pages[above], num_pages), above))
    return num_found / sum(map(len, trace))


def belady_hit_rate(trace: Trace, num_pages: int) -> float:
    """The same if what is needed last makes room; a page is needed whenever one behind it is, so leaves go first."""
    next_uses = _next_uses(trace)
    cached: dict[int, int] = {}  # by page: the request that needs it next
    queue: list[tuple[int, int]] = []
    num_found = 0
    for request, uses in zip(trace, next_uses, strict=True):
        num_found += sum(page_id in cached for page_id in request)
        for page_id, use in zip(request, uses, strict=True):
            cached[page_id] = use
            heapq.heappush(queue, (-use, page_id))
        while len(cached) > num_pages:  # the request's own pages may go as soon as it is over
            use, page_id = heapq.heappop(queue)
            if cached.get(page_id) == -use:
                del cached[page_id]
    return num_found / sum(map(len, trace))


def _aged(page: Page, worth: float) -> float:
    return page.last_used + worth * math.log2(1 + page.num_finds)


def _next_uses(trace: Trace) -> list[list[int]]:
    """For each page of each request, the number of the next request that has it."""
    seen: dict[int, int] = {}
    uses: list[list[int]] = []
    for number in range(len(trace) - 1, -1, -1):
        uses.append([seen.get(page_id, NEVER) for page_id in trace[number]])
        seen.update(dict.fromkeys(trace[number], number))
    return uses[::-1]
