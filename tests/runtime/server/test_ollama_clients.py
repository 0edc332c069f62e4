"""Bodies as clients of Ollama send them that need no package of their own: Home Assistant, Open WebUI, LlamaIndex."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from ..tool_templates import QWEN
from .scripted import Scripted

TOOL = {"type": "function", "function": {"name": "HassTurnOn", "parameters": {"type": "object", "properties": {}}}}
CALL = {"function": {"name": "HassTurnOn", "arguments": {"area": "Kitchen"}}}
HOME_ASSISTANT = {
    "model": "fake:latest",
    "messages": [
        {"role": "system", "content": "You are a voice assistant for Home Assistant."},
        {"role": "user", "content": "Light on"},
        {"role": "assistant", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": '{"data": {}, "error": null}'},
        {"role": "tool", "content": '{"data": {}, "error": null}'},
    ],
    "tools": [TOOL],
    "stream": True,
    "keep_alive": "-1s",
    "options": {"num_ctx": 8192},
    "think": False,
}
OPEN_WEBUI = {
    "model": "fake:latest",
    "messages": [
        {"role": "user", "content": "Light on"},
        {"role": "assistant", "content": "", "tool_calls": [{"index": 0, "id": "call_a1", **CALL}]},
        {"role": "tool", "tool_call_id": "call_a1", "content": "done"},
    ],
    "stream": True,
    "options": {
        "temperature": 0.7,
        "num_predict": 50,
        "num_ctx": 4096,
        "use_mmap": True,
        "num_thread": 4,
        "mirostat": 0,
        "mirostat_eta": 0.1,
        "repeat_last_n": 64,
    },
    "keep_alive": "5m",
    "metadata": {"chat_id": "1"},
}
LLAMA_INDEX = {
    "model": "fake",
    "messages": [
        {"role": "user", "content": "Light on"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "done"},
    ],
    "tools": [],
    "stream": False,
    "options": {"temperature": 0.75, "num_ctx": 512},
    "keep_alive": 300.0,
}


@pytest.fixture(scope="module")
def model() -> Iterator[Scripted]:
    with Scripted.serving(QWEN) as model:
        yield model


@pytest.mark.parametrize("body", [HOME_ASSISTANT, OPEN_WEBUI, LLAMA_INDEX], ids=["ha", "webui", "llama_index"])
def test_a_body_of_a_client_is_answered(body: Any, model: Scripted) -> None:
    model.say("Done.")
    name = model.engine.manifest.name + body["model"].removeprefix("fake")
    options = body["options"] | {"temperature": 0}
    response = model.client.post("/api/chat", json=body | {"model": name, "options": options})
    assert response.status_code == 200, response.text
    assert json.loads(response.text.splitlines()[-1])["done_reason"] == "stop"
    ignored = set(response.headers.get("x-radixlm-ignored", "").split(", "))
    assert ignored <= {
        *("", "keep_alive", "metadata"),
        *(f"options.{name}" for name in ("num_ctx", "use_mmap", "num_thread", "mirostat_eta")),
    }
