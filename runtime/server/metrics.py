"""`GET /metrics`: what Prometheus asks for, read from the engines at the moment that it asks.

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
Samples = Mapping[Any, float]  # by a tuple with a text for each label


class Metrics(Collector):
    """The endpoint of one application, with a registry of its own. Waits for no engine.

    Where there are several models, what is told of one has the label `model`.

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
        """In Prometheus' text format, or OpenMetrics if that is asked for."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(self._registry), headers={"content-type": content_type})

    def describe(self) -> list[Metric]:
        """Nothing: the registry need not ask the engine to know that no name is taken."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All of it, at this moment."""
        text = "Answers by path and status; 499: the client left."
        yield counter("http_responses", text, dict(self._responses), "path", "status")
        of_each = {served.name: self._of(served) for served in self._models.rows}
        yield from by_model(of_each) if self._models.has_several else of_each.popitem()[1]

    def _of(self, served: Served) -> Iterator[Metric]:
        """What is told of one model."""
        stats = served.engine.stats()
        build = {(self._version, served.name): 1}
        yield gauge("build_info", "What is served, and by which version.", build, "version", "model")
        yield gauge("engine_up", "Whether the engine takes and computes requests.", {(): int(stats.alive)})
        yield gauge("engine_stalled_seconds", "Since a step got on while there is work.", {(): stats.stalled_s})
        yield counter("engine_restarts", "Deaths of the engine's thread that it got over.", {(): stats.num_restarts})
        yield from _request_metrics(stats)
        yield from _token_metrics(stats)
        yield from _page_metrics(stats)
        if stats.draft is not None:
            yield from _draft_metrics(stats.draft)
        if stats.tier is not None:
            yield from _store_metrics(stats.tier)
            for extra in installed():
                yield from extra.metrics(stats.tier)
        yield _histogram("request_queue_time_seconds", "From arrival to the first step.", stats.in_queue)
        yield _histogram("time_to_first_token_seconds", "From arrival to the first token.", stats.to_first_token)
        yield _histogram("inter_token_latency_seconds", "From one token to the next.", stats.between_tokens)
        yield _histogram("request_duration_seconds", "From arrival to the end.", stats.to_end)


def by_model(of_each: Mapping[str, Iterable[Metric]]) -> Iterable[Metric]:
    """The metrics of several models, each once, whose samples have the model's name as a label."""
    merged: dict[str, Metric] = {}
    for name, metrics in of_each.items():
        for metric in metrics:
            of_all = merged.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
            of_all.samples += [each._replace(labels={**each.labels, "model": name}) for each in metric.samples]
    return merged.values()


def _request_metrics(stats: EngineStats) -> Iterator[Metric]:
    yield gauge("requests_running", "Requests that take part in steps.", {(): stats.num_running})
    yield gauge("requests_waiting", "Requests that hold no pages.", {(): stats.num_waiting})
    finished = {(reason,): count for reason, count in stats.finished_by_reason.items()}
    yield counter("requests_finished", "Requests with a reply.", finished, "finish_reason")
    failed = {(kind,): count for kind, count in stats.failed_by_type.items()}
    yield counter("requests_failed", "Requests that the engine took and could not finish.", failed, "type")
    rejected = {("queue_full",): stats.num_rejected}
    yield counter("requests_rejected", "Requests that were not taken.", rejected, "reason")
    yield counter("preemptions", "How often a request gave its pages back.", {(): stats.num_preemptions})
    yield counter("steps", "Steps of the engine.", {(): stats.num_steps})
    yield counter("steps_failed", "Steps that raised an error.", {(): stats.num_failed_steps})


def _token_metrics(stats: EngineStats) -> Iterator[Metric]:
    queried, computed = {(): stats.num_prompt_tokens}, {(): stats.num_computed_tokens}
    found, from_disk = stats.cached_tokens_by_kind, stats.disk_tokens_by_kind
    hits = {(kind, "memory"): found.get(kind, 0) - from_disk.get(kind, 0) for kind in KINDS}
    if stats.tier is not None:
        hits |= {(kind, "disk"): from_disk.get(kind, 0) for kind in KINDS}
    yield counter("prefix_query_tokens", "Tokens of prompts that were looked up in the cache.", queried)
    yield counter("prefix_hit_tokens", "Tokens of prompts that the cache had.", hits, "kind", "tier")
    yield counter("computed_tokens", "Tokens that went through the model, wrong guesses not counted.", computed)
    drafted, accepted = {(): stats.num_drafted_tokens}, {(): stats.num_accepted_tokens}
    yield counter("drafted_tokens", "Guesses of tokens that were checked.", drafted)
    yield counter("accepted_tokens", "Guesses of tokens that were right.", accepted)
    idle = {(): stats.num_idle_tokens}
    yield counter("idle_tokens", "Tokens of expected prompts, computed while there was nothing else to do.", idle)
    yield counter("generated_tokens", "Tokens of replies.", {(): stats.num_generated_tokens})


