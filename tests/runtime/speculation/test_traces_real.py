"""Random company of real models, with guesses that are right, wrong and both: each reply is the one without guesses."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from radixlm.runtime import Engine, SamplingParams
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.chat.grammar import Grammar
from radixlm.runtime.engine.step import drafts

from ..guess_oracle import SHARES, Oracle, Unpaid
from ..traces import num_traces

NUM_TRACES = {"smollm2_artifact": 300, "qwen2_artifact": 100}  # a token of Qwen's takes four times as long
NUM_PAGES = 12  # four requests do not fit: some give their pages back
PROMPTS = (
    "Say the alphabet.",
    "Repeat this: one two three one two three one two three",
    "def add(a, b):\n    return a + b\n\nWrite it again.",
    "What is gravity?",
)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "legs": {"type": "integer"}},
    "required": ["name", "legs"],
    "additionalProperties": False,
}
PARAMS = (
    SamplingParams(temperature=0.0, max_tokens=8),
    SamplingParams(temperature=0.8, seed=1, max_tokens=8),
    SamplingParams(temperature=0.8, seed=2, max_tokens=8, logprobs=2),
    SamplingParams(temperature=0.7, top_p=0.9, repetition_penalty=1.2, seed=3, max_tokens=8),
)


@dataclass(frozen=True)
class Case:
    """One request, and its reply alone and without guesses."""

    prompt: str
    params: SamplingParams
    has_grammar: bool
    token_ids: tuple[int, ...] = ()
    logprobs: object = None


class Known(Oracle):
    """An oracle that knows several replies to a prompt: it says the first that goes on from what was said."""

    known: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()

    def __init__(self, token_ids: Sequence[int], *_: object, **__: object) -> None:
        super().__init__(token_ids)
        self._prompt = next((ids for ids, _ in self.known if tuple(token_ids[: len(ids)]) == ids), None)

    def _known(self, prompt: tuple[int, ...]) -> Sequence[int]:
        said = tuple(self._ids[len(prompt) :])
        replies = (reply for ids, reply in self.known if ids == prompt and reply[: len(said)] == said)
        return next(replies, said)[len(said) :]


class Bank:
    """A model, what it says to each case, and how many traces it is asked."""

    def __init__(self, path: Path, num_traces: int) -> None:
        self.num_traces = num_traces
        artifact = Artifact.open(path)
        sizes = {"context_length": 128, "kv_cache_bytes": NUM_PAGES * artifact.manifest.kv.page_bytes}
        self.engine = Engine(artifact, idle_work=False, **sizes)  # type: ignore[arg-type]
        self.grammar = self.engine.grammars.compile(Grammar.json_schema(SCHEMA))
        self.cases: list[Case] = []
        known = []
        with Engine(artifact, idle_work=False, speculate="off", kv_cache_bytes=1 << 28) as plain:
            for text in PROMPTS:
                for params in PARAMS:
                    for has_grammar in (False, True):
                        reply = plain.chat(
                            [{"role": "user", "content": text}],
                            params,
                            constraint=self.grammar if has_grammar else None,
                            cache_match="off",
                        )
                        self.cases.append(Case(text, params, has_grammar, reply.token_ids, reply.logprobs))
                        known.append((reply.prompt_token_ids, reply.token_ids))
        Known.known, Known.vocab_size = tuple(known), artifact.manifest.model.vocab_size // 2


@pytest.fixture(scope="module", params=NUM_TRACES)
def bank(request: pytest.FixtureRequest) -> Iterator[Bank]:
    bank = Bank(request.getfixturevalue(request.param), num_traces(NUM_TRACES[request.param]))
    yield bank
    bank.engine.close()


@pytest.mark.long
def test_random_company_of_a_real_model_is_served_as_alone(bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(5)
    before = bank.engine.stats()
    for number in range(bank.num_traces):
        kind = chance.choice([*SHARES, "own"])
        monkeypatch.setattr(drafts, "Drafter", Unpaid if kind == "own" else Known)
        Known.right = SHARES.get(kind, 0.0)
        case = chance.choice(bank.cases)
        company = [case, *chance.sample(bank.cases, chance.randrange(1, 4))]
        if chance.random() < 0.3:  # several replies to one prompt
            company += [replace(each, prompt=case.prompt) for each in bank.cases if each.prompt == case.prompt][:2]
        streams = [
            bank.engine.stream_chat(
                [{"role": "user", "content": each.prompt}],
                each.params,
                constraint=bank.grammar if each.has_grammar else None,
                namespace=chance.choice([b"", b"other"]),
                cache_match=chance.choice([None, None, "off"]),
            )
            for each in company
        ]
        cancelled = chance.randrange(len(streams)) if chance.random() < 0.3 else None
        for place, (each, stream) in enumerate(zip(company, streams, strict=True)):
            with stream:
                said: list[int] = []
                for delta in stream:
                    said += delta.token_ids
                    if place == cancelled:
                        break
                assert tuple(said) == each.token_ids[: len(said)], (number, kind, each)
                if place != cancelled:
                    completion = stream.result()
                    assert (completion.token_ids, completion.logprobs) == (each.token_ids, each.logprobs)
        if number % 50 == 0:
            bank.engine.check()
    after = bank.engine.stats()
    assert after.num_preemptions > before.num_preemptions, "there was room for all"
    drafted = after.num_drafted_tokens - before.num_drafted_tokens
    accepted = after.num_accepted_tokens - before.num_accepted_tokens
    assert 0.2 * drafted < accepted < 0.8 * drafted and drafted > 5 * bank.num_traces
