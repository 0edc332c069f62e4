"""A service: probes, keys, metrics, a log that machines read, and an end that loses nothing."""

from __future__ import annotations

import json
import signal

from .conftest import Clone, Newcomer

PAGE = "docs/operations.md"
KEY, METRICS_KEY = "sk-client", "sk-prometheus"
CHAT = [{"role": "user", "content": "Name a tree."}]


def test_a_service_with_keys_probes_metrics_and_a_log_in_json(clone: Clone, newcomer: Newcomer) -> None:
    (newcomer.folder / "keys.txt").write_text(KEY + "\n", encoding="utf-8")
    newcomer.variables |= {"KEY": KEY, "RADIXLM_METRICS_KEY": METRICS_KEY}
    with newcomer.serving(clone.shown_line("radixlm serve smollm2.radixlm --api-key-file", PAGE)) as served:
        assert [served.get(path)[0] for path in ("/health/live", "/health/ready", "/v1/models")] == [200, 200, 401]
        assert "radixlm_" in served.get("/metrics", METRICS_KEY)[1]
        assert served.get("/v1/models", METRICS_KEY)[0] == 401, "it opens nothing else"
        stream = newcomer.types(clone.shown_line("curl localhost:8000/v1/chat/completions", PAGE) + " -sN")
        assert stream.rstrip().endswith("data: [DONE]")
        served.process.send_signal(signal.SIGTERM)
        served.process.wait(30)
        lines = [json.loads(line) for line in served.said.splitlines()]
    assert {line["status"] for line in lines if "status" in line} == {200, 401}
    assert all(line["level"] in ("info", "warning") for line in lines)


def test_what_was_computed_outlives_a_restart(newcomer: Newcomer) -> None:
    for cached in (0, 16):
        with newcomer.serving("radixlm serve smollm2.radixlm --store cache") as served:
            usage = served.asks(CHAT)["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] >= cached


def test_a_busy_port_is_told_before_anything_is_compiled(clone: Clone, newcomer: Newcomer) -> None:
    with newcomer.serving("radixlm serve smollm2.radixlm"):
        refused = newcomer.types(f"! {clone.shown_line('radixlm serve model.gguf').partition('#')[0]}")
    assert f"port {newcomer.port} of 127.0.0.1 is in use" in refused and "compiling" not in refused
