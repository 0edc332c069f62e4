"""`GET /metrics`: what Prometheus asks for, read from the engine at the moment that it asks.

Knows names and units. Counts nothing itself but the responses that it is told of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Scope

from ..artifact.manifest import PAGE_SIZE
from ..engine.counters import LatencyCounts
from ..engine.engine_stats import EngineStats
from ..prefix.tier_stats import TierStats
from ..speculation.draft_stats import DraftStats

KINDS = ("exact", "seam", "text", "alias")
Samples = Mapping[Any, float]  # by a tuple with a text for each label


class Metrics(Collector):
    """The endpoint of one application, with a registry of its own; `stats` must not wait for the engine.

    Args:
        routes: those that are counted each by its path; requests to others are counted together.
    """

    def __init__(self, stats: Callable[[], EngineStats], model_id: str, version: str, routes: Sequence[Route]) -> None:
        self._stats, self._model_id, self._version, self._routes = stats, model_id, version, routes
        self._responses: Counter[tuple[str, str]] = Counter()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def count_response(self, scope: Scope, status: int) -> None:
        """A request has ended."""
        found = (route.path_format for route in self._routes if route.path_regex.match(scope["path"]))
        self._responses[next(found, "other"), str(status)] += 1

    async def answer(self, request: Request) -> Response:
        """In Prometheus' text format, or OpenMetrics if that is asked for."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(self._registry), headers={"content-type": content_type})

    def describe(self) -> list[Metric]:
        """Nothing: the registry need not ask the engine to know that no name is taken."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All of it, at this moment."""
        stats = self._stats()
        build = {(self._version, self._model_id): 1}
        yield _gauge("build_info", "What is served, and by which version.", build, "version", "model")
        yield _gauge("engine_up", "Whether the engine takes and computes requests.", {(): int(stats.alive)})
        yield _gauge("engine_stalled_seconds", "Since a step got on while there is work.", {(): stats.stalled_s})
        yield _counter("engine_restarts", "Deaths of the engine's thread that it got over.", {(): stats.num_restarts})
        yield from self._requests(stats)
        yield from self._tokens(stats)
        yield from self._pages(stats)
        if stats.draft is not None:
            yield from _draft_metrics(stats.draft)
        if stats.tier is not None:
            yield from _store_metrics(stats.tier)
        yield _histogram("request_queue_time_seconds", "From arrival to the first step.", stats.in_queue)
        yield _histogram("time_to_first_token_seconds", "From arrival to the first token.", stats.to_first_token)
        yield _histogram("inter_token_latency_seconds", "From one token to the next.", stats.between_tokens)
        yield _histogram("request_duration_seconds", "From arrival to the end.", stats.to_end)

    def _requests(self, stats: EngineStats) -> Iterator[Metric]:
        yield _gauge("requests_running", "Requests that take part in steps.", {(): stats.num_running})
        yield _gauge("requests_waiting", "Requests that hold no pages.", {(): stats.num_waiting})
        finished = {(reason,): count for reason, count in stats.finished_by_reason.items()}
        yield _counter("requests_finished", "Requests with a reply.", finished, "finish_reason")
        failed = {(kind,): count for kind, count in stats.failed_by_type.items()}
        yield _counter("requests_failed", "Requests that the engine took and could not finish.", failed, "type")
        rejected = {("queue_full",): stats.num_rejected}
        yield _counter("requests_rejected", "Requests that were not taken.", rejected, "reason")
        yield _counter("preemptions", "How often a request gave its pages back.", {(): stats.num_preemptions})
        yield _counter("steps", "Steps of the engine.", {(): stats.num_steps})
        yield _counter("steps_failed", "Steps that raised an error.", {(): stats.num_failed_steps})
        text = "Answers by path and status; 499: the client left."
        yield _counter("http_responses", text, dict(self._responses), "path", "status")

    def _tokens(self, stats: EngineStats) -> Iterator[Metric]:
        queried, computed = {(): stats.num_prompt_tokens}, {(): stats.num_computed_tokens}
        found, from_disk = stats.cached_tokens_by_kind, stats.disk_tokens_by_kind
        hits = {(kind, "memory"): found.get(kind, 0) - from_disk.get(kind, 0) for kind in KINDS}
        if stats.tier is not None:
            hits |= {(kind, "disk"): from_disk.get(kind, 0) for kind in KINDS}
        yield _counter("prefix_query_tokens", "Tokens of prompts that were looked up in the cache.", queried)
        yield _counter("prefix_hit_tokens", "Tokens of prompts that the cache had.", hits, "kind", "tier")
        yield _counter("computed_tokens", "Tokens that went through the model, wrong guesses not counted.", computed)
        drafted, accepted = {(): stats.num_drafted_tokens}, {(): stats.num_accepted_tokens}
        yield _counter("drafted_tokens", "Guesses of tokens that were checked.", drafted)
        yield _counter("accepted_tokens", "Guesses of tokens that were right.", accepted)
        idle = {(): stats.num_idle_tokens}
        yield _counter("idle_tokens", "Tokens of expected prompts, computed while there was nothing else to do.", idle)
        yield _counter("generated_tokens", "Tokens of replies.", {(): stats.num_generated_tokens})

    def _pages(self, stats: EngineStats) -> Iterator[Metric]:
        pages = {"free": stats.num_free_pages, "cached": stats.num_cached_pages, "used": stats.num_used_pages}
        by_state = {(state,): count for state, count in pages.items()}
        reserved = {("cache",): pages["cached"] * PAGE_SIZE, ("requests",): pages["used"] * PAGE_SIZE}
        unused = {("cache",): stats.num_unused_cache_rows, ("requests",): stats.num_unused_request_rows}
        yield _gauge("kv_pages", f"Pages of {PAGE_SIZE} tokens.", by_state, "state")
        used = pages["used"] / stats.num_pages if stats.num_pages else 0.0
        yield _gauge("kv_used_ratio", "Share of the pages that requests hold.", {(): used})
        yield _counter("kv_pages_evicted", "Cached pages that made room.", {(): stats.num_evicted_pages})
        yield _gauge("kv_rows_reserved", "Tokens that the pages of an owner could hold.", reserved, "owner")
        if (states := stats.states) is not None:
            used_slots = states.num_slots - states.num_free - states.num_cached
            slots = {("free",): states.num_free, ("cached",): states.num_cached, ("used",): used_slots}
            yield _gauge("state_slots", "Slots for states of a recurrent model.", slots, "state")
            yield _gauge("state_snapshots", "States that prefixes are reused from.", {(): states.num_snapshots})
            yield _counter("state_snapshots_evicted", "Snapshots that made room.", {(): states.num_evicted})
        yield _gauge("kv_rows_unused", "Of those, rows that no token is in: fragmentation.", unused, "owner")


