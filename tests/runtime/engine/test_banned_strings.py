"""A reply without banned strings: the tokens that a slow engine chooses which begins again for each token, with what
led to a banned string known. Nothing that was taken back is found in the cache."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from radixlm.runtime import Engine
from radixlm.runtime.chat.text_rules.reply_text import Stops
from radixlm.runtime.chat.text_rules.text_search import TokenTexts
from radixlm.runtime.chat.token_constraint import TokenConstraint
from radixlm.runtime.engine import reply
from radixlm.runtime.engine.completion import Completion
from radixlm.runtime.engine.reply import MAX_BANS, Reply
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.engine.step import drafts, readers
from radixlm.runtime.engine.step.sampler import SampledToken, sample
from radixlm.runtime.engine.step.sampler_state import SamplerState
from radixlm.runtime.errors import ConstraintFailed, InvalidParameter
from radixlm.runtime.kv_log.log import KVLog
from radixlm.runtime.kv_log.replay import KVReplay
from radixlm.runtime.model.batch import Batch
from radixlm.tokenizer_fix import Tokenizer
from radixlm.tokenizer_fix.stream_decoder import StreamDecoder

from ..fake_constraint import ChainConstraint
from ..fake_model import CONTEXT_LENGTH, EOS, POLICY, VOCAB_SIZE, Bench, alone, digest, logits_of, text_of, top_of
from .test_speculation import Oracle

LETTERS = [chr(ord("A") + token_id).encode() for token_id in range(VOCAB_SIZE)]
# parts of characters, several characters in a token, no text at all
PIECES = [
    [b"a", b"b", b"ab", b"ba", b"\xc3", b"\xa9", b"c\xc3", b"\xa9d", b"", b"cab"][number % 10] for number in range(40)
]


def decoder(spells: Sequence[bytes]) -> StreamDecoder:
    return StreamDecoder(spells.__getitem__, skipped_ids=(), strips_leading_space=False, replace_each_byte=False)


def decoded(token_ids: Sequence[int], spells: Sequence[bytes], *, is_end: bool) -> str:
    open_end = decoder(spells)
    text = "".join(map(open_end.push, token_ids))
    return text + open_end.finish() if is_end else text


def first_banned(text: str, banned: Sequence[str]) -> int | None:
    """Where the banned string begins that is complete first, the longest of those."""
    text = text.lower()
    for end in range(1, len(text) + 1):
        starts = [end - len(each) for each in banned if text[:end].endswith(each.lower())]
        if starts:
            return min(starts)
    return None


def slow(
    prompt: Sequence[int],
    params: SamplingParams,
    spells: Sequence[bytes] = LETTERS,
    constraint: Callable[[], TokenConstraint] | None = None,
) -> tuple[tuple[int, ...], str, list[SampledToken]]:
    """Ids and text of a reply; all of it is computed anew for each token."""
    free = replace(params, banned_strings=())
    chosen: list[SampledToken] = []
    bans: dict[int, set[int]] = {}
    stop_ids = {*params.stop_token_ids, *([] if params.ignore_eos else [EOS])}
    while True:
        state = SamplerState(free, prompt, VOCAB_SIZE, None if constraint is None else constraint())
        for token in chosen:
            state.record(token.token_id)
            if not params.greedy:
                state.uniform()
        state.banned_ids = np.array(sorted(bans.get(len(chosen), ())), np.intp)
        logits = logits_of(_digest_of([*prompt, *(token.token_id for token in chosen)]))[None]
        sampled = sample(logits, top_of(logits), [state])[0]
        assert isinstance(sampled, SampledToken)
        state.record(sampled.token_id)
        chosen.append(sampled)
        ids = [token.token_id for token in chosen]
        is_finished = state.constraint is not None and state.constraint.is_finished
        is_end = ids[-1] in stop_ids or len(ids) == params.max_tokens or is_finished
        said = ids[:-1] if ids[-1] in stop_ids else ids
        stops = Stops(params.stop, params.stop_regex)
        text = stops.push(decoded(said, spells, is_end=is_end))
        is_end = is_end or stops.matched is not None
        text += stops.finish() if is_end else ""
        start = first_banned(text, params.banned_strings)
        if start is None and is_end:
            return tuple(ids), text, chosen
        if start is not None:
            reaches = [len(decoded(ids[: number + 1], spells, is_end=True)) for number in range(len(ids))]
            place = next(number for number in range(len(ids)) if min(reaches[number:]) > start)
            bans = {at: banned for at, banned in bans.items() if at <= place}
            bans.setdefault(place, set()).add(ids[place])
            del chosen[place:]


def _digest_of(token_ids: Sequence[int]) -> int:
    rows = np.zeros(0, np.uint64)
    for position, token_id in enumerate(token_ids):
        rows = np.append(rows, np.uint64(digest(rows, token_id, position)))
    return int(rows[-1])


def banned_of(text: str, chance: random.Random, number: int) -> tuple[str, ...]:
    """Strings that a text has, in any case, or nearly has."""
    strings = []
    for _ in range(number):
        start = chance.randrange(max(1, len(text) - 1))
        string = text[start : start + chance.randrange(1, 5)] or "A"
        strings.append(chance.choice([string, string.lower(), string.upper(), string + chance.choice(text or "A")]))
    return tuple(strings)


def served(params: SamplingParams, prompt: Sequence[int] = range(9), **wishes: Any) -> tuple[Bench, Completion]:
    bench = Bench()
    bench.add("a", prompt, params, **wishes)
    bench.run()
    bench.tokens("a")
    completion = bench.outputs["a"][-1].completion
    assert completion is not None
    return bench, completion


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    temperature=st.sampled_from([0.0, 1.0]),
    number=st.integers(1, 5),
    pieces=st.booleans(),
    wishes=st.sampled_from(
        [
            {},
            {"presence_penalty": 1.5, "repetition_penalty": 1.3, "frequency_penalty": 0.3},
            {"top_k": 5, "logprobs": 2},
            {"top_p": 0.9, "min_p": 0.02},
            {"ignore_eos": True, "logprobs": 0},
        ]
    ),
    with_stop=st.booleans(),
    is_held=st.booleans(),
)
@example(0, 0.0, 3, True, {}, True, False)
def test_a_reply_is_that_of_the_slow_engine(
    seed: int, temperature: float, number: int, pieces: bool, wishes: dict[str, Any], with_stop: bool, is_held: bool
) -> None:
    chance, spells = random.Random(seed), PIECES if pieces else LETTERS
    prompt = [chance.randrange(VOCAB_SIZE) for _ in range(chance.randrange(1, 40))]
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=24, **wishes)
    text = decoded(alone(prompt, params), spells, is_end=True)
    stop = banned_of(text, chance, 2) if with_stop else ()
    params = replace(params, banned_strings=banned_of(text, chance, number), stop=stop)
    constraint = (lambda: Rewindable(VOCAB_SIZE, num_tokens=20)) if is_held else None
    try:
        ids, text, chosen = slow(prompt, params, spells, constraint)
    except AssertionError:  # all tokens that may come are banned
        return
    held = None if constraint is None else constraint()
    bench, completion = served(params, prompt, decoder=decoder(spells), constraint=held)
    assert (completion.token_ids, completion.text) == (ids, text)
    assert first_banned(completion.text, params.banned_strings) is None
    assert completion.usage.completion_tokens == len(ids)
    if params.logprobs is not None:
        assert completion.logprobs == tuple(token.logprob for token in chosen)
    counted = bench.core.counters.num_generated_tokens
    assert counted == len(ids)


class Rewindable(ChainConstraint):
    def state(self) -> int:
        return len(self.seen)

    def restore(self, state: int) -> None:
        del self.seen[state:]


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    num_pages=st.sampled_from([8, 12, 40]),
    right=st.sampled_from([None, 0.0, 0.6, 1.0]),
    max_tries=st.sampled_from([1, 2, readers.MAX_TRIES]),
)
def test_random_requests_are_served_as_by_the_slow_engine(
    seed: int, num_pages: int, right: float | None, max_tries: int
) -> None:
    """Together with others, with drafts, preempted, cancelled, and in several steps where a token is taken back; the
    log of pages is replayed, and agrees."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "MAX_TRIES", max_tries)
        patch.setattr(drafts, "Drafter", Oracle)
        chance = random.Random(seed)
        Oracle.replies, Oracle.right, Oracle.chance = {}, right or 0.0, random.Random(seed + 1)
        lines = io.StringIO()
        policy = replace(POLICY, speculates=right is not None)
        bench = Bench(num_pages, policy=policy, kv_log=KVLog(lines))
        prompts = [[chance.randrange(37) for _ in range(chance.randrange(1, 60))]]
        expected: dict[str, tuple[int, ...]] = {}
        for number in range(8):
            base = chance.choice(prompts)
            new = [chance.randrange(37) for _ in range(chance.randrange(9))]
            ids = [*base[: chance.randrange(1, len(base) + 1)], *new][: CONTEXT_LENGTH - 24]
            greedy, name = chance.random() < 0.5, str(number)
            params = SamplingParams(temperature=0.0 if greedy else 1.0, seed=number, max_tokens=chance.randrange(1, 24))
            params = replace(params, banned_strings=banned_of(text_of(alone(ids, params)), chance, 3))
            expected[name], _, _ = slow(ids, params)
            Oracle.replies[tuple(ids)] = expected[name]
            bench.add(name, ids, params, chance.choice([b"", b"other", None]))
            prompts.append([*ids, *expected[name][: chance.randrange(len(expected[name]) + 1)]])
            for _ in range(chance.randrange(6)):
                bench.step()
            if chance.random() < 0.2:
                bench.abort(name)
                bench.tokens(name)
                cancelled = bench.outputs[name][-1].completion
                assert cancelled is not None and first_banned(cancelled.text, params.banned_strings) is None
                del expected[name]
        bench.run()
        for name, tokens in expected.items():
            assert bench.tokens(name) == tokens
        replayed = KVReplay()
        replayed.run(lines.getvalue().encode().splitlines(keepends=True))
        assert replayed.owners.tree == set(bench.cache.tree.page_ids())


