"""The `openai` package from npm, in Node."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from ..serve_process import ServeProcess
from .conftest import KEY, MODEL, QUESTION


def ask(server: ServeProcess, question: str) -> Any:
    script = Path(__file__).parent / "npm" / "ask.cjs"
    environment = os.environ | {"BASE_URL": server.url + "/v1", "API_KEY": KEY, "MODEL": MODEL, "QUESTION": QUESTION}
    done = subprocess.run(["node", script, question], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_chat_whole_and_streamed(server: ServeProcess, said: str) -> None:
    answer = ask(server, "chat")
    assert answer["text"] == answer["streamed"] == said
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == answer["usage"]["prompt_tokens"] - 1


def test_a_response(server: ServeProcess, said: str) -> None:
    answer = ask(server, "responses")
    assert answer["text"] == said and answer["status"] in ("completed", "incomplete")


def test_a_tool(server: ServeProcess) -> None:
    answer = ask(server, "tools")
    assert answer["name"] == "get_weather" and answer["arguments"]["city"] in ("Paris", "Rome")


def test_errors_have_their_classes(server: ServeProcess) -> None:
    assert ask(server, "errors") == {
        "model": {"kind": "NotFoundError", "status": 404, "code": "model_not_found"},
        "key": {"kind": "AuthenticationError", "status": 401, "code": "invalid_api_key"},
        "value": {"kind": "BadRequestError", "status": 400, "code": None},
        "timeout": {"kind": "APIConnectionTimeoutError", "status": None, "code": None},
    }
    server.wait_until_idle()


def test_a_stream_that_is_left_ends(server: ServeProcess) -> None:
    assert ask(server, "abort") == {"chunks": 3}
    server.wait_until_idle()
