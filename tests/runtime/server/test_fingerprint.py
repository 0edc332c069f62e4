"""`system_fingerprint` tells servers apart that may answer the same request with other bytes."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from radixlm.runtime.engine.engine import Engine
from radixlm.runtime.engine.engine_options import EngineOptions
from radixlm.runtime.optional import OPTIONS, installed
from radixlm.runtime.server import create_app, served
from radixlm.runtime.server.server_options import ServerOptions
from starlette.testclient import TestClient

from .real_server import CHAT, real_engine
from .scripted import events

if TYPE_CHECKING:
    from .conftest import FakeEngine

# Options that change no byte of a reply; their tests are those of the law of the row, of guesses, of the cache.
KEEPING = {
    *("memory_bytes", "kv_cache_bytes", "state_cache_bytes"),  # but by the context that they hold
    *("max_num_seqs", "max_queue", "max_num_batched_tokens", "prefill_ms", "admission", "num_threads", "idle_work"),
    *("match", "cache_ttl_s", "store", "store_bytes", "chunk_cache_bytes"),  # the usage says where they do
    *("speculate", "draft", "clock", "open_runner", "kv_log", "kv_log_bytes", "recorder"),
    "loras",  # each has a fingerprint of its own
}
KEEPING_OF_APP = {
    *("max_body_bytes", "api_keys", "metrics_key", "tells_cached_text", "max_stall_s", "keep_alive_s", "logs_prompts"),
    *("cors_origins", "hosts", "is_strict", "ignores_prompt_cache_key"),
    *("keeps_responses", "response_bytes", "response_ttl_s"),
    "model_ids",  # a reply has the name that was asked for
}


def told(engine: Engine, **app: Any) -> str:
    """What the server says in an answer."""
    client = TestClient(create_app(engine, **app), base_url="http://localhost")
    said: str = client.post("/v1/chat/completions", json=CHAT | {"max_tokens": 1}).json()["system_fingerprint"]
    return said


def fingerprint(*, app: dict[str, Any] | None = None, **options: Any) -> str:
    engine, _ = real_engine(**options)
    with engine:
        return told(engine, **(app or {}))


def test_every_chunk_has_it_and_it_is_of_the_artifact_and_the_version(
    client: TestClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"prompt": "Once"}
    said = client.post("/v1/completions", json=body).json()["system_fingerprint"]
    streamed = events(client.post("/v1/completions", json=body | {"stream": True}))
    assert (
        said.startswith("fp_")
        and said.endswith("_fma")
        and {chunk["system_fingerprint"] for chunk in streamed} == {said}
    )
    engine.manifest.digest = 64 * "1"
    other = served.fingerprint_of(engine, "none")  # type: ignore[arg-type]
    monkeypatch.setattr(served, "VERSION", "99.0")
    assert len({said, other, served.fingerprint_of(engine, "none")}) == 3  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"strip_suffix": "never"},
        {"template_kwargs": {"enable_thinking": False}},
        {"context_length": 128},
        {"kv_cache_bytes": 10 * 16 * 32},  # a context of 144
        {"app": {"truncation": "middle"}},
    ],
)
def test_another_option_that_changes_replies_is_another_fingerprint(options: dict[str, Any]) -> None:
    """Only artifact and version were looked at."""
    assert fingerprint(**options) != fingerprint()
    assert fingerprint(**options) == fingerprint(**options)


def test_options_that_change_no_reply_keep_the_fingerprint(tmp_path: Path) -> None:
    other = {"max_num_seqs": 2, "match": "exact", "speculate": "off", "admission": "conservative", "store": tmp_path}
    app = {"model_ids": ["other"], "is_strict": True, "keep_alive_s": 1.0}
    assert fingerprint(**other, app=app) == fingerprint()


def test_an_extra_that_is_not_in_use_keeps_the_fingerprint(engine: FakeEngine) -> None:
    """It changed where the extra was not installed."""
    engine.reply_options = {"context_length": 8}
    without = served.fingerprint_of(engine, "none")  # type: ignore[arg-type]
    engine.reply_options |= {"kv_budget": None, "calibration": None}
    assert served.fingerprint_of(engine, "none") == without  # type: ignore[arg-type]


def test_of_every_option_it_is_known_whether_it_changes_replies() -> None:
    """A new one is to be put into the fingerprint, or into a set here."""
    engine, _ = real_engine()
    with engine:
        changing = {*engine.reply_options} - {"calibration"}
    absent = set() if installed() else {*OPTIONS}  # of an extra that was removed
    assert changing.isdisjoint(KEEPING)
    assert changing | KEEPING | absent == {field.name for field in fields(EngineOptions)}
    assert {field.name for field in fields(ServerOptions)} == {"truncation"} | KEEPING_OF_APP
