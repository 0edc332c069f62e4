"""Play a tool loop over HTTP, and compare the tokens that are computed with the least possible.

The least is all tokens of a prompt after the first byte in which its text differs from the longest earlier text of the
conversation, replies included. Earlier texts are taken in the client's current form: calls are equal however they are
written, and white space that a client trims and reasoning that it or the template drops were known when the reply
ended. The last token of a reply, which ends it, was sampled and never computed: it counts. The first prompt does not
count, because all of it must be computed. Tokens are those of the `tokenizers` library.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import tokenizers
from radixlm.runtime import Engine
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.model.batch import Runner
from radixlm.runtime.model.scripted_runner import ScriptedRunner
from radixlm.runtime.server import create_app
from starlette.testclient import TestClient

from ..replay.engine import STATE_BYTES
from ..replay.models import Hybrid
from ..replay.recording_runner import RecordingRunner
from .clients import DIALECTS, Client, Shape
from .llama_cpp import Asked, LlamaCppReplay
from .loops import QUESTIONS, Turn
from .models import MODELS, artifact_of, thinks

KV_BYTES = 1 << 25
_IDLE_S = 60.0  # at most, until expected prompts are computed

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Replayed:
    """All turns of a loop, or of the loops of several agents, but the first; tokens of prompts."""

    model: str
    dialect: str
    shape: str
    num_turns: int
    num_prompt_tokens: int
    num_computed: int
    num_least: int
    num_idle: int
    num_peer: int | None = None  # by llama.cpp, for the same requests

    @property
    def ratio(self) -> float:
        """Computed tokens divided by the least possible."""
        return self.num_computed / self.num_least

    @property
    def peer_ratio(self) -> float | None:
        """llama.cpp's computed tokens divided by the least possible."""
        return None if self.num_peer is None else self.num_peer / self.num_least


