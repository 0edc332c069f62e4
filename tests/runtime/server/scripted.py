"""A server whose model says what a script says, and what tests ask it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from radixlm.runtime.chat.tools.tool_format import ToolFormat
from radixlm.runtime.engine.engine import Engine
from radixlm.runtime.model.scripted_runner import ScriptedRunner
from radixlm.runtime.server import create_app
from starlette.testclient import TestClient

from ..fake_artifact import fake_artifact

TOKENIZER = gzip.decompress(
    (Path(__file__).resolve().parents[2] / "data" / "tokenizers" / "smollm2.json.gz").read_bytes()
).decode()
VOCAB_SIZE, END_OF_TURN = 49152, 2
UNUSED = ("<repo_name>", "<reponame>", "<file_sep>", "<filename>", "<gh_stars>", "<issue_start>")  # special tokens
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "Rain?", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
USER = {"role": "user", "content": "Weather in Oslo?"}
OSLO = ("get_weather", '{"city": "Oslo", "days": 3}')


class Scripted:
    """A server whose model says a script."""

    def __init__(
        self,
        template: str,
        format: ToolFormat | None = None,
        specials: Sequence[str] = (),
        context_length: int = 1024,
    ) -> None:
        self.runner = ScriptedRunner(VOCAB_SIZE)
        tokenizer = TOKENIZER
        for unused, special in zip(UNUSED, specials, strict=False):
            tokenizer = tokenizer.replace(json.dumps(unused), json.dumps(special))
        artifact = fake_artifact(
            tokenizer,
            template,
            vocab_size=VOCAB_SIZE,
            bos_token_id=1,
            eos_token_id=END_OF_TURN,
            context_length=context_length,
        )
        self.engine = Engine(artifact, max_num_seqs=8, speculate="off", open_runner=lambda _, __, ___: self.runner)  # type: ignore[arg-type]
        self.engine.grammars.answer_limit_s = 60.0  # what is found out is not to depend on how busy the machine is
        self.format = format or self.engine.prompts.tool_format
        self.client = TestClient(create_app(self.engine))

    @classmethod
    @contextmanager
    def serving(cls, template: str, specials: Sequence[str] = (), *, context_length: int = 1024) -> Iterator[Self]:
        """A server that ends with the block. Its tokenizer has these special tokens, too."""
        model = cls(template, specials=specials, context_length=context_length)
        with model.engine, model.client:
            yield model

    def say(self, text: str) -> None:
        self.runner.script.clear()
        self.runner.script.extend([*self.engine.encode(text, add_bos=False), END_OF_TURN])

    def ask(self, says: str, messages: list[Any] | None = None, **body: object) -> Any:
        self.say(says)
        body = {"messages": messages or [USER], "tools": TOOLS, "temperature": 0.0, "max_tokens": 300, **body}
        return self.client.post("/v1/chat/completions", json=body)

    def reply(self, says: str, messages: list[Any] | None = None, **body: object) -> Any:
        return self.ask(says, messages, **body).json()["choices"][0]


def events(response: Any) -> list[Any]:
    *lines, done = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert done == "[DONE]"
    return [json.loads(line) for line in lines]
