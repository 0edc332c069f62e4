"""Guesses: what grammars force comes first, the longest repetition is followed, and as many are made as pay."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import pytest
from hypothesis import given
from hypothesis import strategies as st
from radixlm.runtime.chat.token_constraint import MinTokens, TokenConstraint
from radixlm.runtime.speculation.draft import FORCED, MAX_AGAIN, Draft, StepCost, draft_length
from radixlm.runtime.speculation.drafter import Drafter, SuffixLookup


def free_rows() -> StepCost:
    """Steps that cost the same with any number of rows."""
    cost = StepCost()
    for rows in (1, 8, 16, 33) * 20:
        cost.observe(rows, 0.02)
    return cost


class Only:
    """A grammar that allows one text, of some tokens, and then anything below a bound."""

    def __init__(self, text: Sequence[int], below: int) -> None:
        self._text, self._below = tuple(text), below

    def forced(self) -> tuple[int, ...]:
        return self._text

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        for place, token_id in enumerate(token_ids):
            if token_id >= self._below if place >= len(self._text) else token_id != self._text[place]:
                return place
        return len(token_ids)

    def fork(self) -> TokenConstraint:
        return MinTokens(0, frozenset(), 0)


def propose(drafter: Drafter, most: int = 8) -> Draft:
    return drafter.propose(most, free_rows(), num_rows=1, num_expected=1.0)


def test_the_longest_repetition_is_followed_and_not_the_last() -> None:
    twice = SuffixLookup([7, 1, 2, 3, 4, 50, 8, 1, 2, 3, 4, 60, 7, 1, 2, 3, 4])
    assert twice.draft(1) == ((50,), 4)
    lookup = SuffixLookup([1, 2, 3, 4, 50, 9, 4, 60, 9, 2, 3, 4])
    assert lookup.draft(2) == ((50, 9), 3)
    assert lookup.draft(1, behind=[60]) == ((9,), 2) and len(lookup) == 12
    assert SuffixLookup([7, 8, 9, *[7, 8, 9] * 20]).draft(3) == ((7, 8, 9), 32)


@given(st.lists(st.integers(0, 3), max_size=80), st.integers(0, 5), st.integers(0, 9))
def test_what_is_found_is_what_comparing_all_places_finds(ids: list[int], num_copied: int, most: int) -> None:
    ids += ids[:num_copied]
    assert SuffixLookup(ids).draft(most) == _found_one_by_one(ids, most)


def _found_one_by_one(ids: list[int], most: int) -> tuple[tuple[int, ...], int]:
    """The same, obviously: of the last 16 places where as many of the last four tokens stood, the longest suffix."""

    def same(end: int) -> int:
        return next((n for n in range(32) if n >= end or ids[end - 1 - n] != ids[-1 - n]), 32)

    lengths = {end: same(end) for end in range(1, len(ids))}
    looked_for = min(4, max(lengths.values(), default=0))
    if not looked_for or not most:
        return (), 0
    ends = [end for end, length in lengths.items() if length >= looked_for][-16:]
    best = max(ends, key=lambda end: (lengths[end], end))
    return tuple(ids[best : best + most]), max(n for n in (32, 16, 8, 4, 3, 2, 1) if n <= lengths[best])


def test_forced_tokens_come_first_and_what_followed_them_before_comes_behind() -> None:
    drafter = Drafter([5, 6, 7, 20, 30, 1], None, Only([6, 7], 25))
    assert propose(drafter).token_ids == (6, 7, 20)  # 30 is not allowed
    assert propose(drafter).num_forced == 2 and propose(drafter).kind == 2
    assert propose(drafter, 1).token_ids == (6,)
    assert propose(Drafter([1, 2], None, Only([6, 7], 25))).kind == FORCED


def test_what_the_tree_knows_is_kept_where_the_grammar_wants_the_same() -> None:
    ahead = lambda most: (6, 7, 8, 30)  # noqa: E731
    assert propose(Drafter([1, 2], ahead, Only([6, 7], 25))).token_ids == (6, 7, 8)
    assert propose(Drafter([1, 2], ahead, Only([5], 25))).token_ids == (5,)


def test_forced_tokens_are_not_the_fault_of_what_comes_behind() -> None:
    drafter = Drafter([5, 6, 7, 20, 3, 1], None, Only([6, 7], 25))
    for _ in range(30):
        draft = propose(drafter)
        drafter.observe(draft, 2)
    assert propose(drafter).num_forced == 2 and propose(drafter).chances[1] > 0.9


def test_tokens_that_were_taken_back_are_forgotten() -> None:
    ids = [1, 2, 3, 1, 2, 3]
    drafter = Drafter(ids)
    assert propose(drafter).token_ids[:2] == (1, 2)
    del ids[4:]
    assert propose(drafter).token_ids[:2] == (2, 3)


def test_a_tile_of_rows_is_filled_and_the_next_one_only_where_it_pays() -> None:
    """Rows of a tile of four are free, and the next tile costs half of a step: no more than three doubtful guesses."""
    cost = StepCost()
    for rows in (1, 2, 3, 4, 5, 6, 7, 8) * 20:
        cost.observe(rows, 0.020 if rows <= 4 else 0.030)
    doubtful = [0.5**place for place in range(1, 8)]
    sure = [0.98**place for place in range(1, 8)]
    assert draft_length(doubtful, cost, num_rows=1, num_expected=1.0) == 3
    assert draft_length(sure, cost, num_rows=1, num_expected=1.0) == 7


def test_where_a_row_costs_what_a_token_brings_nothing_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside many streams guesses were looked for that no step had room for: a third of the time between two steps."""
    cost = StepCost()
    for rows in (40, 50, 60) * 9:
        cost.observe(rows, 0.001 * rows)
    looked: list[int] = []
    monkeypatch.setattr(SuffixLookup, "draft", lambda *_, **__: looked.append(1) or ((), 0))
    Drafter([1, 2, 3, 1, 2]).propose(8, cost, num_rows=50, num_expected=50.0)
    assert not looked
    Drafter([1, 2, 3, 1, 2]).propose(8, free_rows(), num_rows=1, num_expected=1.0)
    assert looked


