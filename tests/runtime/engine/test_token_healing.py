"""The last token of a prompt is chosen anew with the bytes that it has: the reply is that of the slow way, which looks
at every token, and prompt and reply spell the prompt's text and no byte twice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from radixlm.runtime.chat.grammar import Grammar
from radixlm.runtime.chat.reply_start import HealingTokens
from radixlm.runtime.engine.engine import Engine
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.errors import InvalidParameter
from radixlm.runtime.model.batch import Int32Array

from ..fake_artifact import fake_artifact
from ..fake_constraint import mask_of
from ..fake_model import FakeModel, alone

TOKENIZER = Path(__file__).resolve().parents[2] / "data" / "tokenizers" / "tiny_spm.json"
ROWS, VOCAB, END = 500, 412, 2  # the embedding is padded
DRAWN = SamplingParams(max_tokens=12, ignore_eos=True)
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }} [/] {% endfor %}"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    text = TOKENIZER.read_text(encoding="utf-8")
    artifact: Any = fake_artifact(text, TEMPLATE, vocab_size=ROWS, bos_token_id=1, eos_token_id=END)
    with Engine(artifact, open_runner=lambda _, num_pages, __: FakeModel(num_pages, ROWS), max_num_seqs=8) as engine:
        yield engine


class SlowHealing:
    """Looks at every token for each mask."""

    is_finished = False

    def __init__(self, engine: Engine, rest: bytes) -> None:
        special_ids = engine.tokenizer.profile.special_ids
        pieces = ((each, engine.tokenizer.token_bytes(each)) for each in range(VOCAB) if each not in special_ids)
        self._pieces = {each: piece for each, piece in pieces if piece}
        self._rest = rest

    def can_bring(self, rest: bytes) -> bool:
        return any(self.may_come(piece, rest) for piece in self._pieces.values())

    def may_come(self, piece: bytes, rest: bytes) -> bool:
        return piece.startswith(rest) or (rest.startswith(piece) and self.can_bring(rest[len(piece) :]))

    def mask(self) -> Int32Array | None:
        if not self._rest:
            return None
        return mask_of({each for each, piece in self._pieces.items() if self.may_come(piece, self._rest)}, VOCAB)

    def accept(self, token_id: int) -> None:
        self._rest = self._rest[len(self._pieces[token_id]) :] if self._rest else b""


@settings(deadline=None, max_examples=60)
@given(
    prompt=st.text("onceuptherwas ,.é\n", min_size=1, max_size=12),
    seed=st.integers(0, 99),
    temperature=st.sampled_from([0.0, 1.5]),
)
def test_a_healed_reply_is_that_of_the_slow_way(engine: Engine, prompt: str, seed: int, temperature: float) -> None:
    *ids, last = engine.encode(prompt)
    assume(ids)  # an only token is not healed
    params = replace(DRAWN, seed=seed, temperature=temperature)
    spelled = engine.tokenizer.token_bytes(last)
    expected = alone(ids, params, vocab_size=VOCAB, constraint=SlowHealing(engine, spelled))
    completion = engine.generate(prompt, params, token_healing=True, cache_match="exact")
    assert completion.prompt_token_ids == tuple(ids) and completion.token_ids == expected
    decoded = engine.tokenizer.decode([*ids, *expected], skip_special=True)
    assert decoded == engine.tokenizer.decode([*ids, last], skip_special=True) + completion.text
    usage = completion.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(ids), len(expected))
    assert completion.num_swallowed == len(spelled.decode(errors="replace"))


def test_the_tokens_are_found_that_looking_at_each_finds(engine: Engine) -> None:
    tokens = HealingTokens(engine.tokenizer, VOCAB)
    for token_id in range(VOCAB):
        if tokens.can_heal(token_id):
            rest = engine.tokenizer.token_bytes(token_id)
            slow, fast = SlowHealing(engine, rest).mask(), tokens.start(rest, ()).mask()
            assert slow is not None and fast is not None and slow.tolist() == fast.tolist()
            assert token_id in tokens.beginning(rest)


def test_a_prompt_that_was_healed_is_cached_and_its_reply_stays_the_same(engine: Engine) -> None:
    prompt = "once there was one who was there, and the other was not there at all, once more and th"
    params = replace(DRAWN, temperature=0.0, max_tokens=20)
    cold = engine.generate(prompt, params, token_healing=True)
    warm = engine.generate(prompt, params, token_healing=True)
    assert (warm.token_ids, warm.text) == (cold.token_ids, cold.text)
    assert warm.usage.cached_tokens == len(cold.prompt_token_ids) - 1 > cold.usage.cached_tokens
    streamed = list(engine.stream(prompt, params, token_healing=True))
    assert "".join(delta.text for delta in streamed) == cold.text


def test_healing_goes_with_banned_strings_and_min_tokens(engine: Engine) -> None:
    params = replace(DRAWN, temperature=0.0, ignore_eos=False, min_tokens=3)
    free = engine.generate("once th", params, token_healing=True)
    banned = free.text.lower()[1:3]
    completion = engine.generate("once th", replace(params, banned_strings=(banned,)), token_healing=True)
    assert banned not in completion.text.lower() and completion.text != free.text


def test_ids_are_healed_and_the_only_token_and_special_ones_are_not(engine: Engine) -> None:
    ids = engine.encode("once there")
    healed = engine.generate(ids, DRAWN, token_healing=True, cache_match="exact")  # these ids, not a reply's
    assert healed.prompt_token_ids == tuple(ids[:-1])
    for kept in (ids[1:2], [*ids, END]):
        completion = engine.generate(kept, DRAWN, token_healing=True, cache_match="exact")
        assert (completion.prompt_token_ids, completion.num_swallowed) == (tuple(kept), 0)


def test_what_is_about_the_same_token_is_refused(engine: Engine) -> None:
    for wish in (
        {"constraint": Grammar.json_object()},
        {"params": replace(DRAWN, prompt_logprobs=1)},
        {"strip_suffix": True},
    ):
        with pytest.raises(InvalidParameter, match="token_healing does not go with") as refused:
            engine.generate("once", token_healing=True, **wish)  # type: ignore[call-overload]
        assert refused.value.param == "token_healing"
    with pytest.raises(InvalidParameter, match="no conversation"):
        engine.chat([{"role": "user", "content": "Why?"}], DRAWN, token_healing=True)