class AgentServer:
    """A server whose model gives scripted replies; a context manager."""

    def __init__(self, model: str, *, idle_work: bool = True, hybrid: Hybrid | None = None) -> None:
        self.model, self._artifact = model, artifact_of(model, hybrid)
        self._script = ScriptedRunner(self._artifact.manifest.model.vocab_size)
        self.engine = Engine(
            self._artifact,
            kv_cache_bytes=KV_BYTES,
            state_cache_bytes=None if hybrid is None else STATE_BYTES,
            max_num_seqs=1,
            idle_work=idle_work,
            speculate="off",
            open_runner=self._open_runner,
        )
        self.engine.grammars.answer_limit_s = 60.0
        self._asked: list[tuple[Sequence[Message], Any]] = []
        self._sent: list[Asked] = []
        self._note_conversations()
        self._http = TestClient(create_app(self.engine))
        self._tokenizer = tokenizers.Tokenizer.from_str(self._artifact.tokenizer_json)

    def __enter__(self) -> AgentServer:
        self._http.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._http.__exit__(None, None, None)
        self.engine.close()

    def play(self, dialect: str, shape: Shape, turns: Sequence[Turn], peer: LlamaCppReplay | None = None) -> Replayed:
        """Play a tool loop on an empty cache, and count the prompt tokens computed and the least that must be.

        Args:
            dialect: the API to use, a key of `DIALECTS`.
            shape: how the client sends the history. Its subagents play the same loop, in turns with the first agent.
            peer: llama.cpp, which then computes the same requests, too.

        Returns:
            Sums over all turns but the first of each agent.
        """
        self._http.delete("/v1/cache")
        self._wait_until_idle()
        self._asked.clear()
        self._sent.clear()
        agents = range(1 + shape.num_subagents)
        clients = [DIALECTS[dialect](shape, self._artifact.manifest.name, agent) for agent in agents]
        for client in clients:
            client.ask(QUESTIONS[0])
        counts = [self._turn(client, turn) for turn in turns for client in clients]
        computed, prompts, idle = zip(*counts[len(clients) :], strict=True)
        replies = [turn.text(thinks=thinks(self.model)) for turn in turns for _ in clients]
        return Replayed(
            self.model,
            dialect,
            shape.name,
            len(turns),
            sum(prompts),
            sum(computed),
            sum(sum(self._least_computed(self._asked[agent :: len(clients)])) for agent in agents),
            sum(idle),
            peer.play(self._sent, replies, num_first=len(clients)) if peer else None,
        )

    def _turn(self, client: Client, turn: Turn) -> tuple[int, int, int]:
        """Send a turn's request, with the turn's reply as the model's output.

        Returns:
            The prompt's tokens that were computed, all of its tokens, and the tokens computed in idle time afterwards.
        """
        text = turn.text(thinks=thinks(self.model))
        self._script.script.extend([*self.engine.tokenizer.encode_inside(text), self._end_id])
        num_idle = self.engine.stats().num_idle_tokens
        self._sent.append((client.path, client.body()))
        response = self._http.post(client.path, json=client.body())
        if response.status_code != 200:
            raise ValueError(f"the server says {response.status_code}: {response.text}")
        reply = client.read(response.json())
        assert not self._script.script, "the model did not say all that it was told"
        given = [(name, arguments) for _, name, arguments in reply.calls]
        assert given == list(turn.calls), f"the calls {given} are not {turn.calls}"
        assert reply.words.strip() == turn.words.strip(), f"{reply.words!r} is not {turn.words!r}"
        client.add(reply, turn.results)
        if turn.question is not None:
            client.ask(turn.question)
        self._wait_until_idle()
        num_idle = self.engine.stats().num_idle_tokens - num_idle
        passed = self._recorder.take()
        num_prefilled = len(passed.forwarded_ids) - num_idle - (reply.num_tokens - 1)
        return num_prefilled, num_prefilled + len(passed.reused_ids), num_idle

    def _least_computed(self, asked: Sequence[tuple[Sequence[Message], Any]]) -> list[int]:
        """Return, for each prompt but the first, the least number of tokens that a perfect cache must compute.

        Args:
            asked: messages and options of each request of one conversation.
        """
        earlier: list[str] = []
        least: list[int] = []
        for (before, _), (now, kwargs) in pairwise(asked):
            reply = [message for message in now if message["role"] == "assistant"][_num_replies(before)]
            for history in ([*before, reply], [*before, reply, {"role": "user", "content": "?"}]):
                rendered = self._render(history, kwargs, is_asked=False)
                place = rendered.rindex(self._end)
                if history[-1] is not reply:
                    place = rendered.rindex(self._end, 0, place)
                earlier.append(rendered[:place])
            prompt = self._render(now, kwargs)
            place = max(_num_common(prompt, text) for text in earlier)
            offsets = self._tokenizer.encode(prompt, add_special_tokens=False).offsets
            least.append(sum(end > place or start >= place for start, end in offsets))
        return least

    def _render(self, messages: Sequence[Message], options: Any, *, is_asked: bool = True) -> str:
        """Return the text of messages as the template writes them; without the generation prompt, unless `is_asked`."""
        prompts = self.engine.prompts
        text = prompts.render(messages, options.tools, options.template_kwargs)
        return text if is_asked else text.removesuffix("<|im_start|>assistant\n")

    def _wait_until_idle(self) -> None:
        """Wait until the engine has done its idle work."""
        until = time.monotonic() + _IDLE_S
        while not self.engine._loop.call(lambda core: core.expected is None or core.expected.is_done):
            assert time.monotonic() < until, "idle work does not end"
            time.sleep(0.002)

    def _note_conversations(self) -> None:
        """Make the engine record the messages and options of each chat in `_asked`."""
        ask = self.engine.stream_chat

        def noted(messages: Sequence[Message], *args: Any, **kwargs: Any) -> Any:
            self._asked.append((messages, kwargs["options"]))
            return ask(messages, *args, **kwargs)

        self.engine.stream_chat = noted  # type: ignore[method-assign]

    def _open_runner(self, artifact: Artifact, num_pages: int, num_threads: int | None) -> Runner:
        self._recorder = RecordingRunner(num_pages, self._script)
        return self._recorder

    @property
    def _end(self) -> str:
        return MODELS[self.model].end

    @property
    def _end_id(self) -> int:
        return self._artifact.manifest.tokenizer.eos_token_ids[0]


def _num_common(left: str, right: str) -> int:
    """Return the length of the common beginning."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if left[:middle] == right[:middle] else (low, middle - 1)
    return low


def _num_replies(messages: Sequence[Message]) -> int:
    return sum(message["role"] == "assistant" for message in messages)