def _draft_metrics(draft: DraftStats) -> Iterator[Metric]:
    """Of the model that guesses."""
    pages = {"free": draft.num_free_pages, "cached": draft.num_cached_pages}
    pages["used"] = draft.num_pages - sum(pages.values())
    by_state = {(state,): count for state, count in pages.items()}
    yield _gauge("draft_kv_pages", f"Pages of {PAGE_SIZE} tokens of the draft model.", by_state, "state")
    computed = {(): draft.num_computed_tokens}
    yield _counter("draft_computed_tokens", "Tokens that went through the draft model.", computed)
    if draft.about is not None:
        parts = {("weights",): draft.about.weights_bytes, ("keys_and_values",): draft.about.kv_bytes}
        yield _gauge("draft_bytes", "Memory of the draft model.", parts, "part")


def _store_metrics(tier: TierStats) -> Iterator[Metric]:
    """Of what keeps pages on disk."""
    ends = {
        ("late",): tier.num_loads_late,
        ("slower_than_computing",): tier.num_loads_cut,
        ("broken",): tier.num_loads_broken,
    }
    parts = {
        ("pruned",): tier.chosen.num_loaded,
        ("not_quicker",): tier.chosen.num_refused,
        ("disagreed",): tier.chosen.num_disagreed,
        ("broken",): tier.chosen.num_broken,
        ("late",): tier.chosen.num_late,
    }
    misses = {(kind,): count for kind, count in tier.misses_by_kind.items()}
    yield _gauge("store_up", "Whether pages are kept on disk; 0: the disk failed.", {(): tier.off_because is None})
    yield _gauge("store_pages", f"Pages of {PAGE_SIZE} tokens that can be found on disk.", {(): tier.num_pages})
    yield _gauge("store_bytes", "Bytes of the store's files.", {(): tier.num_bytes})
    yield _gauge("store_queue_bytes", "Bytes that wait to be written.", {(): tier.num_queued_bytes})
    yield _gauge("store_read_bytes_per_second", "As measured lately.", {(): tier.disk_bytes_per_s or 0.0})
    yield _gauge("requests_loading", "Waiting requests that wait for the disk.", {(): tier.num_waiting})
    yield _counter("store_loads", "Prefixes whose loading was begun.", {(): tier.num_loads})
    yield _counter("store_loads_from_end", "Of those, loads beside computing.", {(): tier.num_loads_from_end})
    yield _counter("store_loads_given_up", "Of those, loads whose rest was computed.", ends, "reason")
    yield _counter("store_loads_refused", "Prefixes on disk that were computed sooner.", {(): tier.num_loads_refused})
    yield _counter("store_pages_loaded", "Pages that came from disk.", {(): tier.num_loaded_pages})
    text = "Requests that a part of a prefix was enough for; all but the pruned ones were served exactly."
    yield _counter("store_parts", text, parts, "outcome")
    text = "Tokens of prefixes on disk of which a part was loaded."
    yield _counter("store_part_tokens", text, {(): tier.chosen.num_tokens})
    text = "Prefixes that came to memory whole, because parts of them were asked for often."
    yield _counter("store_prefixes_promoted", text, {(): tier.num_promoted})
    yield from _saved_metrics(tier)
    yield _counter("store_pages_saved", "Pages that were handed to the disk.", {(): tier.num_saved_pages})
    yield _gauge("store_states", "States of a recurrent model that can be found on disk.", {(): tier.num_states})
    yield _counter("store_states_saved", "States that were handed to the disk.", {(): tier.num_saved_states})
    yield _counter("store_states_dropped", "States that the queue had no room for.", {(): tier.num_dropped_states})
    yield _counter("store_pages_dropped", "Pages not saved, for the queue was full.", {(): tier.num_dropped_pages})
    yield _counter("store_pages_evicted", "Pages that made room on disk.", {(): tier.num_evicted_pages})
    yield _counter(
        "store_runs_rewritten", "Runs stored in the order of importance, too.", {(): tier.num_rewritten_runs}
    )
    yield _counter("store_rewrites_dropped", "Not rewritten, for too many waited.", {(): tier.num_dropped_rewrites})
    yield _counter("store_bytes_read", "Bytes asked of the disk.", {(): tier.num_read_bytes})
    yield _counter("store_bytes_written", "Bytes of pages that were written.", {(): tier.num_written_bytes})
    yield _counter("store_misses", "Pages that were asked for and could not be had.", misses, "kind")


