"""The real engine behind a real server, over a model that is fake: every logit hangs on the exact KV that it sees."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from radixlm.runtime.engine.engine import Engine
from radixlm.runtime.server import create_app
from radixlm.runtime.server.http.http_protocol import HTTPProtocol
from radixlm.runtime.server.http.listener import listen

from ..fake_artifact import STATE_BYTES, fake_artifact
from ..fake_model import FakeModel, RecurrentModel

VOCAB_SIZE = 500
TOKENIZER = Path(__file__).resolve().parents[2] / "data" / "tokenizers" / "tiny_spm.json"
TEMPLATE = (
    "{% for m in messages %}<s>[{{ m.role }}] {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}<s>[assistant]{% endif %}"
)
WAIT_S = 60.0  # only a hang takes that long
CHAT = {"messages": [{"role": "user", "content": "once there was"}], "seed": 1, "ignore_eos": True}


class SlowModel(FakeModel):
    """Takes `step_s` for a step, so that replies are in the middle for a while."""

    step_s = 0.0

    def __init__(self, num_pages: int) -> None:
        super().__init__(num_pages, VOCAB_SIZE)

    def forward(self, batch: Any) -> Any:
        if self.step_s:
            time.sleep(self.step_s)
        return super().forward(batch)


class SlowRecurrentModel(SlowModel, RecurrentModel):
    """The same of one that keeps `num_states` states, that of zeros included."""

    def __init__(self, num_pages: int, num_states: int) -> None:
        RecurrentModel.__init__(self, num_pages, VOCAB_SIZE, num_states, STATE_BYTES)


@dataclass
class RealServer:
    """An engine, its model, and where it is served."""

    engine: Engine
    model: SlowModel
    address: tuple[str, int]
    client: httpx.Client

    @property
    def url(self) -> str:
        return f"http://{self.address[0]}:{self.address[1]}"

    def chat(self, **fields: Any) -> httpx.Response:
        return self.client.post(f"{self.url}/v1/chat/completions", json=CHAT | fields)

    def get(self, path: str) -> httpx.Response:
        return self.client.get(self.url + path)

    def send(self, **fields: Any) -> socket.socket:
        """A connection on which a chat request was sent, and nothing was read yet."""
        content = json.dumps(CHAT | fields).encode()
        connection = socket.create_connection(self.address, timeout=WAIT_S)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
        connection.sendall(head.encode() + content)
        return connection

    def check(self) -> None:
        """Nothing runs, everything adds up, and no page is lost: all are free or only cached."""
        wait_until(lambda: self.engine.stats().num_running + self.engine.stats().num_waiting == 0)
        self.engine.check()
        wait_until(lambda: self.engine.stats().num_used_pages == 0)  # work of an idle engine has some for a moment


def wait_until(condition: Callable[[], bool]) -> None:
    """Fail unless it comes true."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


def open_fake_artifact(context_length: int = 256, **more: Any) -> Any:
    """A tokenizer of 500 tokens and a template; the weights are `SlowModel`'s. `more` are `fake_artifact`'s."""
    return fake_artifact(
        TOKENIZER.read_text(encoding="utf-8"),
        TEMPLATE,
        vocab_size=VOCAB_SIZE,
        bos_token_id=1,
        eos_token_id=2,
        context_length=context_length,
        **more,
    )


def real_engine(
    *, num_pages: int = 100, num_states: int = 0, context_length: int = 256, **options: Any
) -> tuple[Engine, SlowModel]:
    """An engine with this much KV, and its model; with `num_states`, one that keeps as many."""
    models: list[SlowModel] = []

    def open_runner(artifact: object, num_pages: int, num_threads: int | None) -> SlowModel:
        models.append(SlowRecurrentModel(num_pages, 1 + num_states) if num_states else SlowModel(num_pages))
        return models[0]

    artifact = open_fake_artifact(context_length, is_recurrent=num_states > 0)
    if num_states:
        options["state_cache_bytes"] = num_states * STATE_BYTES
    kv_cache_bytes = num_pages * artifact.manifest.kv.page_bytes
    # without idle work: a fault is to meet a request
    options = {"max_num_seqs": 8, "kv_cache_bytes": kv_cache_bytes, "idle_work": False, **options}
    return Engine(artifact, open_runner=open_runner, **options), models[0]


@contextmanager
def real_server(*, app: dict[str, Any] | None = None, **options: Any) -> Iterator[RealServer]:
    """One that listens; `app` is for `create_app`, the others are the engine's."""
    engine, model = real_engine(**options)
    listener = listen("127.0.0.1", 0)
    application = create_app(engine, **(app or {}))
    config = uvicorn.Config(application, log_level="warning", lifespan="off", http=HTTPProtocol)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        with httpx.Client(timeout=WAIT_S, verify=False) as client:  # certificates take longer to read than a reply
            yield RealServer(engine, model, listener.getsockname(), client)
    finally:
        engine.close()
        server.should_exit = True
        thread.join(WAIT_S)
        listener.close()
