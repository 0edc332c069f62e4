"""guidellm's benchmarks, each with few and short requests: all succeed, and have the lengths that were asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ..serve_process import ServeProcess
from .conftest import MODEL, run

STAND_INS = Path(__file__).resolve().parent / "stand_ins"
NUM_REQUESTS, NUM_GENERATED = 12, 8


def benchmark(server: ServeProcess, folder: Path, tokenizer: Path, data: dict[str, int], *options: str) -> list[Any]:
    """The requests of a run of four streams."""
    data_args = ",".join(f"{name}={value}" for name, value in {"kind": "synthetic_text", **data}.items())
    run(
        folder,
        "guidellm",
        *("run", "--data", data_args, *options),
        *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
        *("--tokenizer", f"kind=hf_auto,model={tokenizer}"),
        *("--output", f"kind=json,path={folder / 'report.json'}", "--disable-console"),
        environment={"PYTHONPATH": str(STAND_INS), "USE_TORCH": "0"},
    )
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    [found] = report["benchmarks"]
    assert not found["requests"]["errored"], found["requests"]["errored"][:1]
    return list(found["requests"]["successful"])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_concurrent_requests_all_succeed(server: ServeProcess, tmp_path: Path, tokenizer: Path, path: str) -> None:
    backend = f"kind=openai_http,target={server.url},model={MODEL},request_format={path}"
    data = {"prompt_tokens": 48, "output_tokens": NUM_GENERATED}
    options = ("--backend", backend, "--profile", "kind=concurrent,streams=4")
    requests = benchmark(server, tmp_path, tokenizer, data, *options)
    assert len(requests) >= NUM_REQUESTS
    assert {request["output_tokens"] for request in requests} == {NUM_GENERATED}


def test_its_scenario_of_several_turns_succeeds(server: ServeProcess, tmp_path: Path, tokenizer: Path) -> None:
    """Its own scenario, with shorter texts; each turn after the first finds the turns before it cached."""
    backend = f"kind=openai_http,target={server.url},model={MODEL},request_format=/v1/chat/completions"
    data = {"prompt_tokens": 40, "output_tokens": NUM_GENERATED, "turns": 4, "prefix_tokens": 64, "prefix_count": 2}
    scenario = ("--scenario", "rhaiis/concurrent-1k-1k-multiturn", "--override", "profile.streams", "2")
    requests = benchmark(server, tmp_path, tokenizer, data, *scenario, "--backend", backend)
    assert len(requests) >= NUM_REQUESTS
    assert max(request["prompt_tokens"] for request in requests) > 150  # a history, and not a turn alone