@pytest.mark.parametrize("right", [None, 0.0, 1.0])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_that_was_taken_back_is_ever_found(
    monkeypatch: pytest.MonkeyPatch, temperature: float, right: float | None
) -> None:
    """After each step and at the end, for each chain of tokens that was ever taken back; one fills two pages."""
    prompt = list(range(9))
    popped: list[tuple[int, ...]] = []
    take_back = Reply._take_back

    def noted(self: Reply, start: int) -> None:
        popped.append((*prompt, *self.token_ids))
        take_back(self, start)

    monkeypatch.setattr(Reply, "_take_back", noted)
    monkeypatch.setattr(drafts, "Drafter", Oracle)
    Oracle.right, Oracle.chance = right or 0.0, random.Random(1)
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=60, ignore_eos=True)
    free = alone(prompt, params)
    params = replace(params, banned_strings=(text_of(free[3:43]), text_of(free[5:9])[::-1] + "zz"))
    ids, _, _ = slow(prompt, params)
    Oracle.replies = {tuple(prompt): [*free[:43], *ids[43:]]}
    bench = Bench(policy=replace(POLICY, speculates=right is not None))
    request = bench.add("a", prompt, params)
    while bench.core.has_work:
        bench.step()
        if not request.is_finished:
            _require_unseen(bench, popped, request.admitted.token_ids)
    assert bench.tokens("a") == ids
    _require_unseen(bench, popped, [*prompt, *ids])
    assert max(map(len, popped)) >= len(prompt) + 40, "a string over two pages was taken back"
    assert bench.cache.tree.find(b"", [*prompt, *ids, 1]).num_tokens == len(prompt) + len(ids) - 1


