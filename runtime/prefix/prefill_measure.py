"""Measure what computing a prompt costs, so that the first load from disk can be weighed against it.

Knows a model and its pages, not requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator

from ..artifact.manifest import PAGE_SIZE
from ..cache.prefix_cache import PrefixCache
from ..errors import OutOfPages
from ..model.batch import Batch, Forward
from .rates import Rates

_LOGGER = logging.getLogger(__name__)

_FAR = 4096  # tokens: a context of 8,192 takes twice as long to measure at its end, and costs grow by the same line
_FEW_TOKENS = 32
_MEASURED_TOKENS = 128  # at 8,000 tokens SmolLM2 takes 1.70 ms for each, 2.00 for 64 at once, and 1.58 for 512


def measure_prefill(
    forward: Forward,
    cache: PrefixCache,
    rates: Rates,
    *,
    context_length: int,
    max_num_tokens: int,
    clock: Callable[[], float],
) -> Generator[None, None, bool]:
    """Compute a few tokens of no request, at the beginning of a context and far behind that, and tell `rates` how
    long they took: a step for each `next`. Free pages are written to; where there are too few it ends, for then
    requests were computed and have told more.

    Args:
        max_num_tokens: of one step.
        clock: seconds; only differences count.

    Returns:
        Whether all of it was measured.
    """
    num_pages = min(context_length // PAGE_SIZE, cache.pool.num_pages, _FAR // PAGE_SIZE)
    num_tokens = min(_MEASURED_TOKENS, max_num_tokens, num_pages * PAGE_SIZE)
    num_few = min(_FEW_TOKENS, num_tokens)
    for start in (0, num_pages * PAGE_SIZE - num_tokens):
        # what is first on pages of the pool waits for the system to find them: twice as long, and more
        for first, is_warm in ((start + num_tokens - num_few, False), (start, True)):
            try:
                seconds = seconds_of_zeros(forward, cache, first, start + num_tokens, clock=clock)
            except OutOfPages:
                return False
            except Exception:  # whatever it is, requests will meet it and say so
                _LOGGER.exception("prefill could not be measured")
                return False
            if is_warm:
                rates.observe_compute(num_tokens=num_tokens, position=start + num_tokens / 2, seconds=seconds)
            yield
    return True


def seconds_of_zeros(
    forward: Forward,
    cache: PrefixCache,
    start: int,
    stop: int,
    *,
    clock: Callable[[], float],
    vocab_size: int | None = None,
) -> float:
    """Return how long the tokens `[start, stop)` of a context of zeros take, on pages that are free before and after.

    Args:
        vocab_size: with the logits of the last one, and the largest of so many; None: without.

    Raises:
        OutOfPages: too few pages are free.
    """
    pool, states = cache.pool, cache.states
    slot = None if states is None else states.allocate()
    pages: list[int] = []
    try:
        pages = pool.allocate(-(-stop // PAGE_SIZE))
        batch = Batch.of_zeros(start, stop, pages, wants_logits=vocab_size is not None, state_out=slot)
        begun = clock()
        forward.forward(batch)
        if vocab_size is not None:
            forward.top_logits(1, vocab_size)
        return clock() - begun
    finally:
        pool.release(reversed(pages))  # a stack: the next step gets the same ones
        if states is not None and slot is not None:
            states.release(slot)
