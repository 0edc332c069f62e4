"""Compare with llama.cpp's server: send the same requests, and count how many tokens of their prompts it computes.

Its model has the replayed tokenizer and template, and weights of zeros, because the count does not depend on them. Its
replies cannot be prescribed. So each request asks for one token, and the reply of the history is then appended to the
prompt, as ids, by a request that is not counted. The server's slot then holds what it would hold if that had
been generated. The prompt is the text that the server itself made of the request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path

from ..replay.models import CONTEXT_LENGTH, TalkingArtifact
from ..replay.weightless import write_weightless
from ..served import Client, Json, ServedProcess

Asked = tuple[str, Json]
"""The path and the body of a request."""

_LENGTHS = ("max_tokens", "max_output_tokens")  # of a reply, in each API
_OPTIONS = ("--parallel", "1", "--ctx-size", str(CONTEXT_LENGTH), "--threads", "1", "--jinja")
_TELLS_PROMPTS = {"LLAMA_SERVER_SLOTS_DEBUG": "1"}


class LlamaCppReplay:
    """A llama-server (`program`), with a model that is written to `scratch`."""

    def __init__(self, program: Path, artifact: TalkingArtifact, scratch: Path) -> None:
        self._model = scratch / "weightless.gguf"
        write_weightless(self._model, artifact)
        self._command = (str(program), "--model", str(self._model), *_OPTIONS)

    def play(self, asked: Sequence[Asked], replies: Sequence[str], *, num_first: int = 1) -> int:
        """Play a loop of prompts on a fresh server with its defaults; return the computed tokens of later prompts.

        Args:
            replies: the model's reply to each, without the token that ended it.
            num_first: number of conversations that take turns. The first prompt of each is not counted.
        """
        return self.play_all([(asked, replies)], num_first=num_first)

    def play_all(self, loops: Iterable[tuple[Sequence[Asked], Sequence[str]]], *, num_first: int = 1) -> int:
        """Play several loops on the same server, like `play`."""
        with ServedProcess(self._command, environment=_TELLS_PROMPTS) as server, closing(Client(server.port)) as client:
            return sum(_play_on(client, asked, replies, num_first) for asked, replies in loops)


def _play_on(client: Client, asked: Sequence[Asked], replies: Sequence[str], num_first: int) -> int:
    """Send each prompt, put its reply into the slot, and return the computed tokens of all but the first prompts."""
    computed: list[int] = []
    for (path, body), reply in zip(asked, replies, strict=True):
        one_token = {name: 1 for name in _LENGTHS if name in body}
        computed.append(num_computed(client.json("POST", path, {**body, **one_token})))
        [slot] = client.read("/slots")
        held = [id for text in (slot["prompt"], reply) for id in _ids(client, text)]
        client.json("POST", "/completion", {"prompt": held, "n_predict": 0})
    return sum(computed[num_first:])


def num_computed(answer: Json) -> int:
    """Return the tokens of the prompt that were not cached, from the usage of any API.

    >>> num_computed({"usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 7}}})
    2
    >>> num_computed({"usage": {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 7}}})
    2
    >>> num_computed({"usage": {"input_tokens": 2, "cache_read_input_tokens": 7}})
    2
    """
    usage = answer["usage"]
    for kind in ("prompt", "input"):
        if details := usage.get(f"{kind}_tokens_details"):
            return int(usage[f"{kind}_tokens"]) - int(details["cached_tokens"])
    return int(usage["input_tokens"])


def _ids(client: Client, text: str) -> list[int]:
    found: list[int] = client.json("POST", "/tokenize", {"content": text, "parse_special": True})["tokens"]
    return found