def _page_metrics(stats: EngineStats) -> Iterator[Metric]:
    pages = {"free": stats.num_free_pages, "cached": stats.num_cached_pages, "used": stats.num_used_pages}
    by_state = {(state,): count for state, count in pages.items()}
    reserved = {("cache",): pages["cached"] * PAGE_SIZE, ("requests",): pages["used"] * PAGE_SIZE}
    unused = {("cache",): stats.num_unused_cache_rows, ("requests",): stats.num_unused_request_rows}
    yield gauge("kv_pages", f"Pages of {PAGE_SIZE} tokens.", by_state, "state")
    used = pages["used"] / stats.num_pages if stats.num_pages else 0.0
    yield gauge("kv_used_ratio", "Share of the pages that requests hold.", {(): used})
    yield counter("kv_pages_evicted", "Cached pages that made room.", {(): stats.num_evicted_pages})
    yield gauge("kv_rows_reserved", "Tokens that the pages of an owner could hold.", reserved, "owner")
    if (windows := stats.windows) is not None:
        rows = {("kept",): windows.num_with_rows, ("free",): windows.max_pages - windows.num_with_rows}
        yield gauge("kv_window_pages", "Pages by whether rows of sliding windows are kept.", rows, "state")
        yield counter("kv_window_pages_dropped", "Pages that lost such rows.", {(): windows.num_dropped})
    if (states := stats.states) is not None:
        used_slots = states.num_slots - states.num_free - states.num_cached
        slots = {("free",): states.num_free, ("cached",): states.num_cached, ("used",): used_slots}
        yield gauge("state_slots", "Slots for states of a recurrent model.", slots, "state")
        yield gauge("state_snapshots", "States that prefixes are reused from.", {(): states.num_snapshots})
        yield counter("state_snapshots_evicted", "Snapshots that made room.", {(): states.num_evicted})
    yield gauge("kv_rows_unused", "Of those, rows that no token is in: fragmentation.", unused, "owner")


def _draft_metrics(draft: DraftStats) -> Iterator[Metric]:
    """Of the model that guesses."""
    pages = {"free": draft.num_free_pages, "cached": draft.num_cached_pages}
    pages["used"] = draft.num_pages - sum(pages.values())
    by_state = {(state,): count for state, count in pages.items()}
    yield gauge("draft_kv_pages", f"Pages of {PAGE_SIZE} tokens of the draft model.", by_state, "state")
    computed = {(): draft.num_computed_tokens}
    yield counter("draft_computed_tokens", "Tokens that went through the draft model.", computed)
    if draft.about is not None:
        parts = {("weights",): draft.about.weights_bytes, ("keys_and_values",): draft.about.kv_bytes}
        yield gauge("draft_bytes", "Memory of the draft model.", parts, "part")


def _store_metrics(tier: TierStats) -> Iterator[Metric]:
    """Of what keeps pages on disk."""
    ends = {
        ("late",): tier.num_loads_late,
        ("slower_than_computing",): tier.num_loads_cut,
        ("broken",): tier.num_loads_broken,
    }
    misses = {(kind,): count for kind, count in tier.misses_by_kind.items()}
    yield gauge("store_up", "Whether pages are kept on disk; 0: the disk failed.", {(): tier.off_because is None})
    yield gauge("store_pages", f"Pages of {PAGE_SIZE} tokens that can be found on disk.", {(): tier.num_pages})
    yield gauge("store_bytes", "Bytes of the store's files.", {(): tier.num_bytes})
    yield gauge("store_queue_bytes", "Bytes that wait to be written.", {(): tier.num_queued_bytes})
    yield gauge("store_read_bytes_per_second", "As measured lately.", {(): tier.disk_bytes_per_s or 0.0})
    yield gauge("requests_loading", "Waiting requests that wait for the disk.", {(): tier.num_waiting})
    yield counter("store_loads", "Prefixes whose loading was begun.", {(): tier.num_loads})
    yield counter("store_loads_from_end", "Of those, loads beside computing.", {(): tier.num_loads_from_end})
    yield counter("store_loads_given_up", "Of those, loads whose rest was computed.", ends, "reason")
    yield counter("store_loads_refused", "Prefixes on disk that were computed sooner.", {(): tier.num_loads_refused})
    yield counter("store_pages_loaded", "Pages that came from disk.", {(): tier.num_loaded_pages})
    yield counter("store_pages_saved", "Pages that were handed to the disk.", {(): tier.num_saved_pages})
    yield gauge("store_states", "States of a recurrent model that can be found on disk.", {(): tier.num_states})
    yield counter("store_states_saved", "States that were handed to the disk.", {(): tier.num_saved_states})
    yield counter("store_states_dropped", "States that the queue had no room for.", {(): tier.num_dropped_states})
    yield counter("store_pages_dropped", "Pages not saved, for the queue was full.", {(): tier.num_dropped_pages})
    yield counter("store_pages_evicted", "Pages that made room on disk.", {(): tier.num_evicted_pages})
    yield counter("store_bytes_read", "Bytes asked of the disk.", {(): tier.num_read_bytes})
    yield counter("store_bytes_written", "Bytes of pages that were written.", {(): tier.num_written_bytes})
    yield counter("store_misses", "Pages that were asked for and could not be had.", misses, "kind")


def gauge(name: str, text: str, samples: Samples, *labels: str) -> Metric:
    """Return a gauge `radixlm_NAME`; `samples` are by a tuple with a text for each of `labels`."""
    family = GaugeMetricFamily(f"radixlm_{name}", text, labels=labels)
    for values, value in samples.items():
        family.add_metric(values, value)
    return family


def counter(name: str, text: str, samples: Samples, *labels: str) -> Metric:
    """Return a counter `radixlm_NAME_total`, likewise."""
    family = CounterMetricFamily(f"radixlm_{name}", text, labels=labels)
    for values, value in samples.items():
        family.add_metric(values, value)
    return family


def _histogram(name: str, text: str, counts: LatencyCounts) -> Metric:
    bounds = [*map(str, counts.bounds_s), "+Inf"]
    buckets = list(zip(bounds, counts.cumulative, strict=True))
    return HistogramMetricFamily(f"radixlm_{name}", text, buckets=buckets, sum_value=counts.sum_s)
