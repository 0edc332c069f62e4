"""A client of a real engine whose model says given ids, and what each of its requests made the model compute.

What is counted are the ids that the model was handed, never the cache's own statistics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from radixlm.runtime.cache.why_not_more import MatchPolicy
from radixlm.runtime.chat.reply_start import given_reply
from radixlm.runtime.engine.engine import Completion, Engine, Message, SamplingParams
from radixlm.runtime.engine.prompts import Prompt
from radixlm.runtime.model.batch import Batch, Float32Array
from radixlm.runtime.model.scripted_runner import ScriptedRunner

from ..runtime.fake_artifact import FakeArtifact


class CountingRunner(ScriptedRunner):
    """Counts the ids that it is handed."""

    num_tokens = 0

    def forward(self, batch: Batch) -> Float32Array:
        self.num_tokens += len(batch.arrays.token_ids)
        return super().forward(batch)


@dataclass(frozen=True)
class Said:
    """A reply, and how many tokens of its prompt were computed for it."""

    completion: Completion
    num_prefilled: int

    @property
    def num_reused(self) -> int:
        """Tokens of the prompt that were not computed; the engine says the same."""
        num_reused = len(self.completion.prompt_token_ids) - self.num_prefilled
        assert num_reused == self.completion.usage.cached_tokens
        return num_reused

    @property
    def held(self) -> tuple[int, ...]:
        """The ids whose KV exists after it: all but the last one, which nobody computed."""
        return (*self.completion.prompt_token_ids, *self.completion.token_ids[:-1])

    @property
    def weakest_kind(self) -> str | None:
        """How the prompt was found."""
        return self.completion.cache_match.kind


class ScriptedTalk:
    """One engine; a context manager."""

    def __init__(self, artifact: FakeArtifact, match: MatchPolicy = "text") -> None:
        self._end = artifact.manifest.tokenizer.eos_token_ids[0]
        self._runner = CountingRunner(artifact.manifest.model.vocab_size)
        model: Any = artifact
        self.engine = Engine(
            model, open_runner=lambda *_: self._runner, max_num_seqs=4, match=match, idle_work=False, speculate="off"
        )

    def chat(self, messages: Sequence[Message], reply: Sequence[int]) -> Said:
        """The reply to messages: these ids and the end of the turn."""
        before, params = self._prepare(reply)
        return self._said(before, self.engine.chat(messages, params))

    def complete(
        self,
        prompt: Prompt,
        reply: Sequence[int],
        *,
        strip_suffix: bool | None = None,
        namespace: bytes = b"",
    ) -> Said:
        """The same for a text or ids; a prompt that loses its space has it said before a reply that lacks one."""
        prepared = self.engine.prompts.completion(prompt, strip_suffix=strip_suffix)
        before, params = self._prepare(given_reply(prepared, reply, self.engine.tokenizer, (self._end,)))
        completion = self.engine.generate(prompt, params, strip_suffix=strip_suffix, namespace=namespace)
        return self._said(before, completion)

    def __enter__(self) -> ScriptedTalk:
        return self

    def __exit__(self, *error: object) -> None:
        self.engine.close()

    def _prepare(self, reply: Sequence[int]) -> tuple[int, SamplingParams]:
        self._runner.script.extend([*reply, self._end])
        return self._runner.num_tokens, SamplingParams(temperature=0.0, max_tokens=len(reply) + 1)

    def _said(self, before: int, completion: Completion) -> Said:
        num_decoded = len(completion.token_ids) - 1
        assert not self._runner.script, "the reply ended before its script"
        return Said(completion, self._runner.num_tokens - before - num_decoded)
