"""Measure what computing a prompt costs, so that the first load from disk can be weighed against it.

Knows a model and its pages, not requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np

from .batch import Batch, Forward
from .load_planner import LoadPlanner
from .manifest import PAGE_SIZE
from .page_pool import PagePool

_LOGGER = logging.getLogger(__name__)

_FAR = 4096  # tokens: a context of 8,192 takes twice as long to measure at its end, and costs grow by the same line
_FEW_TOKENS = 32
_MEASURED_TOKENS = 128  # at 8,000 tokens SmolLM2 takes 1.70 ms for each, 2.00 for 64 at once, and 1.58 for 512


def measure_prefill(
    forward: Forward,
    pool: PagePool,
    planner: LoadPlanner,
    *,
    context_length: int,
    max_num_tokens: int,
    clock: Callable[[], float],
) -> None:
    """Compute a few tokens of nobody's, at the beginning of a context and far behind that, and tell `planner` how long
    they took. Only while nothing is cached: free pages are written to.

    Args:
        max_num_tokens: of one step.
        clock: seconds; only differences count.
    """
    num_pages = min(context_length // PAGE_SIZE, pool.num_pages, _FAR // PAGE_SIZE)
    num_tokens = min(_MEASURED_TOKENS, max_num_tokens, num_pages * PAGE_SIZE)
    num_few = min(_FEW_TOKENS, num_tokens)
    try:
        assert pool.num_free == pool.num_pages
        for start in (0, num_pages * PAGE_SIZE - num_tokens):
            # whoever is first on pages of the pool waits for the system to find them: twice as long, and more
            forward.forward(_zeros(start + num_tokens - num_few, num_few))
            batch = _zeros(start, num_tokens)
            begun = clock()
            forward.forward(batch)
            planner.observe_compute(num_tokens=num_tokens, position=start + num_tokens / 2, seconds=clock() - begun)
    except Exception:  # whatever it is, requests will meet it and say so
        _LOGGER.exception("prefill could not be measured")


def _zeros(start: int, num_tokens: int) -> Batch:
    """The tokens `[start, start + num_tokens)` of a context of zeros, as a step of their own."""
    positions = np.arange(start, start + num_tokens, dtype=np.int32)
    pages = np.arange(-(-(start + num_tokens) // PAGE_SIZE), dtype=np.int32)
    zeros, nothing = np.zeros(num_tokens, np.int32), np.zeros(0, np.int32)
    return Batch(zeros, positions, positions, zeros, pages[None], positions + np.int32(1), nothing)
