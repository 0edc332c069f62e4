"""OpenVINO GenAI behind HTTP: its package has continuous batching, and no server.

    .venv-openvino/bin/python -m bench.peers.openvino_server --model DIRECTORY|FILE.gguf --threads 2 --port 8001

Answers `/health`, and streamed `/v1/completions` of token ids. Imports nothing of ours.
"""

from __future__ import annotations

import argparse
import itertools
import json
import queue
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy
import openvino
import openvino_genai


class Pipeline:
    """One thread makes all calls of the library: it adds what was submitted, steps, and tells of new tokens."""

    def __init__(self, model: str, num_threads: int) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 1  # GB
        scheduler.enable_prefix_caching = scheduler.dynamic_split_fuse = True
        scheduler.max_num_batched_tokens, scheduler.max_num_seqs = 512, 64
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": num_threads}
        )
        self._numbers = itertools.count()
        self._submitted: queue.Queue[tuple[list[int], int, queue.Queue[list[int] | None]]] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, prompt: list[int], num_tokens: int) -> queue.Queue[list[int] | None]:
        """The ids of a reply, as they come; None ends it."""
        replies: queue.Queue[list[int] | None] = queue.Queue()
        self._submitted.put((prompt, num_tokens, replies))
        return replies

    def _run(self) -> None:
        running: list[tuple[Any, queue.Queue[list[int] | None], int]] = []  # with the tokens that are missing
        while True:
            while not running or not self._submitted.empty():
                prompt, num_tokens, replies = self._submitted.get()
                config = openvino_genai.GenerationConfig(max_new_tokens=num_tokens, ignore_eos=True, do_sample=False)
                ids = openvino.Tensor(numpy.array([prompt], numpy.int64))
                handle = self._pipeline.add_request(next(self._numbers), ids, config)
                running.append((handle, replies, num_tokens))
            self._pipeline.step()
            running = [each for each in (self._told(*each) for each in running) if each is not None]

    def _told(
        self, handle: Any, replies: queue.Queue[list[int] | None], missing: int
    ) -> tuple[Any, queue.Queue[list[int] | None], int] | None:
        while handle.can_read():
            for output in handle.read().values():
                ids = list(output.generated_ids)
                missing -= len(ids)
                replies.put(ids)
        if missing > 0:
            return handle, replies, missing
        replies.put(None)
        return None


def handler(pipeline: Pipeline) -> type[BaseHTTPRequestHandler]:
    """Answers requests by a pipeline."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            self._send(b'{"status": "ready"}')

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            replies = pipeline.submit(body["prompt"], body["max_tokens"])
            self.send_response(200)
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            while (ids := replies.get()) is not None:
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
            """Nothing."""

    return Handler


class Server(ThreadingHTTPServer):
    """Connections wait for a thread, however many come at once."""

    request_queue_size = 128


def main() -> None:
    """Serve until it is killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    Server(("127.0.0.1", options.port), handler(Pipeline(options.model, options.threads))).serve_forever()


if __name__ == "__main__":
    main()
