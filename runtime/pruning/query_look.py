"""What a prompt's end looks for, given only some rows of the prefix before it: one forward that nobody keeps.

Knows a cache and a runner that scores, not where rows come from or what the queries are for. The history of attention
does not notice.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..cache.kv_transaction import make_batch
from ..cache.prefix_cache import PrefixCache
from ..model.batch import Float32Array
from ..prefix.loaded_rows import LoadedRows
from .row_selection import MAX_LOOK_TOKENS
from .scored_runner import ScoredRunner


@dataclass(frozen=True)
class QueryLook:
    """Looks by `runner`, at most `max_num_tokens` tokens at once; `group_size` query heads share a KV head."""

    cache: PrefixCache
    runner: ScoredRunner
    max_num_tokens: int
    group_size: int

    def queries(self, load: LoadedRows, head: int) -> Float32Array:
        """The queries of the tokens of a prompt behind `load`, `[layers, tokens, group, head_dim]`, of those heads that
        share KV head `head`, computed over the rows of the load: of the last ones, as many as look. Nothing is kept.

        Raises:
            OutOfPages, SparseSpanError: it cannot be done now.
        """
        sequence = load.open(self.cache, context_length=len(load.match.prompt_ids))
        try:
            with self.cache.begin() as step:
                reservation = step.reserve(sequence, sequence.num_uncomputed)
                self.runner.forward_scored(make_batch([reservation], [False]))
            assert self.runner.queries is not None
            heads = slice(head * self.group_size, (head + 1) * self.group_size)
            num_tokens = reservation.num_tokens
            return self.runner.queries[:, max(0, num_tokens - MAX_LOOK_TOKENS) : num_tokens, heads].copy()
        finally:
            self.cache.close(sequence, keep=False)
