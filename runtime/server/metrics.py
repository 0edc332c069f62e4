"""`GET /metrics`: metrics for Prometheus, read from the engines on each request.

Knows names and units. Counts nothing itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from ..artifact.manifest import PAGE_SIZE
from ..engine.counters import LatencyCounts
from ..engine.engine_stats import EngineStats
from ..optional import installed
from ..prefix.tier_hooks import TierStats
from ..speculation.draft_model import DraftStats
from .models import Models
from .served import Served

KINDS = ("exact", "seam", "text", "alias")
Samples = Mapping[Any, float]  # by a tuple of label values


class Metrics(Collector):
    """The endpoint of one application, with a registry of its own. Waits for no engine.

    With several models, the metrics of each have the label `model`.

    Args:
        responses: number of responses by path and status.
    """

    def __init__(self, models: Models, version: str, responses: Mapping[tuple[str, str], int]) -> None:
        self._models = models
        self._version = version
        self._responses = responses
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    async def answer(self, request: Request) -> Response:
        """Return all metrics in Prometheus' text format, or in OpenMetrics if the request accepts that."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(self._registry), headers={"content-type": content_type})

    def describe(self) -> list[Metric]:
        """Return nothing, so that registering does not read the engines' counters."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics with their present values."""
        text = "Responses by path and status; 499: the client disconnected."
        yield counter("http_responses", text, dict(self._responses), "path", "status")
        of_each = {served.name: self._of_model(served) for served in self._models.rows}
        yield from by_model(of_each) if self._models.has_several else of_each.popitem()[1]

    def _of_model(self, served: Served) -> Iterator[Metric]:
        """Yield the metrics of one model."""
        stats = served.engine.stats()
        build = {(self._version, served.name): 1}
        yield gauge("build_info", "Version of radixlm and name of the model.", build, "version", "model")
        yield gauge("engine_up", "1 if the engine accepts and computes requests, else 0.", {(): int(stats.alive)})
        yield gauge(
            "engine_stalled_seconds", "Time since the last progress while there is work.", {(): stats.stalled_s}
        )
        yield counter("engine_restarts", "Restarts after the engine's thread died.", {(): stats.num_restarts})
        yield from _request_metrics(stats)
        yield from _token_metrics(stats)
        yield from _kv_page_metrics(stats)
        if stats.draft is not None:
            yield from _draft_metrics(stats.draft)
        if stats.tier is not None:
            yield from _store_metrics(stats.tier)
            for extra in installed():
                yield from extra.metrics(stats.tier)
        yield _latency_histogram("request_queue_time_seconds", "From arrival to the first step.", stats.in_queue)
        yield _latency_histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", stats.to_first_token
        )
        yield _latency_histogram("inter_token_latency_seconds", "From one token to the next.", stats.between_tokens)
        yield _latency_histogram("request_duration_seconds", "From arrival to the end.", stats.to_end)


def by_model(of_each: Mapping[str, Iterable[Metric]]) -> Iterable[Metric]:
    """Merge the metrics of several models, with the model's name as a label of each sample."""
    merged: dict[str, Metric] = {}
    for name, metrics in of_each.items():
        for metric in metrics:
            of_all = merged.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
            of_all.samples += [each._replace(labels={**each.labels, "model": name}) for each in metric.samples]
    return merged.values()


def _request_metrics(stats: EngineStats) -> Iterator[Metric]:
    """Yield the metrics of requests and steps: running, waiting, finished, failed, rejected, preempted."""
    yield gauge("requests_running", "Requests that are prefilled or decoded.", {(): stats.num_running})
    yield gauge("requests_waiting", "Requests in the queue, which hold no pages.", {(): stats.num_waiting})
    finished = {(reason,): count for reason, count in stats.finished_by_reason.items()}
    yield counter("requests_finished", "Completed requests by finish reason.", finished, "finish_reason")
    failed = {(kind,): count for kind, count in stats.failed_by_type.items()}
    yield counter("requests_failed", "Accepted requests that ended with an error.", failed, "type")
    rejected = {("queue_full",): stats.num_rejected}
    yield counter("requests_rejected", "Requests that were rejected.", rejected, "reason")
    yield counter(
        "preemptions", "Requests that gave their pages back to others, and resumed later.", {(): stats.num_preemptions}
    )
    yield counter("steps", "Steps of the engine.", {(): stats.num_steps})
    yield counter("steps_failed", "Steps that raised an error.", {(): stats.num_failed_steps})


