"""The `ollama` package from npm, in Node."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from ..serve_process import ServeProcess
from .conftest import KEY, MODEL, QUESTION


def ask(server: ServeProcess, question: str) -> Any:
    script = Path(__file__).parent / "npm" / "ollama.cjs"
    environment = os.environ | {"BASE_URL": server.url, "API_KEY": KEY, "MODEL": MODEL, "QUESTION": QUESTION}
    done = subprocess.run(["node", script, question], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_chat_whole_and_streamed(server: ServeProcess, said: str) -> None:
    answer = ask(server, "chat")
    assert answer["text"] == answer["streamed"] == said and answer["reason"] in ("stop", "length")
    assert answer["counts"][0] == answer["counts"][1] > 3


def test_a_prompt_whole_and_streamed(server: ServeProcess, said: str) -> None:
    answer = ask(server, "generate")
    assert answer["text"] == answer["streamed"] == said


def test_a_schema(server: ServeProcess) -> None:
    assert isinstance(ask(server, "format")["size"], bool)


def test_models_are_listed_and_shown(server: ServeProcess) -> None:
    answer = ask(server, "models")
    assert answer.pop("version") and answer == {
        "listed": f"{MODEL}:latest",
        "loaded": f"{MODEL}:latest",
        "family": "llama",
    }


def test_errors_have_statuses(server: ServeProcess) -> None:
    statuses = {"model": 404, "key": 401, "value": 400, "pull": 403, "embed": 400}
    assert ask(server, "errors") == {
        name: {"kind": "ResponseError", "status": status, "has_message": True} for name, status in statuses.items()
    }
    server.wait_until_idle()


def test_a_stream_that_is_left_ends(server: ServeProcess) -> None:
    answer = ask(server, "abort")
    assert answer["error"] == "AbortError" and answer["parts"] < 1500  # what had come by then is read
    server.wait_until_idle()
