"""Of a recurrent model, what is reused ends at a state; and each reply is what the model generates alone."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest
from radixlm.runtime.cache.prefix_match import PrefixMatch
from radixlm.runtime.cache.radix_node import tokens_of
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.engine.step import drafts
from radixlm.runtime.engine.step.plan import SchedulerPolicy
from radixlm.runtime.kv_log.log import KVLog

from ..fake_model import POLICY, Bench, LetterDecoder, alone
from ..guess_oracle import Unpaid
from ..kv_log.test_kv_log import Written, replay

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
SPECULATING = replace(POLICY, speculates=True, looks_up=True)


def ids(seed: int, number: int) -> list[int]:
    return random.Random(seed).choices(range(30), k=number)


def recurrent(num_pages: int = 40, num_states: int = 24, policy: SchedulerPolicy = POLICY) -> Bench:
    return Bench(num_pages=num_pages, num_states=num_states, policy=policy)


def ask(bench: Bench, name: str, prompt: list[int], params: SamplingParams = GREEDY) -> tuple[int, ...]:
    """The reply, which is checked, computed by itself."""
    bench.add(name, prompt, params)
    bench.run()
    reply = bench.tokens(name)
    assert reply == alone(prompt, params, is_recurrent=True)
    return reply


def match(bench: Bench, prompt: list[int]) -> PrefixMatch:
    return bench.cache.match(prompt)


def computed(bench: Bench, prompt: list[int], name: str, params: SamplingParams = GREEDY) -> int:
    """How many tokens of a prompt are computed, and no reply: the last token of a reply never is."""
    before = bench.model.num_tokens
    reply = ask(bench, name, prompt, params)
    return bench.model.num_tokens - before - (len(reply) - 1)


def test_the_same_prompt_again_computes_its_last_token() -> None:
    bench, prompt = recurrent(), ids(1, 37)
    assert computed(bench, prompt, "first") == 37
    assert computed(bench, prompt, "again") == 1


def test_the_next_turn_goes_on_from_the_last_computed_token_of_the_reply() -> None:
    bench, prompt = recurrent(), ids(1, 37)
    reply = ask(bench, "first", prompt)
    assert computed(bench, [*prompt, *reply, *ids(2, 9)], "second") == 1 + 9


def test_the_second_request_with_a_shared_beginning_repairs_the_cache_for_the_third() -> None:
    bench, shared = recurrent(), ids(1, 41)
    prompts = [[*shared, 30 + seed, *ids(seed, 5)] for seed in range(3)]
    assert computed(bench, prompts[0], "first") == 47
    why = match(bench, prompts[1]).why_not_more
    assert (why.kind, why.position, str(why)) == ("no_state", 0, "no state at token 41, the nearest is at 0")
    assert computed(bench, prompts[1], "second") == 47
    assert match(bench, prompts[2]).num_tokens == 41
    assert computed(bench, prompts[2], "third") == 6


def test_of_two_requests_at_once_one_computes_what_both_share() -> None:
    bench, shared = recurrent(), ids(1, 32)
    for name in "ab":
        bench.add(name, [*shared, *ids(ord(name), 6)], GREEDY)
    bench.run()
    for name in "ab":
        assert bench.tokens(name) == alone([*shared, *ids(ord(name), 6)], GREEDY, is_recurrent=True)
    assert bench.model.num_tokens == 32 + 2 * 6 + 2 * 5


def test_without_states_for_snapshots_all_is_computed_again() -> None:
    bench, prompt = recurrent(num_states=3), ids(1, 37)
    ask(bench, "first", prompt)
    for seed in range(2, 5):
        ask(bench, f"other {seed}", ids(seed, 20))
    assert match(bench, prompt).num_tokens == 0
    assert computed(bench, prompt, "again") == 37


def test_a_snapshot_leaves_with_its_pages() -> None:
    bench, prompt = recurrent(), ids(1, 37)
    ask(bench, "first", prompt)
    assert bench.cache.states is not None and bench.cache.states.num_snapshots == 2
    bench.cache.clear(b"")
    assert bench.cache.states.num_snapshots == 0 and bench.cache.states.num_free == 23


def test_a_pop_of_computed_tokens_is_replayed_from_the_last_state() -> None:
    bench, prompt = recurrent(), ids(1, 37)
    request = bench.add("first", prompt, replace(GREEDY, max_tokens=12))
    while request.num_generated < 6:
        bench.step()
    sequence, before = request.admitted, bench.model.num_tokens
    tokens = list(sequence.token_ids[-3:])
    sequence.pop(3)
    assert (sequence.num_computed, len(sequence.page_ids)) == (36, 3)
    sequence.append(tokens)
    bench.run()
    assert bench.tokens("first") == alone(prompt, replace(GREEDY, max_tokens=12), is_recurrent=True)
    assert bench.model.num_tokens - before == 1 + 6 + 5  # the prompt's last token, the reply so far, what follows


def test_a_fork_shares_the_state_or_computes_its_own() -> None:
    bench, prompt = recurrent(), ids(1, 37)
    request = bench.add("first", prompt, replace(GREEDY, max_tokens=12))
    while request.num_generated < 3:
        bench.step()
    sequence = request.admitted
    whole = bench.cache.fork(sequence, sequence.num_computed)
    assert whole.state.slot == sequence.state.slot and whole.num_computed == sequence.num_computed
    part = bench.cache.fork(sequence, 36)
    assert part.num_computed == 36 and bench.cache.fork(sequence, 35).num_computed == 0
    bench.cache.check()
    for fork in list(bench.cache.sequences)[1:]:
        bench.cache.close(fork)
    bench.run()


def test_a_prompt_whose_last_message_changes_goes_on_from_where_it_begins() -> None:
    bench = recurrent()
    assert bench.cache.states is not None
    bench.cache.states.special_ids = (30, 31)
    history, seam = ids(1, 33), [30, 1, 31]
    last, other = ids(2, 12), ids(3, 12)
    ask(bench, "first", [*history, *seam, *last, *seam, 5])
    assert computed(bench, [*history, *seam, *other, *seam, 5], "second") == 12 + 4


def test_a_step_that_fails_changes_no_state() -> None:
    bench, prompt = recurrent(), ids(1, 37)
    ask(bench, "first", prompt)

    def fail(batch: object) -> None:
        raise RuntimeError("no")

    bench.model.before = fail
    bench.add("fails", [*prompt, 1, 2, 3], GREEDY)
    bench.run()
    assert bench.error("fails")
    bench.model.before = lambda batch: None
    assert computed(bench, [*prompt, 1, 2, 3], "again") <= 4


@pytest.mark.parametrize("seed", range(12))
def test_random_talks_over_small_pools_get_what_the_model_generates_alone(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafts, "Drafter", Unpaid)  # most guesses are wrong
    chance = random.Random(seed)
    policy = chance.choice((POLICY, SPECULATING))
    written = Written()
    num_pages, num_states = chance.choice((8, 12, 30)), chance.choice((4, 6, 12, 30))
    bench = Bench(num_pages=num_pages, num_states=num_states, policy=policy, kv_log=KVLog(written))
    talks: list[list[int]] = [ids(9, 20)]
    asked: dict[str, tuple[list[int], SamplingParams]] = {}
    for number in range(30):
        history = chance.choice(talks)
        history = history[: chance.choice((len(history), len(history), chance.randrange(1, len(history) + 1)))]
        prompt = [*history, *chance.choices(range(chance.choice((2, 30))), k=chance.randrange(1, 12))][:70]
        params = SamplingParams(
            temperature=chance.choice((0.0, 1.0)), seed=number, max_tokens=chance.randrange(1, 20), ignore_eos=True
        )
        name = str(number)
        bench.add(name, prompt, params)
        asked[name] = prompt, params
        for _ in range(chance.randrange(6)):
            bench.step()
        if chance.random() < 0.2:
            bench.abort(name)
            asked.pop(name)
        elif chance.random() < 0.5:
            bench.run()
            talks.append([*prompt, *bench.tokens(name)][:90])
    bench.run()
    replay(written, bench.cache)
    for name, (prompt, params) in asked.items():
        assert bench.tokens(name) == alone(prompt, params, is_recurrent=True), name
    assert bench.cache.states is not None and bench.cache.states.num_in_use == 0


def test_usage_is_what_was_reused_where_admitting_one_request_evicts_the_state_of_another() -> None:
    policy, params = replace(POLICY, max_num_batched_tokens=200), replace(GREEDY, max_tokens=1)
    for seed in range(30):
        chance = random.Random(seed)
        bench = recurrent(num_pages=90, num_states=chance.randrange(8, 17), policy=policy)
        texts = [ids(chance.randrange(2), 40)[: chance.randrange(8, 41)] for _ in range(12)]
        for number, text in enumerate(texts):
            ask(bench, f"first {number}", text, params)
        before = bench.model.num_tokens
        for number, text in enumerate(texts):  # a step admits several
            bench.add(f"again {number}", [*text, 30 + number % 8], params)
        bench.run()
        told = 0
        for number in range(len(texts)):
            completion = bench.outputs[f"again {number}"][-1].completion
            assert completion is not None
            told += completion.usage.prompt_tokens - completion.usage.cached_tokens
        assert bench.model.num_tokens - before == told, seed


def test_a_match_is_outdated_when_all_starts_over() -> None:
    bench, prompt = recurrent(), ids(1, 37)
    ask(bench, "first", prompt)
    before = match(bench, prompt)
    assert before.num_tokens == 36
    bench.cache.start_over()
    assert match(bench, prompt).version > before.version


def test_a_snapshot_leaves_with_the_tail_that_its_tokens_end_in() -> None:
    bench, shared = recurrent(), ids(1, 16)
    assert bench.cache.states is not None
    params = replace(GREEDY, max_tokens=1)
    ask(bench, "forgotten", [*shared, 30, 31, 32, 33], params)
    later = time.monotonic()
    ask(bench, "kept", [*shared, 34, 35], params)
    bench.cache.drop_unused(later)
    assert match(bench, [*shared, 34, 35, 36]).num_tokens == 18
    places = [(snapshot.place, tokens_of(snapshot.rows)) for snapshot in bench.cache.states._snapshots.values()]
    assert {rows for _, rows in places} == {(), (34,), (34, 35)}


def test_a_request_that_fails_leaves_no_snapshot_of_what_is_not_shared() -> None:
    class Broken(LetterDecoder):
        def push(self, token_id: int) -> str:
            raise RuntimeError("no")

    bench, prompt = recurrent(), ids(1, 37)
    bench.add("fails", prompt, GREEDY, decoder=Broken())
    bench.run()
    assert bench.error("fails") and bench.cache.states is not None
    assert match(bench, prompt).why_not_more.num_with_kv == 32
    assert bench.cache.states.num_snapshots == 0
