"""Run the real engine with a model whose replies are given, one turn at a time, and record the ids passed to it.

Knows messages, ids and policies; not where conversations come from, nor what would have been ideal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from radixlm.runtime import Completion, Engine, SamplingParams
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.model.batch import Runner
from radixlm.runtime.model.scripted_runner import ScriptedRunner
from radixlm.tokenizer_fix import SpelledPrompt

from ..worker import Closable
from .models import TalkingArtifact
from .recording_runner import Passed, RecordingRunner

Message = Mapping[str, str]
Policy = Literal["text", "seam", "exact", "others"]
POLICIES: tuple[Policy, ...] = ("text", "seam", "exact", "others")
KV_BYTES = 1 << 25  # of a fake cache whose row is 32 bytes: a million tokens
STATE_BYTES = 1 << 30  # of a model that has states


@dataclass(frozen=True)
class Turn:
    """A recorded turn; `prompt_ids` are the used ones, as a client gets them with `return_token_ids`."""

    text: str
    prompt_ids: tuple[int, ...]
    reply_ids: tuple[int, ...]
    reused_ids: tuple[int, ...]
    prefilled_ids: tuple[int, ...]


class ReplayEngine(Closable):
    """An engine for replays; close it, or use it as a context manager."""

    def __init__(self, artifact: TalkingArtifact) -> None:
        self._script = ScriptedRunner(artifact.manifest.model.vocab_size)
        self.engine = Engine(
            artifact,
            kv_cache_bytes=KV_BYTES,
            state_cache_bytes=STATE_BYTES if artifact.manifest.model.state_bytes else None,
            max_num_seqs=1,
            idle_work=False,
            speculate="off",
            open_runner=self._open_runner,
        )
        self.end_id = artifact.manifest.tokenizer.eos_token_ids[0]

    def ask(
        self, messages: Sequence[Message], reply: Sequence[int], policy: Policy = "text", namespace: bytes = b""
    ) -> Turn:
        """Make the model reply to `messages` with the ids `reply`.

        `others` does what engines do that compute the rendered text as it is and match its ids.
        """
        if policy == "others":
            return self.ask_raw(self.engine.render(messages), reply, namespace)
        params = self._say(reply)
        return self._turn(self.engine.chat(messages, params, namespace=namespace, cache_match=policy))

    def ask_raw(self, prompt: str | Sequence[int], reply: Sequence[int], namespace: bytes = b"") -> Turn:
        """Make the model reply with the ids `reply` to a prompt that is computed as it is, matched by its ids alone."""
        params = self._say(reply)
        completion = self.engine.generate(prompt, params, namespace=namespace, cache_match="exact", strip_suffix=False)
        return self._turn(completion)

    def spelled(self, messages: Sequence[Message]) -> SpelledPrompt:
        """Return the encoding of a conversation."""
        tokenizer = self.engine.tokenizer
        return tokenizer.spelled(tokenizer.prepare_chat(self.engine.render(messages)).ids)

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()

    def _say(self, reply: Sequence[int]) -> SamplingParams:
        self._script.script.extend(reply)
        return SamplingParams(temperature=0.0, max_tokens=len(reply))

    def _turn(self, completion: Completion) -> Turn:
        assert not self._script.script, "the model did not say all that it was told"
        return turn_of(completion, self.recorder.take())

    def _open_runner(self, artifact: Artifact, num_pages: int, num_threads: int | None) -> Runner:
        self.recorder = RecordingRunner(num_pages, self._script)
        return self.recorder


def turn_of(completion: Completion, passed: Passed) -> Turn:
    """Return a turn with the forwarded ids of prompt and reply separated; the reply's last one is never computed."""
    prompt_ids, reply_ids = completion.prompt_token_ids, completion.token_ids
    num_prefilled = len(passed.forwarded_ids) - (len(reply_ids) - 1)
    prefilled, decoded = passed.forwarded_ids[:num_prefilled], passed.forwarded_ids[num_prefilled:]
    assert passed.reused_ids + prefilled == prompt_ids, "what the model saw is not the prompt"
    assert decoded == reply_ids[:-1]
    return Turn(completion.text, prompt_ids, reply_ids, passed.reused_ids, prefilled)


def with_reply(messages: Sequence[Message], text: str, *asked: str) -> list[Message]:
    """Return the conversation after a reply and, if given, the next message of the user."""
    longer: list[Message] = [*messages, {"role": "assistant", "content": text}]
    return [*longer, *({"role": "user", "content": words} for words in asked)]
