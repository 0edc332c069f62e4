"""Serve OpenVINO GenAI over HTTP: its package has continuous batching, and no server.

    .venv-openvino/bin/python -m bench.peers.openvino_server --model DIRECTORY|FILE.gguf --threads 2 --port 8001

Implements `/health`, and streamed `/v1/completions` of token ids. Imports nothing of ours. The library holds the
interpreter's lock while it steps, so it has a separate process, which the HTTP process starts.
"""

from __future__ import annotations

import argparse
import json
import queue
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any


def run_pipeline(model: str, num_threads: int, kv_gb: int, pipe: Connection) -> None:
    """Take requests `[number, prompt, num_tokens]` from the pipe, and send `[[number, ids], ...]` after each step.

    The first message is empty: the model is loaded. Ends when the other side has.
    """
    import numpy
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = kv_gb
    scheduler.enable_prefix_caching = scheduler.dynamic_split_fuse = True
    scheduler.max_num_batched_tokens, scheduler.max_num_seqs = 512, 64
    device = {"INFERENCE_NUM_THREADS": num_threads}
    pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", device)
    send(pipe, [])
    running: dict[int, tuple[Any, int]] = {}  # by number: the library's handle, and how many tokens are missing
    while True:
        while not running or pipe.poll():
            number, prompt, num_tokens = json.loads(pipe.recv_bytes())
            config = openvino_genai.GenerationConfig(max_new_tokens=num_tokens, ignore_eos=True, do_sample=False)
            ids = openvino.Tensor(numpy.array([prompt], numpy.int64))
            running[number] = pipeline.add_request(number, ids, config), num_tokens
        pipeline.step()
        told = [(number, ids) for number, (handle, _) in running.items() for ids in _new_ids(handle)]
        for number, ids in told:
            handle, missing = running.pop(number)
            if missing > len(ids):
                running[number] = handle, missing - len(ids)
        if told:
            send(pipe, told)


def send(pipe: Connection, message: Any) -> None:
    """Send one message, for `json.loads(pipe.recv_bytes())`."""
    pipe.send_bytes(json.dumps(message).encode())


def _run_alone(other_end: Connection, model: str, num_threads: int, kv_gb: int, pipe: Connection) -> None:
    other_end.close()  # else the pipe never ends
    with suppress(EOFError):
        run_pipeline(model, num_threads, kv_gb, pipe)


def _new_ids(handle: Any) -> Iterator[list[int]]:
    while handle.can_read():
        for output in handle.read().values():
            yield list(output.generated_ids)


class Pipeline:
    """`run_pipeline` in its process, for the threads that serve requests."""

    def __init__(self, model: str, num_threads: int, kv_gb: int) -> None:
        fork = get_context("fork")
        self._pipe, other = fork.Pipe()
        fork.Process(target=_run_alone, args=(self._pipe, model, num_threads, kv_gb, other), daemon=True).start()
        other.close()
        self._pipe.recv_bytes()
        self._lock = threading.Lock()
        self._replies: dict[int, queue.Queue[list[int]]] = {}
        threading.Thread(target=self._hear, daemon=True).start()

    def reply(self, prompt: list[int], num_tokens: int) -> Iterator[list[int]]:
        """Yield the ids of the reply to `prompt` as they are generated, some at a time."""
        with self._lock:
            number = len(self._replies)
            replies: queue.Queue[list[int]] = queue.Queue()
            self._replies[number] = replies
            send(self._pipe, [number, prompt, num_tokens])
        while num_tokens > 0:
            ids = replies.get()
            num_tokens -= len(ids)
            yield ids

    def _hear(self) -> None:
        """Hand ids that come through the pipe to the replies that wait for them, until the pipe closes."""
        while True:
            for number, ids in json.loads(self._pipe.recv_bytes()):
                self._replies[number].put(ids)


def handler(pipeline: Pipeline) -> type[BaseHTTPRequestHandler]:
    """Return a handler class that serves requests with a pipeline."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            self._send(b'{"status": "ready"}')

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for ids in pipeline.reply(body["prompt"], body["max_tokens"]):
                self._chunk(f"data: {json.dumps({'choices': [{'token_ids': ids}]})}\n\n".encode())
            self._chunk(b"data: [DONE]\n\n")
            self._chunk(b"")

        def _send(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _chunk(self, data: bytes) -> None:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
            self.wfile.flush()

        def log_message(self, *arguments: object) -> None:
            """Log nothing."""

    return Handler


class Server(ThreadingHTTPServer):
    """Connections wait for a thread, however many come at once."""

    request_queue_size = 128


def main() -> None:
    """Serve OpenVINO GenAI over HTTP until the process is killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--kv-gb", type=int, default=1)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    Server(
        ("127.0.0.1", options.port), handler(Pipeline(options.model, options.threads, options.kv_gb))
    ).serve_forever()


if __name__ == "__main__":
    main()
