"""What `vllm bench serve` and SGLang's `bench_serving` send, and how they read the answer.

The programs themselves are not run: vLLM and SGLang bring torch and gigabytes of kernels for GPUs. The bodies are those
that vllm/benchmarks/lib/endpoint_request_func.py (vLLM 02cfb534) and sglang/bench_serving.py (SGLang 0033168f) make.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from ..serve_process import ServeProcess
from .conftest import MODEL

NUM_GENERATED = 8
PROMPT = "Once upon a time"
USAGE = {"include_usage": True}
RUNNING = {"include_usage": True, "continuous_usage_stats": True}
TALK = [{"role": "user", "content": PROMPT}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "vllm completions": (
        "/v1/completions",
        {
            "prompt": PROMPT,
            "repetition_penalty": 1.0,
            "max_tokens": NUM_GENERATED,
            "logprobs": None,
            "stream": True,
            "stream_options": USAGE,
            "ignore_eos": True,
        },
    ),
    "vllm completions of ids, with logprobs and sampling": (
        "/v1/completions",
        {
            "prompt": [504, 2365, 282, 260],
            "repetition_penalty": 1.0,
            "max_tokens": NUM_GENERATED,
            "logprobs": 3,
            "stream": True,
            "stream_options": USAGE,
            "ignore_eos": True,
            "temperature": 0.0,
            "top_p": 0.9,
            "top_k": -1,
            "min_p": 0.0,
        },
    ),
    "vllm chat": (
        "/v1/chat/completions",
        {
            "messages": PARTS,
            "max_completion_tokens": NUM_GENERATED,
            "stream": True,
            "stream_options": USAGE,
            "ignore_eos": True,
        },
    ),
    "sglang completions": (
        "/v1/completions",
        {
            "prompt": PROMPT,
            "temperature": 0.0,
            "best_of": 1,
            "max_tokens": NUM_GENERATED,
            "stream": True,
            "ignore_eos": True,
        },
    ),
    "sglang completions with usage": (
        "/v1/completions",
        {
            "prompt": PROMPT,
            "temperature": 0.0,
            "best_of": 1,
            "max_tokens": NUM_GENERATED,
            "stream": True,
            "stream_options": RUNNING,
            "ignore_eos": True,
        },
    ),
    "sglang chat": (
        "/v1/chat/completions",
        {"messages": TALK, "temperature": 0.0, "max_tokens": NUM_GENERATED, "stream": True, "ignore_eos": True},
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_benchs_request_is_answered_as_it_is_read(server: ServeProcess, name: str) -> None:
    path, body = BODIES[name]
    *events, done = server.bytes(path, {"model": MODEL, **body}).decode().strip().split("\n\n")
    assert done == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events if not event.startswith(":")]
    with_choices = [chunk for chunk in chunks if chunk["choices"]]
    choices = [chunk["choices"][0] for chunk in with_choices]
    assert "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)
    options = body.get("stream_options")
    if options is None:
        assert len(with_choices) == len(chunks)  # SGLang's looks for a choice in each
    else:
        assert chunks[-1]["usage"]["completion_tokens"] == NUM_GENERATED and not chunks[-1]["choices"]
    if options == RUNNING:
        assert [chunk["usage"]["completion_tokens"] for chunk in with_choices][-1] == NUM_GENERATED