def _token_metrics(stats: EngineStats) -> Iterator[Metric]:
    """Yield the counts of tokens: looked up and found in the prefix cache, computed, drafted, generated."""
    queried, computed = {(): stats.num_prompt_tokens}, {(): stats.num_computed_tokens}
    found, from_disk = stats.cached_tokens_by_kind, stats.disk_tokens_by_kind
    hits = {(kind, "memory"): found.get(kind, 0) - from_disk.get(kind, 0) for kind in KINDS}
    if stats.tier is not None:
        hits |= {(kind, "disk"): from_disk.get(kind, 0) for kind in KINDS}
    yield counter("prefix_query_tokens", "Prompt tokens looked up in the prefix cache.", queried)
    yield counter("prefix_hit_tokens", "Prompt tokens found in the prefix cache.", hits, "kind", "tier")
    yield counter("computed_tokens", "Tokens computed by the model, without rejected draft tokens.", computed)
    drafted, accepted = {(): stats.num_drafted_tokens}, {(): stats.num_accepted_tokens}
    yield counter("drafted_tokens", "Draft tokens that were verified.", drafted)
    yield counter("accepted_tokens", "Draft tokens that were accepted.", accepted)
    idle = {(): stats.num_idle_tokens}
    yield counter("idle_tokens", "Prompt tokens of expected requests, prefilled while idle.", idle)
    yield counter("generated_tokens", "Generated tokens.", {(): stats.num_generated_tokens})


def _kv_page_metrics(stats: EngineStats) -> Iterator[Metric]:
    """Yield the metrics of KV pages in memory, and, if the model has them, of window rows and recurrent states."""
    pages = {"free": stats.num_free_pages, "cached": stats.num_cached_pages, "used": stats.num_used_pages}
    by_state = {(state,): count for state, count in pages.items()}
    reserved = {("cache",): pages["cached"] * PAGE_SIZE, ("requests",): pages["used"] * PAGE_SIZE}
    unused = {("cache",): stats.num_unused_cache_rows, ("requests",): stats.num_unused_request_rows}
    yield gauge("kv_pages", f"KV cache pages of {PAGE_SIZE} tokens.", by_state, "state")
    used = pages["used"] / stats.num_pages if stats.num_pages else 0.0
    yield gauge("kv_used_ratio", "Share of the KV cache that requests hold.", {(): used})
    yield counter("kv_pages_evicted", "Cached pages that were evicted.", {(): stats.num_evicted_pages})
    yield gauge("kv_rows_reserved", "Capacity in tokens of an owner's pages.", reserved, "owner")
    if (windows := stats.windows) is not None:
        rows = {("kept",): windows.num_with_rows, ("free",): windows.max_pages - windows.num_with_rows}
        yield gauge("kv_window_pages", "Pages with and without KV rows of sliding-window layers.", rows, "state")
        yield counter(
            "kv_window_pages_dropped", "Pages whose sliding-window rows were dropped.", {(): windows.num_dropped}
        )
    if (states := stats.states) is not None:
        used_slots = states.num_slots - states.num_free - states.num_cached
        slots = {("free",): states.num_free, ("cached",): states.num_cached, ("used",): used_slots}
        yield gauge("state_slots", "Slots for states of recurrent layers.", slots, "state")
        yield gauge("state_snapshots", "Cached states from which prefixes can be reused.", {(): states.num_snapshots})
        yield counter("state_snapshots_evicted", "Cached states that were evicted.", {(): states.num_evicted})
    yield gauge("kv_rows_unused", "Unused rows of an owner's pages: fragmentation.", unused, "owner")