def _require_unseen(bench: Bench, popped: Sequence[Sequence[int]], real: Sequence[int]) -> None:
    for chain in popped:
        pairs = zip(chain, real, strict=False)
        num_common = next((number for number, (a, b) in enumerate(pairs) if a != b), min(len(chain), len(real)))
        assert bench.cache.tree.find(b"", chain).num_tokens <= num_common


def test_a_stream_holds_back_what_may_become_banned_with_its_ids_and_logprobs() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=1)
    free = alone(range(9), params)
    string = text_of(free[4:8]) + "?"  # is never complete
    bench, completion = served(replace(params, banned_strings=(string.lower(),)))
    assert completion.token_ids == free
    deltas = [output.delta for output in bench.outputs["a"] if output.delta is not None]
    assert [len(delta.token_ids) for delta in deltas[:6]] == [1, 1, 1, 1, 5, 1]
    for delta in deltas:
        assert delta.text == text_of(delta.token_ids)
        assert delta.logprobs is not None and [each.token_id for each in delta.logprobs] == list(delta.token_ids)


def test_the_first_token_may_be_taken_back() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    free = alone(range(9), params)
    banned = (text_of(free[:1]),)
    _, completion = served(replace(params, banned_strings=banned))
    assert completion.token_ids == slow(range(9), replace(params, banned_strings=banned))[0]
    assert free[0] not in completion.token_ids