def _saved_metrics(tier: TierStats) -> Iterator[Metric]:
    """Of what need not be read from disk."""
    saved, chunks = {("budget",): tier.chosen.num_missing_bytes}, tier.chunks
    if chunks is not None:
        saved |= {("chunks",): chunks.hit_bytes}
        looked = {("hit",): chunks.num_hits, ("miss",): chunks.num_misses}
        yield _gauge("chunk_cache_bytes", "Keys and values of parts that memory keeps.", {(): chunks.num_bytes})
        yield _gauge("chunk_cache_max_bytes", "That it may keep of them.", {(): chunks.max_bytes})
        yield _counter("chunk_cache_chunks", "Chunks of parts that were wanted.", looked, "outcome")
        yield _counter("chunk_cache_evicted", "Chunks that made room.", {(): chunks.num_evicted})
    text = "Keys and values of parts not read from disk: left out by a budget, or kept in memory as chunks."
    yield _counter("store_saved_bytes", text, saved, "by")


def _gauge(name: str, text: str, samples: Samples, *labels: str) -> Metric:
    family = GaugeMetricFamily(f"radixlm_{name}", text, labels=labels)
    for values, value in samples.items():
        family.add_metric(values, value)
    return family


def _counter(name: str, text: str, samples: Samples, *labels: str) -> Metric:
    family = CounterMetricFamily(f"radixlm_{name}", text, labels=labels)
    for values, value in samples.items():
        family.add_metric(values, value)
    return family


def _histogram(name: str, text: str, counts: LatencyCounts) -> Metric:
    bounds = [*map(str, counts.bounds_s), "+Inf"]
    buckets = list(zip(bounds, counts.cumulative, strict=True))
    return HistogramMetricFamily(f"radixlm_{name}", text, buckets=buckets, sum_value=counts.sum_s)
