"""List the files of ours that a request enters: `make trace`, or `python -m bench.trace ARTIFACT [--files]`.

A cold `generate()`, a chat over HTTP, and a chat with one tool, each on a warm engine and server. To be compared before
and after a change: a request that passes through fewer files is easier to understand.
"""

from __future__ import annotations

import http.client
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import click
import uvicorn
from radixlm.runtime import Engine, SamplingParams
from radixlm.runtime.server import create_app
from radixlm.runtime.server.http.http_protocol import HTTPProtocol
from radixlm.runtime.server.http.listener import listen

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("cli", "compile", "runtime", "tokenizer_fix")
PROMPT = "A radix tree is a data structure that many engines use."
MAX_TOKENS = 8
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}}}
STARTS_WITHIN_S = 60.0


@dataclass
class Trace:
    """Records the functions of ours that are called on any thread while it is on, in order, with the number of calls.

    Attributes:
        calls: by the file and the function's qualified name.
    """

    calls: dict[tuple[str, str], int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """Record a call, as `sys.setprofile` expects."""
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(_PREFIXES):
            called = name, frame.f_code.co_qualname
            with self._lock:
                self.calls[called] = self.calls.get(called, 0) + 1

    def of(self, function: Callable[[], object]) -> dict[Path, int]:
        """Return the files that `function` enters, in order, with the number of calls."""
        self.calls.clear()
        sys.setprofile(self)
        function()
        sys.setprofile(None)
        with self._lock:  # other threads continue
            called = list(self.calls.items())
        files: dict[Path, int] = {}
        for (name, _), calls in called:
            files[Path(name)] = files.get(Path(name), 0) + calls
        return files


_PREFIXES = tuple(f"{ROOT / package}/" for package in PACKAGES)


@contextmanager
def served(engine: Engine) -> Iterator[int]:
    """Run a server in a thread of this process; yield its port."""
    listener: socket.socket = listen("127.0.0.1", 0)
    server = uvicorn.Server(
        uvicorn.Config(create_app(engine), log_level="warning", access_log=False, lifespan="off", http=HTTPProtocol)
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        until = time.monotonic() + STARTS_WITHIN_S
        while not server.started and time.monotonic() < until:
            time.sleep(0.01)
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


def ask(port: int, **fields: Any) -> None:
    """Send one chat request, and read the whole response."""
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": MAX_TOKENS, "temperature": 0} | fields
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    if answer.status != 200:
        raise RuntimeError(f"the server answered {answer.status}: {text!r:.200}")


def lines_of(path: Path) -> int:
    """Return the number of lines of a file."""
    return len(path.read_text(encoding="utf-8").splitlines())


@click.command()
@click.argument("artifact", type=click.Path(exists=True, path_type=Path))
@click.option("--files", is_flag=True, help="List them, too.")
def main(artifact: Path, files: bool) -> None:
    """Print how many files and lines of radixlm each kind of request enters; with `files`, also list them."""
    trace = Trace()
    threading.setprofile(trace)
    greedy = SamplingParams(max_tokens=MAX_TOKENS, temperature=0)
    with Engine(artifact, kv_cache_bytes=1 << 28) as engine, served(engine) as port:
        entered = {"a cold generate()": trace.of(lambda: engine.generate(PROMPT, greedy))}
        ask(port, messages=[{"role": "user", "content": "Hi"}])
        entered["a chat over HTTP"] = trace.of(lambda: ask(port))
        entered["a chat with a tool"] = trace.of(lambda: ask(port, tools=[TOOL]))
    threading.setprofile(None)
    for name, calls in entered.items():
        if files:
            for path, number in calls.items():
                print(f"  {path.relative_to(ROOT)!s:52} {lines_of(path):4} lines {number:6} calls")
        print(f"{name} enters {len(calls)} files of {sum(map(lines_of, calls)):,} lines")


if __name__ == "__main__":
    main()