def test_the_end_of_a_reply_is_taken_back_where_it_would_let_a_banned_string_out() -> None:
    """The stop holds it back until no more text comes."""
    params = SamplingParams(seed=5, max_tokens=12, ignore_eos=True)
    free = alone(range(9), params)
    string = text_of(free[9:12])
    params = replace(params, banned_strings=(string,), stop=(string + "!",))
    _, completion = served(params)
    assert (completion.token_ids, completion.text) == slow(range(9), params)[:2]
    assert completion.token_ids[:9] == free[:9] and completion.token_ids[9] != free[9]


def test_a_cancelled_reply_ends_before_a_banned_string() -> None:
    params = SamplingParams(seed=5, max_tokens=30, ignore_eos=True)
    free = alone(range(9), params)
    string = text_of(free[9:12])
    bench = Bench()
    bench.add("a", range(9), replace(params, banned_strings=(string,), stop=(string + "!",)))
    while bench.requests["a"].num_generated < 12:
        bench.step()
    bench.abort("a")
    completion = bench.outputs["a"][-1].completion
    assert completion is not None and bench.tokens("a") == free[:9]
    assert (completion.text, completion.usage.completion_tokens) == (text_of(free[:9]), 9)
    assert bench.cache.tree.find(b"", [*range(9), *free]).num_tokens == 9 + 9


def test_a_reply_whose_every_token_is_banned_fails_alone() -> None:
    params = SamplingParams(seed=5, max_tokens=10, ignore_eos=True, banned_strings=tuple(map(chr, range(65, 105))))
    bench = Bench()
    bench.add("a", range(9), params)
    bench.add("b", range(9), replace(params, banned_strings=()))
    bench.run()
    error = bench.error("a")
    assert isinstance(error, ConstraintFailed) and "ban fewer strings" in str(error)
    assert bench.tokens("b") == alone(range(9), replace(params, banned_strings=()))


