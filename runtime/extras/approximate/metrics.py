"""Export metrics of approximate loading. Knows names and counts; counts nothing itself."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from ...server.metrics import counter, gauge
from .chosen_rows import PartStats


def part_metrics(stats: object) -> Iterator[Metric]:
    """Yield the metrics of partly loaded prefixes; zeros if `stats` are not `PartStats`."""
    parts = stats if isinstance(stats, PartStats) else PartStats()
    chosen = parts.chosen
    outcomes = {
        ("pruned",): chosen.num_loaded,
        ("not_quicker",): chosen.num_refused,
        ("disagreed",): chosen.num_disagreed,
        ("broken",): chosen.num_broken,
        ("late",): chosen.num_late,
    }
    text = "Requests that a part of a prefix was enough for; all but the pruned ones were served exactly."
    yield counter("store_parts", text, outcomes, "outcome")
    text = "Tokens of prefixes on disk of which a part was loaded."
    yield counter("store_part_tokens", text, {(): chosen.num_tokens})
    text = "Prefixes that came to memory whole, because parts of them were asked for often."
    yield counter("store_prefixes_promoted", text, {(): parts.num_promoted})
    yield from _saved_metrics(parts)
    rewritten = {(): parts.num_rewritten_runs}
    yield counter("store_runs_rewritten", "Runs stored in the order of importance, too.", rewritten)
    yield counter("store_rewrites_dropped", "Not rewritten, for too many waited.", {(): parts.num_dropped_rewrites})


def _saved_metrics(parts: PartStats) -> Iterator[Metric]:
    """Yield the metrics of KV that need not be read from disk."""
    saved, chunks = {("budget",): parts.chosen.num_missing_bytes}, parts.chunks
    if chunks is not None:
        saved |= {("chunks",): chunks.hit_bytes}
        looked = {("hit",): chunks.num_hits, ("miss",): chunks.num_misses}
        yield gauge("chunk_cache_bytes", "Keys and values of parts that memory keeps.", {(): chunks.num_bytes})
        yield gauge("chunk_cache_max_bytes", "That it may keep of them.", {(): chunks.max_bytes})
        yield counter("chunk_cache_chunks", "Chunks of parts that were wanted.", looked, "outcome")
        yield counter("chunk_cache_evicted", "Chunks that made room.", {(): chunks.num_evicted})
    text = "Keys and values of parts not read from disk: left out by a budget, or kept in memory as chunks."
    yield counter("store_saved_bytes", text, saved, "by")
