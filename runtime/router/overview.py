"""`/health` and `/metrics` of all models: collected from the loaded models, with the router's own facts.

Knows names and states. The counters of a model come from its own server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from ..server.http import loading
from ..server.http.api_keys import api_key_of
from ..server.metrics import by_model, counter, gauge
from .model_row import Row, State
from .model_server import Headers, ModelServer, answer_in_time
from .model_table import ModelTable

_STATES: Sequence[State] = ("unloaded", "loading", "loaded", "unloading")


class Overview:
    """The endpoints for health and metrics.

    Args:
        headers: headers for requests to the models, with an API key if there are any.
        has_keys: only clients with a key get names and counts.
        responses: number of the router's own responses by path and status.
    """

    def __init__(
        self,
        table: ModelTable[ModelServer],
        headers: Headers,
        *,
        has_keys: bool,
        responses: Mapping[tuple[str, str], int],
    ) -> None:
        self._table, self._headers, self._has_keys, self._responses = table, headers, has_keys, responses

    async def live(self, request: Request) -> Response:
        """`GET /health/live`: return 200 while the process responds."""
        return loading.live()

    async def health(self, request: Request) -> Response:
        """`GET /health`: return `ready`, `degraded` with a reason, or `loading` (503) until pinned models are loaded.

        `models` has each model's state and its own health report.
        """
        reports = dict(zip(self._names, await asyncio.gather(*map(self._health_of, self._table.rows)), strict=True))
        reasons = [f"{name}: {each['reason']}" for name, each in reports.items() if each.get("reason")]
        pinned = [row for row in self._table.rows if row.spec.is_pinned]
        awaited = [row.spec.name for row in pinned if not row.num_loads and row.error is None]
        status = "loading" if awaited else "degraded" if reasons else "ready"
        if awaited:
            reasons.append(f"{', '.join(awaited)} is loading")
        tells_all = not self._has_keys or api_key_of(request) is not None
        body: dict[str, object] = {"status": status, "reason": ("; ".join(reasons) or None) if tells_all else None}
        if tells_all:
            body["models"] = reports
        return Response(msgspec.json.encode(body), 503 if awaited else 200, media_type="application/json")

    async def metrics(self, request: Request) -> Response:
        """`GET /metrics`: return the metrics of all loaded models, with the label `model`, and the router's own."""
        names = self._names  # of the rows that are asked: others may come meanwhile
        texts = await asyncio.gather(
            *(answer_in_time(row.worker, b"/metrics", self._headers) for row in self._table.rows)
        )
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Merged(self._own_metrics(), dict(zip(names, texts, strict=True))))
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"content-type": content_type})

    @property
    def _names(self) -> list[str]:
        return [row.spec.name for row in self._table.rows]

    async def _health_of(self, row: Row[ModelServer]) -> dict[str, Any]:
        body: dict[str, Any] = {"status": row.state, "reason": row.error}
        if (own := await answer_in_time(row.worker, b"/health", self._headers)) is not None:
            body |= msgspec.json.decode(own)
        return body | {"state": row.state}

    def _own_metrics(self) -> list[Metric]:
        rows = self._table.rows
        states = {(row.spec.name, state): int(row.state == state) for row in rows for state in _STATES}
        loads = {(row.spec.name,): row.num_loads for row in rows}
        taken = {(row.spec.name,): row.bytes_taken for row in rows}
        text = "Responses by path and status; 499: the client disconnected."
        return [
            counter("http_responses", text, dict(self._responses), "path", "status"),
            gauge("model_state", "State of each model: 1 for the present state, else 0.", states, "model", "state"),
            counter("model_loads", "Number of times a model was loaded.", loads, "model"),
            gauge("model_memory_bytes", "Memory of a model's weights, KV cache and states.", taken, "model"),
        ]


class _Merged(Collector):
    """A collector of the router's own metrics, and of those in the models' responses."""

    def __init__(self, own: Sequence[Metric], texts: Mapping[str, bytes | None]) -> None:
        self._own, self._texts = own, texts

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        of_each = {
            name: text_string_to_metric_families(text.decode())
            for name, text in self._texts.items()
            if text is not None
        }
        merged = {metric.name: metric for metric in by_model(of_each)}
        for metric in self._own:
            if (of_models := merged.pop(metric.name, None)) is not None:
                metric.samples += of_models.samples
            yield metric
        yield from merged.values()