def _draft_metrics(draft: DraftStats) -> Iterator[Metric]:
    """Yield the metrics of the draft model."""
    pages = {"free": draft.num_free_pages, "cached": draft.num_cached_pages}
    pages["used"] = draft.num_pages - sum(pages.values())
    by_state = {(state,): count for state, count in pages.items()}
    yield gauge("draft_kv_pages", f"The draft model's KV cache pages of {PAGE_SIZE} tokens.", by_state, "state")
    computed = {(): draft.num_computed_tokens}
    yield counter("draft_computed_tokens", "Tokens computed by the draft model.", computed)
    if draft.about is not None:
        parts = {("weights",): draft.about.weights_bytes, ("keys_and_values",): draft.about.kv_bytes}
        yield gauge("draft_bytes", "Memory of the draft model.", parts, "part")


def _store_metrics(tier: TierStats) -> Iterator[Metric]:
    """Yield the metrics of the store on disk."""
    ends = {
        ("late",): tier.num_loads_late,
        ("slower_than_computing",): tier.num_loads_cut,
        ("broken",): tier.num_loads_broken,
    }
    misses = {(kind,): count for kind, count in tier.misses_by_kind.items()}
    yield gauge("store_up", "1 if pages are saved to disk, 0 if the disk failed.", {(): tier.off_because is None})
    yield gauge("store_pages", f"Pages of {PAGE_SIZE} tokens on disk.", {(): tier.num_pages})
    yield gauge("store_bytes", "Size of the store's files.", {(): tier.num_bytes})
    yield gauge("store_queue_bytes", "Bytes that wait to be written.", {(): tier.num_queued_bytes})
    yield gauge(
        "store_read_bytes_per_second", "Recently measured read rate of the disk.", {(): tier.disk_bytes_per_s or 0.0}
    )
    yield gauge("requests_loading", "Queued requests that wait for the disk.", {(): tier.num_waiting})
    yield counter("store_loads", "Loads of prefixes from disk that were started.", {(): tier.num_loads})
    yield counter(
        "store_loads_from_end",
        "Loads from the end of a prefix while its beginning was computed.",
        {(): tier.num_loads_from_end},
    )
    yield counter("store_loads_given_up", "Loads that were stopped, and the rest computed.", ends, "reason")
    yield counter(
        "store_loads_refused",
        "Prefixes on disk that were computed because that was faster.",
        {(): tier.num_loads_refused},
    )
    yield counter("store_pages_loaded", "Pages loaded from disk.", {(): tier.num_loaded_pages})
    yield counter("store_pages_saved", "Pages queued for writing.", {(): tier.num_saved_pages})
    yield gauge("store_states", "States of recurrent layers on disk.", {(): tier.num_states})
    yield counter("store_states_saved", "States queued for writing.", {(): tier.num_saved_states})
    yield counter("store_states_dropped", "States not saved because the queue was full.", {(): tier.num_dropped_states})
    yield counter("store_pages_dropped", "Pages not saved because the queue was full.", {(): tier.num_dropped_pages})
    yield counter("store_pages_evicted", "Pages evicted from disk.", {(): tier.num_evicted_pages})
    yield counter("store_bytes_read", "Bytes read from disk.", {(): tier.num_read_bytes})
    yield counter("store_bytes_written", "Bytes of pages written to disk.", {(): tier.num_written_bytes})
    yield counter("store_misses", "Pages that could not be read, by reason.", misses, "kind")


def gauge(name: str, text: str, samples: Samples, *labels: str) -> Metric:
    """Return a gauge `radixlm_NAME` with a value for each tuple of label values."""
    family = GaugeMetricFamily(f"radixlm_{name}", text, labels=labels)
    for values, value in samples.items():
        family.add_metric(values, value)
    return family


def counter(name: str, text: str, samples: Samples, *labels: str) -> Metric:
    """Return a counter `radixlm_NAME_total` with a value for each tuple of label values."""
    family = CounterMetricFamily(f"radixlm_{name}", text, labels=labels)
    for values, value in samples.items():
        family.add_metric(values, value)
    return family


def _latency_histogram(name: str, text: str, counts: LatencyCounts) -> Metric:
    """Return a histogram `radixlm_NAME` of latencies in seconds."""
    bounds = [*map(str, counts.bounds_s), "+Inf"]
    buckets = list(zip(bounds, counts.cumulative, strict=True))
    return HistogramMetricFamily(f"radixlm_{name}", text, buckets=buckets, sum_value=counts.sum_s)
