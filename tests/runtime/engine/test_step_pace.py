"""A long prompt delays no other request for long: what a step computes of prompts is limited by measured time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from radixlm.runtime.cache.page_pool import PagePool
from radixlm.runtime.cache.prefix_cache import PrefixCache
from radixlm.runtime.engine.reply import Reply
from radixlm.runtime.engine.request import Request
from radixlm.runtime.engine.request_options import RequestSpec
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.engine.scheduler import Scheduler
from radixlm.runtime.engine.step import prompt_cost
from radixlm.runtime.engine.step.pace import ALONE_S, StepPace
from radixlm.runtime.engine.step.plan import SchedulerPolicy

from ..fake_model import VOCAB_SIZE, LetterDecoder, generate_one, prompt

CONTEXT = 16_384
LONG = 16_000
STREAM_S, TOKEN_S, POSITION_S = (
    0.008,
    0.0003,
    2.5e-7,
)  # a step that decodes, a token of a prompt, each token before it


@dataclass
class Machine:
    """A scheduler whose steps take what a model's would, by a clock of its own."""

    limit_s: float | None = 0.05
    fixed_s: float = 0.0  # of each step
    token_s: float = TOKEN_S
    position_s: float = POSITION_S
    stream_s: float = STREAM_S  # of each step that decodes
    stream_row_s: float = 0.0  # of each token that is decoded
    least_s: float = 0.0  # of each step: meanwhile the weights are read
    between_s: float = 0.0  # two steps
    now: float = 0.0
    first_tokens: dict[str, float] = field(default_factory=dict)  # seconds after the request came
    num_tokens: dict[str, int] = field(default_factory=dict)
    steps: list[tuple[dict[str, int], float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cache = PrefixCache(PagePool(6 * CONTEXT // 16))
        policy = SchedulerPolicy(max_num_batched_tokens=512, prompts_s=self.limit_s)
        self.scheduler = Scheduler(self.cache, policy, context_length=CONTEXT)

    def add(self, name: str, num_tokens: int) -> None:
        params = SamplingParams(temperature=0.0)
        ids = [3 + sum(name.encode()) % 20] * num_tokens
        reply = Reply(params, ids, decoder=LetterDecoder(), vocab_size=VOCAB_SIZE)
        self.scheduler.add(Request(RequestSpec(name, prompt(ids), params, arrived_at=self.now), reply))
        self.num_tokens[name] = 0

    def finish(self, name: str) -> None:
        self.cache.close(self.scheduler.remove(name).admitted, keep=False)

    def step(self) -> None:
        with self.cache.begin() as step:
            plan = self.scheduler.schedule(step, self.now)
            self.now += self.between_s
            seconds = self.fixed_s
            for reservation in [item.reservation for item in plan.scheduled]:
                if reservation.num_tokens > 1:
                    middle = (reservation.start + reservation.stop) / 2
                    seconds += reservation.num_tokens * (self.token_s + self.position_s * middle)
            num_streams = sum(item.reservation.num_tokens == 1 for item in plan.scheduled)
            seconds += self.stream_s * bool(num_streams) + self.stream_row_s * num_streams
            seconds = max(seconds, self.least_s)
            step.commit()
        assert plan.scheduled, "an empty step"
        self.now += seconds
        self.scheduler.observe(plan, seconds)
        self.steps.append(({item.request.request_id: item.reservation.num_tokens for item in plan.scheduled}, seconds))
        for item in plan.scheduled:
            if item.samples:
                request = item.request
                self.first_tokens.setdefault(request.request_id, self.now - request.spec.arrived_at)
                self.num_tokens[request.request_id] += 1
                generate_one(request, self.now)

    def run_until_first_token(self, name: str) -> float:
        while name not in self.first_tokens:
            self.step()
        return self.first_tokens[name]


def machine_of(row_s: float, fixed_rows: int) -> Machine:
    """A machine whose steps cost `row_s` for each row, and as much as `fixed_rows` rows besides."""
    return Machine(
        fixed_s=fixed_rows * row_s, token_s=row_s, position_s=0.0, stream_s=0.0, stream_row_s=row_s, between_s=0.0
    )


def alone_s(num_tokens: int) -> float:
    machine = Machine()
    machine.add("long", num_tokens)
    return machine.run_until_first_token("long")


def test_a_short_request_has_its_first_token_soon_beside_a_prompt_of_16000_tokens() -> None:
    machine = Machine()
    machine.add("long", 16_000)
    while machine.now < 20.0:
        machine.step()
    machine.add("short", 200)
    assert machine.run_until_first_token("short") < 1.0
    machine.finish("short")
    assert machine.run_until_first_token("long") < 1.1 * alone_s(16_000)


def test_without_measured_time_a_short_request_waited_for_the_whole_long_prompt() -> None:
    machine = Machine(limit_s=None)
    machine.add("long", 16_000)
    machine.step()
    machine.add("short", 200)
    assert machine.run_until_first_token("short") > 10.0


def test_streams_keep_half_of_their_speed_and_the_long_prompt_takes_about_twice_as_long() -> None:
    machine = Machine()
    machine.add("stream", 100)
    for _ in range(20):
        machine.step()
    machine.add("long", LONG)
    began, generated = machine.now, machine.num_tokens["stream"]
    machine.run_until_first_token("long")
    took = machine.now - began
    num_alone = took / STREAM_S
    assert machine.num_tokens["stream"] - generated >= 0.5 * num_alone
    assert took < 2.2 * alone_s(LONG)


def test_what_passes_between_steps_counts_where_streams_and_a_long_prompt_share() -> None:
    """Short steps of a stream seemed to take half of what they took: a long prompt took 2.6 times its time."""
    machine = Machine(between_s=0.006)
    machine.add("stream", 100)
    for _ in range(20):
        machine.step()
    machine.add("long", LONG)
    began, generated = machine.now, machine.num_tokens["stream"]
    machine.run_until_first_token("long")
    share = (machine.num_tokens["stream"] - generated) * (STREAM_S + 0.006) / (machine.now - began)
    assert 0.5 <= share < 0.54


def test_a_short_request_has_its_first_token_soon_beside_a_long_prompt_and_a_stream() -> None:
    """What streams were owed of the long prompt left it eight tokens a step."""
    machine = Machine(fixed_s=0.012)
    machine.add("stream", 100)
    for _ in range(20):
        machine.step()
    machine.add("long", LONG)
    for number in range(20):
        later = machine.now + 2.0
        while machine.now < later:
            machine.step()
        machine.add(f"short {number}", 600)
        assert machine.run_until_first_token(f"short {number}") < 0.5
        machine.finish(f"short {number}")
    assert "long" not in machine.first_tokens


def test_many_short_prompts_are_computed_together_before_streams_have_their_half() -> None:
    machine = Machine()
    machine.add("warm up", 512)
    machine.step()
    for number in range(20):
        machine.add(f"{number}", 100)
    while len(machine.first_tokens) < 21:
        machine.step()
    prompts = [seconds for shares, seconds in machine.steps if any(count > 1 for count in shares.values())]
    assert len(prompts) < 12 and max(prompts) < ALONE_S + STREAM_S + 0.01


def test_short_prompts_that_wait_beside_a_long_one_do_not_make_its_part_longer() -> None:
    machine = Machine()
    machine.add("long", 8_000)
    for _ in range(3):
        machine.step()
    for number in range(20):
        machine.add(f"{number}", 100)
    while len(machine.first_tokens) < 20:
        machine.step()
        shares, seconds = machine.steps[-1]
        assert shares.get("long", 0) * TOKEN_S < 0.05 + 0.001 and seconds < ALONE_S + STREAM_S + 0.01
    assert machine.now < 3 * 20 * 100 * TOKEN_S


def test_many_long_prompts_together_take_no_more_of_a_step_than_one() -> None:
    machine = Machine()
    machine.add("warm up", 512)
    machine.step()
    for number in range(8):
        machine.add(f"{number}", 2_000)
    for _ in range(40):
        machine.step()
    assert max(seconds for _, seconds in machine.steps[12:]) < 0.05 + STREAM_S + 8 * 8 * 2 * TOKEN_S


def test_two_long_prompts_share_and_the_oldest_has_half() -> None:
    machine = Machine()
    machine.add("old", 8_000)
    for _ in range(3):
        machine.step()
    machine.add("new", 8_000)
    machine.add("newer", 6_000)
    for _ in range(12):
        machine.step()
    shares, seconds = machine.steps[-1]
    assert set(shares) == {"old", "new", "newer"} and seconds < 0.06
    assert shares["old"] * (TOKEN_S + POSITION_S * 1500) == pytest.approx(0.025, rel=0.3)


def test_a_prompt_that_is_alone_lets_the_next_request_in_within_a_quarter_of_a_second() -> None:
    machine = Machine()
    machine.add("long", 16_000)
    machine.run_until_first_token("long")
    assert max(seconds for _, seconds in machine.steps[1:]) < 1.3 * ALONE_S


def test_parts_far_behind_a_prompts_beginning_are_not_so_small_that_they_cost_more() -> None:
    """Beside a stream a prompt of 16,000 tokens took 2.33 times as long as alone: 27 tokens a step cost 20 % more."""
    machine = Machine()
    machine.add("stream", 100)
    machine.add("long", 16_000)
    machine.run_until_first_token("long")
    parts = [(shares["long"], seconds) for shares, seconds in machine.steps if "long" in shares]
    assert all(num_tokens == 64 and seconds < 0.3 for num_tokens, seconds in parts[-40:-1])
    pace = StepPace(0.05)
    pace.observe(num_streams=0, chunks=[(8000, 8064)], seconds=0.02 * 64)
    assert pace.num_tokens(8000, 0.05) == 20, "a slow machine takes eight times the limit, and no longer"


def test_the_first_step_is_short_for_nobody_knows_how_slow_the_model_is() -> None:
    machine = Machine()
    machine.add("long", 16_000)
    machine.step()
    assert machine.steps[0][0] == {"long": 64}


def test_a_stream_that_comes_after_long_prompts_owes_nothing_for_them() -> None:
    pace = StepPace(0.05)
    for _ in range(100):
        pace.observe(num_streams=1, chunks=[(0, 100)], seconds=0.05)
    assert pace.prompts_s(num_streams=1, has_others=True) == 0.0
    pace.observe(num_streams=0, chunks=[(0, 100)], seconds=0.05)
    assert pace.prompts_s(num_streams=1, has_others=True) == 0.05


def test_one_slow_step_is_soon_forgotten() -> None:
    pace = StepPace(0.05)
    pace.observe(num_streams=0, chunks=[(0, 512)], seconds=0.15)
    usual = pace.num_tokens(0, 0.05)
    pace.observe(num_streams=0, chunks=[(0, 512)], seconds=5.0)  # the machine was busy elsewhere
    assert pace.num_tokens(0, 0.05) < usual / 4
    for _ in range(60):
        chunk = pace.num_tokens(0, 0.05)
        pace.observe(num_streams=0, chunks=[(0, chunk)], seconds=0.15 / 512 * chunk)
    assert pace.num_tokens(0, 0.05) > 0.8 * usual


def test_one_slow_step_of_a_stream_is_not_believed_while_a_long_prompt_is_computed() -> None:
    """Parts of the prompt seemed to take no more than streams would, so that streams were never measured again."""
    machine = Machine()
    machine.add("stream", 100)
    for _ in range(20):
        machine.step()
    machine.scheduler._pace.observe(num_streams=1, chunks=[], seconds=2.0)  # type: ignore[union-attr]
    machine.add("long", 8_000)
    generated = machine.num_tokens["stream"]
    took = machine.run_until_first_token("long")
    assert machine.num_tokens["stream"] - generated > 0.45 * took / STREAM_S


def test_a_clock_that_stands_still_measures_nothing() -> None:
    pace = StepPace(0.05)
    pace.observe(num_streams=0, chunks=[(0, 512)], seconds=0.0)
    assert pace.num_tokens(0, 0.05) == StepPace(0.05).num_tokens(0, 0.05)


@pytest.mark.parametrize("num_tokens", [512, 2048, 6000])
@pytest.mark.parametrize("row_s", [1e-5, 1e-3, 0.013, 0.05])
@pytest.mark.parametrize("fixed_rows", [1, 2, 7, 16, 32, 64])
@pytest.mark.parametrize("before", [(), (512,), (100, 700), (30,)])
def test_a_lone_prompt_costs_at_most_5_percent_more_than_in_whole_steps(
    num_tokens: int, row_s: float, fixed_rows: int, before: tuple[int, ...]
) -> None:
    """Parts of a quarter of a second were 13 tokens of a slow model, and cost twice as much a token."""
    machine = machine_of(row_s, fixed_rows)
    for number, length in enumerate(before):
        machine.add(f"{number}", length)
        machine.run_until_first_token(f"{number}")
        machine.step()
        machine.finish(f"{number}")
    machine.add("long", num_tokens)
    num_steps = -len(machine.steps)
    machine.run_until_first_token("long")
    num_steps += len(machine.steps)
    least = num_tokens + fixed_rows * -(-num_tokens // 512)
    assert num_tokens + fixed_rows * num_steps <= 1.05 * least


@pytest.mark.parametrize("row_s", [1e-5, 1e-3, 0.013, 0.05])
@pytest.mark.parametrize("fixed_rows", [1, 2, 7, 16, 32, 64])
@pytest.mark.parametrize("num_streams", [1, 4, 16])
def test_beside_streams_a_long_prompt_costs_nearly_the_least_and_takes_twice_as_long(
    row_s: float, fixed_rows: int, num_streams: int
) -> None:
    machine = machine_of(row_s, fixed_rows)
    for number in range(num_streams):
        machine.add(f"{number}", 10)
    while len(machine.first_tokens) < num_streams:
        machine.step()
    for _ in range(10):
        machine.step()
    began, generated, num_before = machine.now, machine.num_tokens["0"], len(machine.steps)
    machine.add("long", 3000)
    machine.run_until_first_token("long")
    parts = [shares for shares, _ in machine.steps[num_before:] if "long" in shares]
    num_apart = sum(len(shares) == 1 for shares in parts)  # steps in which it pays what is fixed
    assert num_apart * fixed_rows <= 0.1 * 3000, "a token costs 10 % more than the least, at most"
    large = [shares["long"] for shares in parts if shares["long"] >= min(10 * fixed_rows, 512 - num_streams)]
    assert sum(large) >= 0.3 * 3000, "a few tokens in a step come besides"
    own_s = (machine.num_tokens["0"] - generated) * (fixed_rows + num_streams) * row_s
    behind_s = 0.5 * (machine.now - began) - own_s  # half of the speed that streams have by themselves
    assert behind_s <= 3.0 + (512 + fixed_rows) * row_s


def test_eight_requests_at_once_take_little_more_than_their_rows() -> None:
    """Steps of three streams by themselves read all weights for three rows: a third of the time of a 4B model."""
    row_s = 0.0132
    machine = Machine(token_s=row_s, position_s=0.0, stream_s=0.0, stream_row_s=row_s, least_s=0.1)
    machine.add("before", 512)
    for _ in range(16):
        machine.step()
    machine.finish("before")
    began = machine.now
    names = [f"{number}" for number in range(8)]
    for name in names:
        machine.add(name, 128)
    while names:
        machine.step()
        for name in [name for name in names if machine.num_tokens[name] >= 48]:
            machine.finish(name)
            names.remove(name)
    assert machine.now - began < 1.25 * 8 * (128 + 48) * row_s


def test_a_few_tokens_beside_streams_that_cost_more_than_in_a_large_part_are_given_up() -> None:
    """Each row of a few reads experts of its own."""
    pace = StepPace(0.05)
    pace.observe(num_streams=0, chunks=[(0, 512)], seconds=0.512)
    for _ in range(20):
        pace.observe(num_streams=4, chunks=[], seconds=0.04)
    pace.observe(num_streams=4, chunks=[(0, 200)], seconds=0.4)

    def few() -> int:
        return pace.time_of(0.0, num_streams=4, num_prompts=1).num_tokens(0, 2000, 1.0)

    assert 30 <= few() <= 40, "streams have half of their speed"
    for _ in range(3):
        pace.observe(num_streams=4, chunks=[(200, 220)], seconds=0.08)
    assert not pace.time_of(0.0, num_streams=4, num_prompts=1).has_room_for(0, 2000)


def test_a_machine_that_slows_down_does_not_get_smaller_parts_than_cost_the_least() -> None:
    """The time of a part was kept to, so that parts shrank to sizes that cost more a token, and looked slower still."""
    machine = machine_of(0.001, 8)
    machine.add("before", 700)
    machine.run_until_first_token("before")
    machine.finish("before")
    machine.fixed_s, machine.token_s, machine.stream_row_s = 20 * 0.008, 20 * 0.001, 20 * 0.001
    machine.add("long", 6000)
    machine.run_until_first_token("long")
    parts = [shares["long"] for shares, _ in machine.steps if "long" in shares][:-1]
    assert min(parts[2:]) >= 160


def test_after_a_step_that_hangs_prompts_are_computed_as_soon_as_before() -> None:
    """While a machine was suspended for 20 s, prompts seemed to take 20 s, which streams were to be given back."""
    machine = Machine()
    machine.add("stream", 100)
    for number in range(3):
        machine.add(f"{number}", 200)
        machine.run_until_first_token(f"{number}")
        machine.finish(f"{number}")
    machine.add("hangs", 200)
    machine.fixed_s = 20.0
    machine.step()
    machine.fixed_s = 0.0
    machine.run_until_first_token("hangs")
    machine.add("next", 200)
    assert machine.run_until_first_token("next") < 1.0


def test_a_first_step_that_hangs_is_soon_forgotten_too() -> None:
    machine = Machine(fixed_s=600.0)
    machine.add("stream", 1)
    machine.add("hangs", 200)
    machine.step()
    machine.fixed_s = 0.0
    machine.run_until_first_token("hangs")
    machine.add("next", 200)
    assert machine.run_until_first_token("next") < 8.0


def test_a_prompt_that_is_alone_is_computed_whole_if_nothing_was_measured_and_it_is_short() -> None:
    machine = Machine()
    machine.add("short", 512)
    machine.step()
    assert machine.steps[0][0] == {"short": 512}


def test_a_lone_prompt_ends_with_no_part_of_a_few_tokens() -> None:
    """Eight tokens at the end of 512 cost as much as 14 of a long part."""
    pace = StepPace(0.05)
    for num_tokens in (56, 112, 168):
        pace.observe(num_streams=0, chunks=[(0, num_tokens)], seconds=0.0045 * num_tokens)
    for num_left in range(1, 600):
        parts = []
        while num_left:
            time = pace.time_of(0.0, num_streams=0, num_prompts=1)
            parts.append(time.num_tokens(0, num_left, 1.0))
            num_left -= parts[-1]
        assert max(parts) <= 56 * 7 / 6 and (len(parts) == 1 or min(parts) > 56 / 6)


def test_what_a_decode_step_took_says_how_much_of_a_first_prompt_is_computed() -> None:
    slow, quick = Machine(), Machine()
    for machine, step_s in ((slow, 0.09), (quick, 0.005)):
        machine.scheduler.observe_decode(num_rows=1, seconds=step_s)
        machine.add("first", 512)
        machine.step()
    assert slow.steps[0][0] == {"first": 64} and quick.steps[0][0]["first"] > 256


def test_steps_without_prompts_fit_no_cost_of_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    solve, num_fits = prompt_cost._non_negative, 0

    def counted(*args: Any) -> Any:
        nonlocal num_fits
        num_fits += 1
        return solve(*args)

    machine = Machine()
    for number in range(3):
        machine.add(f"{number}", 100 + 50 * number)
        machine.run_until_first_token(f"{number}")
    monkeypatch.setattr(prompt_cost, "_non_negative", counted)
    machine.step()  # what the last prompt took is noted with the step after it
    num_fits = 0
    for _ in range(20):
        machine.step()
    assert num_fits == 0
    machine.add("next", 200)
    machine.step()
    assert num_fits > 0


@pytest.mark.parametrize("num_rows", [16, 32, 64, 512])
def test_steps_of_prompts_that_are_as_large_as_those_that_decode_say_nothing_apart(num_rows: int) -> None:
    """The two equations are one then, and have no single solution."""
    cost = prompt_cost.PromptCost()
    cost.observe(num_rows, 0.0, 0.01)
    cost.observe_decode(num_rows, 0.01)
    token_s, fixed_s = cost.token_s(0.0), cost.fixed_s
    assert token_s is not None and fixed_s is not None
    assert fixed_s + num_rows * token_s == pytest.approx(0.01, rel=0.01)


@given(st.lists(st.tuples(st.sampled_from([8, 24, 46, 64]), st.sampled_from([32.0, 300.0, 500.0])), min_size=1))
def test_steps_that_all_take_the_same_leave_a_token_some_time(steps: list[tuple[int, float]]) -> None:
    """A ratio to no time at all failed requests of a model whose every step took a millisecond."""
    cost = prompt_cost.PromptCost()
    for num_tokens, position in steps:
        cost.observe(num_tokens, position, 0.001)
        cost.observe_decode(1, 0.001)
        token_s = cost.token_s(position)
        assert token_s is not None and 0.0 < token_s <= 0.001
