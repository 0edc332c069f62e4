"""Units cover every token once, split where it pays, and are worked on in a balanced order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from radixlm.compile.kernels.attention_units import MAX_TILE, SINGLE_TOKENS, AttentionLimits, find_units, units_ints
from radixlm.compile.kernels.kv_spans import SPAN

from .harness import built, examples, runnable

LIMITS = AttentionLimits(num_tokens=600, context_length=4 * SPAN)
MICRO = 2


@dataclass
class Found:
    """What `find_units` wrote, as rows of numbers."""

    units: list[list[int]]  # first token, tokens, span, slot; in the order of work
    found: list[list[int]]  # in the order of tokens
    merges: list[list[int]]  # token, spans, first slot


def find(rows: list[int], lengths: list[int], starts: list[int] | None = None) -> Found:
    memory = np.full(units_ints(LIMITS), -7, np.int32)
    kernel = built(runnable()[0], find_units, LIMITS, MICRO, has_starts=starts is not None)
    seen = [np.array(ends, np.int32) for ends in (lengths, starts) if ends is not None]
    kernel(np.array(rows, np.int32), *seen, memory, len(rows))
    num_units, num_merges = memory[:2]
    most = LIMITS.num_units
    units = memory[2:][: 4 * num_units].reshape(-1, 4)
    order = memory[2 + 4 * most :][:num_units]
    assert sorted(order) == list(range(num_units))
    merges = memory[2 + 5 * most :][: 3 * num_merges].reshape(-1, 3)
    return Found(units[order].tolist(), units.tolist(), merges.tolist())


runs = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 120)), min_size=1, max_size=5)


@given(runs=runs, data=st.data())
@examples(150)
def test_units_cover_the_tokens_and_spans_of_split_ones(runs: list[tuple[int, int]], data: st.DataObject) -> None:
    rows = [row for row, count in runs for _ in range(count)]
    longest = data.draw(st.sampled_from([SPAN, 4 * SPAN]))
    lengths = data.draw(st.lists(st.integers(1, longest), min_size=len(rows), max_size=len(rows)))
    found = find(rows, lengths)
    split = {token: (spans, slot) for token, spans, slot in found.merges}
    covered: list[int] = []
    slots: list[int] = []
    for first, count, span, slot in found.found:
        assert 1 <= count <= MAX_TILE
        assert len(set(rows[first : first + count])) == 1
        if span < 0:
            covered += range(first, first + count)
            assert first not in split
        else:
            spans, first_slot = split[first]
            assert (count, slot) == (1, first_slot + span)
            assert spans == -(-lengths[first] // SPAN) > 1
            covered += [first] * (span == 0)
            slots.append(slot)
    assert covered == list(range(len(rows)))
    assert slots == list(range(len(slots)))
    assert len(slots) == sum(spans for spans, _ in split.values()) <= LIMITS.num_slots


def test_a_long_context_is_split_and_equal_ones_are_not() -> None:
    assert find([0], [4 * SPAN]).found == [[0, 1, span, span] for span in range(4)]
    many = find(list(range(40)), [4 * SPAN] * 40)
    assert [unit[2] for unit in many.found] == [-1] * 40
    uneven = find(list(range(40)), [9] * 20 + [4 * SPAN] + [9] * 19)
    assert [merge[:2] for merge in uneven.merges] == [[20, 4]]


def test_a_window_is_split_into_the_spans_that_it_meets() -> None:
    assert find([0], [4 * SPAN], [0]).found == [[0, 1, span, span] for span in range(4)]
    windowed = find([0, 1], [4 * SPAN, 3 * SPAN + 1], [2 * SPAN + 5, 3 * SPAN])
    assert windowed.found == [[0, 1, 2, 0], [0, 1, 3, 1], [1, 1, -1, 0]]
    assert windowed.merges == [[0, 2, 0]]


@given(runs=runs, data=st.data())
@examples(50)
def test_units_with_starts_cover_the_spans_that_tokens_see(runs: list[tuple[int, int]], data: st.DataObject) -> None:
    rows = [row for row, count in runs for _ in range(count)]
    lengths = data.draw(st.lists(st.integers(1, 4 * SPAN), min_size=len(rows), max_size=len(rows)))
    window = data.draw(st.sampled_from([1, SPAN - 1, SPAN + 1, 4 * SPAN]))
    starts = [max(0, length - window) for length in lengths]
    found = find(rows, lengths, starts)
    spans_of = {token: range(starts[token] // SPAN, -(-lengths[token] // SPAN)) for token in range(len(rows))}
    split: dict[int, list[int]] = {}
    for first, _, span, _ in found.found:
        if span >= 0:
            split.setdefault(first, []).append(span)
    assert split == {token: list(spans_of[token]) for token, _, _ in found.merges}
    assert all(count == len(spans_of[token]) for token, count, _ in found.merges)


def test_few_tokens_are_units_of_their_own_and_a_prompt_is_cut_into_tiles() -> None:
    assert len(find([0] * SINGLE_TOKENS, [5] * SINGLE_TOKENS).found) == SINGLE_TOKENS
    assert [unit[1] for unit in find([0] * 70, [5] * 70).found] == [10] * 7
    assert [unit[1] for unit in find([0] * 500, [5] * 500).found] == [MAX_TILE] * 15 + [500 - 15 * MAX_TILE]
    assert [unit[:2] for unit in find([0] * 30 + [1] + [0] * 5, [5] * 36).found][-3:] == [[24, 6], [30, 1], [31, 5]]


def largest_share(rows: list[int], lengths: list[int], num_threads: int) -> float:
    """Of a thread, over what is fair; each takes a run of units times (here three) heads."""
    units = find(rows, lengths).units
    costs = [max(count, 2) * lengths[first + count - 1] for first, count, _, _ in units for _ in range(3)]
    step = -(-len(costs) // num_threads)
    return max(sum(costs[start : start + step]) for start in range(0, len(costs), step)) * num_threads / sum(costs)


def test_runs_of_a_prompt_cost_the_same_for_each_thread() -> None:
    """Tiles later in a prompt see more."""
    for num_tokens in (100, 256, 300, 480, 512):
        rows, lengths = [0] * num_tokens, list(range(1, num_tokens + 1))
        assert largest_share(rows, lengths, 2) <= 1.06
        assert largest_share(rows, lengths, 4) <= 1.15


def test_runs_of_prompts_and_decoded_tokens_cost_the_same_for_each_thread() -> None:
    rows = [*range(50), *[50] * 300, *[51] * 100]
    lengths = [*range(60, 260, 4), *range(1, 301), *range(400, 500)]
    assert largest_share(rows, lengths, 2) <= 1.06
