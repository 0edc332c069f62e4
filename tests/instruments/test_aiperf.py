"""NVIDIA's aiperf measures chats and completions, streamed, by the server's own counts, and reads its metrics."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ..serve_process import ServeProcess
from .conftest import MODEL, run

NUM_REQUESTS, NUM_GENERATED = 8, 8


@pytest.mark.parametrize("kind", ["chat", "completions"])
def test_all_requests_are_measured(server: ServeProcess, tmp_path: Path, tokenizer: Path, kind: str) -> None:
    run(
        tmp_path,
        "aiperf",
        *("profile", "--model", MODEL, "--url", server.url, "--endpoint-type", kind, "--streaming"),
        *("--tokenizer", tokenizer, "--use-server-token-count", "--ui", "none"),
        *(("--per-chunk-usage",) if kind == "chat" else ()),  # it asks so for chats alone
        *("--concurrency", 4, "--request-count", NUM_REQUESTS, "--artifact-dir", tmp_path / "out"),
        *("--synthetic-input-tokens-mean", 48, "--output-tokens-mean", NUM_GENERATED),
        *("--extra-inputs", f"min_tokens:{NUM_GENERATED}", "--extra-inputs", "ignore_eos:true"),
        environment={"HF_HUB_OFFLINE": "", "TRANSFORMERS_OFFLINE": ""},  # else it takes a folder for a name on the hub
    )
    [found] = (tmp_path / "out").rglob("profile_export_aiperf.json")
    report = json.loads(found.read_text(encoding="utf-8"))
    assert report["request_count"]["avg"] == NUM_REQUESTS
    assert report["output_sequence_length"]["avg"] == NUM_GENERATED
    assert not report.get("error_summary")
    [found] = (tmp_path / "out").rglob("server_metrics_export.json")
    read = json.loads(found.read_text(encoding="utf-8"))
    assert read["summary"]["endpoints_successful"] == [f"{server.url}/metrics"]
    [series] = read["metrics"]["radixlm_generated_tokens"]["series"]
    assert 0 < series["stats"]["total"] <= NUM_REQUESTS * NUM_GENERATED
