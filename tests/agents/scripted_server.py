"""`radixlm` whose model recites: `python -m tests.agents.scripted_server SCRIPT REQUESTS serve fake.radixlm ...`.

The command, its engine, its cache and its server are the real ones, and so are tokenizer and chat template; the model
is `RecitingModel`. SCRIPT is a JSON file::

    {"task": "a text that only the conversations of the script have",
     "tool": "the name of a tool that their requests bring; null: they bring none",
     "turns": ["the first reply", "the second", ...],
     "otherwise": "what all other requests are told",
     "faults": {"3": 500, "5": "cut",     # the third POST is answered so, the fifth by a stream that breaks off, and
                "7": "kill"},             # in the middle of the seventh's answer the process ends as by `kill -9`
     "row_s": 0.0002}                     # what the model takes for a token of a prompt, so that stores are worth it

A line of JSON is added to REQUESTS for each request that asked the model: how many tokens its prompt has, how many of
them were cached, how many had to be computed at least, what was said, and what the model was handed so far.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
import signal
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
from radixlm.cli import cached_artifact, serving
from radixlm.cli.main import main
from radixlm.runtime.artifact import CHAT_TEMPLATE, Artifact
from radixlm.runtime.engine import opening
from radixlm.runtime.engine.completion import Completion
from radixlm.runtime.engine.engine_options import EngineOptions
from radixlm.runtime.server.errors import HTTPError, respond
from radixlm.runtime.server.request_log import RequestRecord
from radixlm.tokenizer_fix import Tokenizer
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..runtime.fake_artifact import FakeArtifact, fake_artifact
from ..runtime.tool_templates import QWEN
from .least_possible import EarlierTexts
from .reciting_model import RecitingModel

TOKENIZER = Path(__file__).resolve().parents[1] / "data" / "tokenizers" / "smollm2.json.gz"
VOCAB_SIZE, START_OF_TURN, END_OF_TURN = 49152, 1, 2
CONTEXT_LENGTH = 65536  # Claude Code's first prompt has 30,000 tokens and more
STEP_TOKENS = 512
OPENS_REPLY = "<|im_start|>assistant\n"


class Server:
    """What stands in for the model, and what is noted of each request."""

    def __init__(self, script: Path, requests: Path) -> None:
        self._script, self._requests = json.loads(script.read_text(encoding="utf-8")), requests
        self._earlier: dict[bytes | None, EarlierTexts] = defaultdict(EarlierTexts)
        self._model: RecitingModel | None = None
        self._faults: dict[str, Any] = self._script.get("faults", {})
        self._num_posts = 0
        self.artifact = _artifact()
        self._tokenizer = Tokenizer(self.artifact.tokenizer_json)

    def open_runner(self, artifact: object, num_pages: int, options: EngineOptions, **_: object) -> RecitingModel:
        self._model = RecitingModel(
            num_pages,
            VOCAB_SIZE,
            reply_to=self._reply_to,
            opens_reply=[START_OF_TURN, *self._tokenizer.encode("assistant\n", add_bos=False)],
            end=END_OF_TURN,
            row_s=self._script.get("row_s", 0.0),
        )
        return self._model

    def faulty(self, app: ASGIApp) -> ASGIApp:
        """The application, but for the faults of the script."""

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http" and scope["method"] == "POST":
                self._num_posts += 1
                fault = self._faults.get(str(self._num_posts))
                if fault is not None:
                    print(f"fault: {fault}", file=sys.stderr, flush=True)
                if fault == "cut":
                    headers = [(b"content-type", b"text/event-stream")]
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                    await send({"type": "http.response.body", "body": b": begun\n\n", "more_body": True})
                    raise ConnectionError("a fault of the script")
                if fault == "kill":
                    await _wait_for_disk(app)
                    return await app(scope, receive, _killing(send))
                if fault is not None:
                    error = HTTPError(fault, "a fault of the script", headers={"Retry-After": "1"})
                    return await respond(error, scope["path"])(scope, receive, send)
            await app(scope, receive, send)

        answer.state = app.state  # type: ignore[attr-defined]  # what the command needs of it, once it serves
        return answer

    def note(self, record: RequestRecord, path: str) -> None:
        for completion in record.completions:
            prompt = self._bytes(completion.prompt_token_ids)
            earlier = self._earlier[record.namespace]
            noted = _described(completion) | {"path": path, "least": earlier.least(prompt)}
            earlier.add([*prompt, *self._bytes(completion.token_ids)])
            noted |= {"prompt": b"".join(prompt).decode(), "model_rows": self._model and self._model.num_rows}
            with self._requests.open("a", encoding="utf-8") as file:
                file.write(json.dumps(noted) + "\n")

    def _reply_to(self, prompt_ids: tuple[int, ...]) -> Sequence[int]:
        prompt = b"".join(self._bytes(prompt_ids)).decode(errors="replace")
        script, turn = self._script, self._turn(prompt)
        said = script["otherwise"] if turn is None or turn >= len(script["turns"]) else script["turns"][turn]
        return self._tokenizer.encode(said, add_bos=False)

    def _turn(self, prompt: str) -> int | None:
        """How many of the script's replies a conversation has; None if the script is not for it.

        Clients write calls anew, so that these are counted; texts come back as they were, among others of the client's.
        """
        task, tool, turns = self._script["task"], self._script["tool"], self._script["turns"]
        if task not in prompt or (tool and f'"name": "{tool}"' not in prompt.partition("</tools>")[0]):
            return None
        if tool:
            return prompt.count(OPENS_REPLY) - 1
        return next((number for number, turn in enumerate(turns) if turn.strip() not in prompt), len(turns))

    def _bytes(self, ids: Sequence[int]) -> list[bytes]:
        return [self._tokenizer.token_bytes(token_id) for token_id in ids]


def _described(completion: Completion) -> dict[str, Any]:
    usage, why = completion.usage, completion.cache_match.why_not_more
    return {
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        "finish_reason": completion.finish_reason,
        "said": completion.text,
        "why_not_more": str(why),
    }


def _artifact() -> FakeArtifact:
    artifact = fake_artifact(
        gzip.decompress(TOKENIZER.read_bytes()).decode(),
        QWEN,
        vocab_size=VOCAB_SIZE,
        bos_token_id=1,
        eos_token_id=END_OF_TURN,
        context_length=CONTEXT_LENGTH,
    )
    module = msgspec.structs.replace(artifact.manifest.module, max_num_tokens=STEP_TOKENS)
    return replace(artifact, manifest=msgspec.structs.replace(artifact.manifest, module=module))


async def _wait_for_disk(app: ASGIApp) -> None:
    """Wait until the store has written what ended requests left, for 30 s at most."""
    written = re.compile(r"^radixlm_store_queue_bytes(\{.*\})? 0(\.0)?$", re.MULTILINE)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as client:
        for _ in range(600):
            if written.search((await client.get("/metrics")).text):
                return
            await asyncio.sleep(0.05)


def _killing(send: Send) -> Send:
    """`send` that ends this process in place of the second part of an answer, so that the first one was sent."""
    num_parts = 0

    async def send_and_end(message: Message) -> None:
        nonlocal num_parts
        num_parts += message["type"] == "http.response.body"
        if num_parts == 2 or (num_parts and not message.get("more_body")):
            os.kill(os.getpid(), signal.SIGKILL)
        await send(message)

    return send_and_end


def _patch(server: Server) -> None:
    fields = RequestRecord.fields

    def noted(record: RequestRecord, scope: Any) -> dict[str, Any]:
        server.note(record, scope["path"])
        return fields(record, scope)

    RequestRecord.fields = noted  # type: ignore[method-assign]
    Artifact.open = staticmethod(lambda path: server.artifact)  # type: ignore[assignment,method-assign]
    create_app = serving.create_app
    serving.create_app = lambda engine, **options: server.faulty(create_app(engine, **options))  # type: ignore
    serving.read_manifest = lambda path: server.artifact.manifest  # type: ignore[assignment]
    cached_artifact.read_manifest = lambda path: SimpleNamespace(files=[CHAT_TEMPLATE])  # type: ignore[assignment,return-value]
    opening._open_runner = server.open_runner  # type: ignore[assignment]


if __name__ == "__main__":
    script, requests = sys.argv.pop(1), sys.argv.pop(1)
    _patch(Server(Path(script), Path(requests)))
    main()
