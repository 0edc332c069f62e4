"""Put together what learns, stores and loads the rows that matter: the `ChosenRows` of a disk tier.

Knows the tier's parts, not requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..prefix.disk_tier import DiskTier
from .importance import Importance
from .partial_loader import PartialLoader
from .query_look import QueryLook
from .run_rewriter import RunRewriter


class Pruning:
    """See `ChosenRows`.

    Attributes:
        parts: loads chosen rows; None without a look.
    """

    def __init__(
        self, tier: DiskTier, importance: Importance, look: QueryLook | None, *, clock: Callable[[], float]
    ) -> None:
        page_bytes = tier.store.identity.page_bytes
        self._rewriter = RunRewriter(tier.cache, tier.index, tier.writer, importance, page_bytes)
        self.parts: PartialLoader | None = None
        if look is not None:
            self.parts = PartialLoader(
                tier.cache,
                tier.index,
                tier.store,
                tier.reader,
                tier.rates,
                look,
                page_bytes=page_bytes,
                clock=clock,
            )

    @property
    def num_rewritten(self) -> int:
        """Runs that were stored in the order of importance."""
        return self._rewriter.num_rewritten

    @property
    def num_dropped(self) -> int:
        """Runs that were not, because too many waited."""
        return self._rewriter.num_dropped

    @property
    def is_ready(self) -> bool:
        """Whether `advance` has a run to store, and the writer is idle."""
        return self._rewriter.is_ready

    def advance(self) -> None:
        """Have the writer store the next run."""
        self._rewriter.advance()

    def used(self, namespace: bytes, token_ids: Sequence[int], *, num_reused: int) -> None:
        """Note that a prompt is computed, of which the first `num_reused` tokens were found."""
        self._rewriter.used(namespace, token_ids, num_reused=num_reused)

    def forget(self, namespace: bytes | None = None) -> None:
        """Drop the runs that wait to be stored, of one namespace or all."""
        self._rewriter.forget(namespace)