@given(
    st.lists(st.tuples(st.integers(1, 40), st.floats(0.001, 0.1)), min_size=1, max_size=20),
    st.lists(st.floats(0.0, 1.0), max_size=8),
    st.integers(1, 40),
)
def test_where_no_guess_may_pay_none_does(steps: list[tuple[int, float]], shares: list[float], num_rows: int) -> None:
    cost = StepCost()
    for rows, seconds in steps:
        cost.observe(rows, seconds)
    chances = list(accumulate(shares, mul))
    if draft_length(chances, cost, num_rows=num_rows, num_expected=float(num_rows)):
        assert cost.is_worth_drafting(num_rows, float(num_rows))


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("share", [0.3, 0.8, 1.0])
def test_the_speed_that_a_draft_promises_is_that_of_steps_played_out(recomputes: bool, share: float) -> None:
    """A recurrent model computes what was right again, in a step of its own if that is much."""
    cost, chance = StepCost(recomputes=recomputes), random.Random(1)
    for _ in range(50):
        for rows in range(1, 8):
            cost.observe(rows, 0.02 + 0.001 * rows)
    for number in range(1, 6):
        num_tokens, seconds = 0.0, 0.0
        for _ in range(4000):
            right = next((place for place in range(number) if chance.random() >= share), number)
            num_tokens, seconds = num_tokens + 1 + right, seconds + cost.seconds(1 + number)
            if recomputes and right < number and number > MAX_AGAIN:
                num_tokens, seconds = num_tokens + 1, seconds + cost.seconds(1)
        more = sum(share**place for place in range(1, number + 1))
        assert cost.speed(1, 1.0, number, more, share**number) == pytest.approx(num_tokens / seconds, rel=0.03)