def test_a_step_tries_few_tokens_of_a_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    """All were tried in one step, for which everybody waited: 3,618 tokens in 3.75 s with 60 banned letters."""
    tries: list[int] = []
    sample_row = readers.sample_row

    def counted(*arguments: Any) -> Any:
        tries[-1] += 1
        return sample_row(*arguments)

    monkeypatch.setattr(readers, "sample_row", counted)
    banned = tuple(letter.decode() for letter in LETTERS[: VOCAB_SIZE // 2])
    bench = Bench(40)
    bench.add("a", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=8, banned_strings=banned))
    for _ in range(80):
        tries.append(0)
        bench.step()
    assert len(bench.tokens("a")) == 8
    assert sum(tries) > readers.MAX_TRIES and max(tries) <= readers.MAX_TRIES


def test_so_many_bans_at_one_place_end_a_reply() -> None:
    vocab_size = 4 * MAX_BANS
    letters = [chr(0x100 + number) for number in range(vocab_size)]
    spells = [letter.encode() for letter in letters]
    params = SamplingParams(temperature=0.0, max_tokens=10, banned_strings=tuple(letters))
    bench = Bench(vocab_size=vocab_size)
    bench.add("a", range(9), params, decoder=decoder(spells))
    bench.run()
    assert f"{MAX_BANS} tokens led to a banned string" in str(bench.error("a"))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_that_hold_a_banned_string_go_at_once_where_too_many_would_be_tried(
    tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """A lone space was "fewer strings" than could be banned."""
    monkeypatch.setattr(reply, "MAX_BANS", 2)
    with Engine(tiny_artifact, kv_cache_bytes=4 << 20, num_threads=1) as engine:
        spell, special_ids = engine.tokenizer.token_bytes, engine.tokenizer.profile.special_ids
        banned = [" ", "E", "in"]
        texts = {
            each: spell(each).decode(errors="replace").lower()
            for each in range(engine.prompts.vocab_size)
            if each not in special_ids
        }
        holders = [each for each, text in texts.items() if any(string.lower() in text for string in banned)]
        params = SamplingParams(temperature=temperature, seed=1, max_tokens=200, ignore_eos=True)
        bias = replace(params, logit_bias=dict.fromkeys(holders, 60.0))
        likely = engine.generate("the cat", replace(bias, max_tokens=20))
        assert set(likely.token_ids) <= set(holders), "these tokens are the likeliest in each place"
        completion = engine.generate("the cat", replace(bias, banned_strings=tuple(banned)))
        assert len(completion.token_ids) == 200
        assert first_banned(completion.text, banned) is None
        if temperature == 0.0:
            never = replace(params, logit_bias=dict.fromkeys(holders, -100.0))
            assert completion.token_ids == engine.generate("the cat", never).token_ids


@given(strings=st.lists(st.text(st.sampled_from("ehtTHE aé"), min_size=1, max_size=3), min_size=1, max_size=5))
def test_the_tokens_that_hold_a_string_are_those_whose_text_has_it(strings: list[str]) -> None:
    pieces = [*PIECES, b"The", b" the", "É".encode(), b"heh", b"HEHE", "aé".encode(), b"special"]

    class Spelled:
        profile = SimpleNamespace(special_ids=frozenset([len(pieces) - 1]))
        token_bytes = staticmethod(pieces.__getitem__)

    texts = TokenTexts(cast(Tokenizer, Spelled()), len(pieces))
    for string in strings:
        expected = [
            number
            for number, piece in enumerate(pieces[:-1])
            if string.lower() in piece.decode(errors="replace").lower()
        ]
        assert texts.holding(string).tolist() == expected


def test_a_constraint_that_cannot_go_back_is_refused_beside_banned_strings() -> None:
    with pytest.raises(InvalidParameter, match="ChainConstraint cannot") as refused:
        Bench().request("a", [1], SamplingParams(banned_strings=("a",)), constraint=ChainConstraint(VOCAB_SIZE))
    assert refused.value.param == "banned_strings"


def test_logits_that_are_not_finite_within_a_draft_fail_their_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a reply with banned strings is sure of was settled, although its sequence had lost the draft."""
    monkeypatch.setattr(drafts, "Drafter", Oracle)
    Oracle.right, Oracle.chance = 1.0, random.Random(1)
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, banned_strings=("zzqq",))
    prompt, other = [5] * 20, [6] * 20
    expected = alone(prompt, replace(params, banned_strings=()))
    Oracle.replies = {tuple(prompt): expected}
    bench = Bench(policy=replace(POLICY, speculates=True))
    num_damaged = 0

    def damage(batch: Batch, logits: np.ndarray) -> None:
        nonlocal num_damaged
        if len(logits) > 6 and num_damaged < 1:
            num_damaged += 1
            logits[-1, 7] = np.nan

    bench.model.after = damage
    bench.add("a", prompt, params)
    bench.run()
    assert num_damaged and "not finite" in str(bench.error("a"))
    bench.add("again", prompt, params)
    bench.add("other", other, params)
    bench.run()
    assert bench.tokens("again") == expected
    assert bench.tokens("other") == alone(other, replace(params, banned_strings=()))


def test_a_request_whose_tokens_cannot_be_handed_out_fails_alone() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    bench = Bench()
    broken = bench.add("broken", [5] * 20, params)
    bench.add("other", [6] * 20, params)

    class Odd(type(broken)):  # type: ignore[misc]
        num_certain = property(lambda self: 1 // 0)

    broken.__class__ = Odd
    bench.run()
    assert "ZeroDivisionError" in str(bench.error("broken"))
    assert bench.tokens("other") == alone([6] * 20, params)
