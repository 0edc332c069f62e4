"""Run the end of a prompt over a few rows of its prefix, to learn which other rows its queries attend to.

Knows a cache and a runner that scores; not where the rows come from, nor what the queries are used for. The forward
leaves nothing in the cache, and nothing in the history of attention.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...cache.prefix_cache import PrefixCache
from ...model.batch import Float32Array, make_batch
from ...prefix.loaded_prefix import LoadedRows
from .attention_scores import ScoredRunner
from .row_selection import MAX_PROBE_TOKENS


@dataclass(frozen=True)
class ProbeForward:
    """Runs forwards of `runner`, of at most `max_num_tokens` tokens; `group_size` query heads share a KV head."""

    cache: PrefixCache
    runner: ScoredRunner
    max_num_tokens: int
    group_size: int

    def queries(self, rows: LoadedRows, head: int) -> Float32Array:
        """Compute the prompt's tokens after `rows`, and return the queries of the last `MAX_PROBE_TOKENS` of them.

        The shape is `[layers, tokens, group, head_dim]`, for the heads that share KV head `head`.

        Raises:
            OutOfPages, SparseSpanError: it is impossible now.
        """
        sequence = rows.open(self.cache, context_length=len(rows.match.prompt_ids))
        try:
            with self.cache.begin() as transaction:
                reservation = transaction.reserve(sequence, sequence.num_uncomputed)
                self.runner.forward_scored(make_batch([reservation], [False]))
            assert self.runner.queries is not None
            heads = slice(head * self.group_size, (head + 1) * self.group_size)
            num_tokens = reservation.num_tokens
            return self.runner.queries[:, max(0, num_tokens - MAX_PROBE_TOKENS) : num_tokens, heads].copy()
        finally:
            self.cache.close(sequence, keep=False)
