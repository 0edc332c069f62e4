"""Record the requests of opencode for two questions: the real client, in its own HOME, and a server that records.

Its prompts belong to its makers, so they are recorded where they are replayed, and never shipped. Knows HTTP and files,
not models.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ..served import Json

MODEL = "qwen"  # in the requests
QUESTIONS = ("What does the code in this repository do?", "And what would you change in it?")
FILES = {
    "greeting.py": 'def greet(name):\n    return "Helo, " + name + "!"\n',
    "test_greeting.py": 'from greeting import greet\n\nassert greet("Ann") == "Hello, Ann!", greet("Ann")\n',
}
_ANSWER = "The function greet says hello to somebody."
_ENDS_WITHIN_S = 120.0


def recorded(program: Path, kept: Path) -> list[list[Json]]:
    """Return the bodies of opencode's requests for each question, in the order sent; recorded once, into `kept`.

    Raises:
        RuntimeError: opencode fails, or sends nothing.
    """
    if not kept.is_file():
        questions = record(program)
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(questions, ensure_ascii=False), encoding="utf-8")
    found: list[list[Json]] = json.loads(kept.read_text(encoding="utf-8"))
    return found


def record(program: Path) -> list[list[Json]]:
    """Run opencode with both questions; return the bodies of its requests, in the order sent, by question.

    Raises:
        RuntimeError: opencode fails, or sends nothing.
    """
    with tempfile.TemporaryDirectory() as folder, _RecordingServer.started() as server:
        home, repository = Path(folder) / "home", Path(folder) / "greeting"
        home.mkdir()
        repository.mkdir()
        for name, text in FILES.items():
            (repository / name).write_text(text)
        subprocess.run(["git", "init", "--quiet"], cwd=repository, check=True)
        settings = home / "opencode.json"
        settings.write_text(json.dumps(_settings(server.server_port)))
        environment = {
            "HOME": str(home),
            "PATH": os.environ["PATH"],
            "TERM": "dumb",
            "OPENCODE_CONFIG": str(settings),
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            **{name: "http://127.0.0.1:9" for name in ("HTTP_PROXY", "HTTPS_PROXY")},  # a port without a server
            "NO_PROXY": "127.0.0.1",
        }
        questions = []
        for number, question in enumerate(QUESTIONS):
            server.bodies = []
            command = [str(program), "run", *(("-c",) if number else ()), question]
            done = subprocess.run(
                command,
                cwd=repository,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_ENDS_WITHIN_S,
            )
            if done.returncode or not server.bodies:
                raise RuntimeError(f"opencode ended with {done.returncode}: {done.stderr[-500:]}")
            questions.append(server.bodies)
    return questions


class _RecordingServer(ThreadingHTTPServer):
    """An HTTP server that answers every chat with the same text, and records the request's body in `bodies`."""

    bodies: list[Json]

    @staticmethod
    @contextmanager
    def started() -> Any:
        """Run the recording server in a thread while the block runs; yield it."""
        with _RecordingServer(("127.0.0.1", 0), _RecordingHandler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            yield server
            server.shutdown()


class _RecordingHandler(BaseHTTPRequestHandler):
    server: _RecordingServer

    def do_POST(self) -> None:
        """Record the body of a chat request, and stream `_ANSWER` as its reply."""
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for delta, finish_reason in (({"role": "assistant", "content": _ANSWER}, None), ({}, "stop")):
            choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
            chunk = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
            self._event(json.dumps({**chunk, "choices": [choice]}))
        self._event("[DONE]")

    def log_message(self, *args: object) -> None:
        """Log nothing."""

    def _event(self, data: str) -> None:
        self.wfile.write(f"data: {data}\n\n".encode())


def _settings(port: int) -> Json:
    """Return opencode's settings, with the recording server at this port as the only provider."""
    options = {"baseURL": f"http://127.0.0.1:{port}/v1", "apiKey": "none"}
    model = {"name": MODEL, "limit": {"context": 32768, "output": 8192}}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "noting", "options": options, "models": {MODEL: model}}
    chosen = dict.fromkeys(("model", "small_model"), f"noting/{MODEL}")
    return {**chosen, "autoupdate": False, "share": "disabled", "provider": {"noting": provider}}
