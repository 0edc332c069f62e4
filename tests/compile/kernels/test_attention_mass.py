"""What each KV row weighs in a step, against softmax in float64; rows beyond a token's length are NaN throughout."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from radixlm.compile.codegen.targets import Target
from radixlm.compile.kernels.attention_units import MAX_TILE
from radixlm.runtime.artifact.manifest import KVDType

from .attention_case import LAYER, LIMITS, AttentionCase, Tokens
from .harness import every_target, examples, runnable

SHAPES: list[tuple[KVDType, int, int, int]] = [  # query heads, KV heads, head_dim
    ("f16", 6, 2, 64),
    ("f16", 4, 2, 6),
    ("f32", 1, 1, 8),
    ("f16", 11, 1, 2),
]
NATIVE = runnable()[-1]


def scored(target: Target, case: AttentionCase, tokens: Tokens, stride: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """What each row weighs, and for how many tokens; outputs are the same without."""
    mass = np.zeros(case.expected_mass(tokens).shape, np.float32)
    counts = np.zeros(mass.shape[2:], np.int32)
    y = case.run(target, tokens, mass=mass, counts=counts, stride=stride)
    assert (y == case.run(target, tokens)).all()
    return mass, counts


def taken(tokens: Tokens, stride: int) -> Tokens:
    """One of `stride` tokens of each sequence, counted from its last; of a single one none, unless it is all."""
    changes = np.flatnonzero(np.diff(tokens.rows)) + 1
    numbers = [some for some in np.split(np.arange(len(tokens)), changes) if stride == 1 or len(some) > 1]
    return tokens[[number for some in numbers for number in some[::-1][::stride]]]


def check(target: Target, case: AttentionCase, tokens: Tokens) -> None:
    """To 1e-5 of what a row can have got at the most, which is 1 from each token and query head that sees it."""
    for stride in (1, 3, 8):
        check_scores(case, taken(tokens, stride), *scored(target, case, tokens, stride), 0 if stride == 1 else 16)


def check_scores(case: AttentionCase, tokens: Tokens, mass: np.ndarray, counts: np.ndarray, num_near: int) -> None:
    """That these are of those tokens alone."""
    expected, group = case.expected_mass(tokens, num_near), case.num_heads // case.layout.num_kv_heads
    np.testing.assert_allclose(mass, expected, 1e-4, 1e-5 * group)
    np.testing.assert_allclose(mass[LAYER].sum(axis=(1, 2)), expected[LAYER].sum(axis=(1, 2)), 1e-5)
    assert num_near or expected[LAYER].sum() == pytest.approx(len(tokens) * case.num_heads)
    assert (mass[expected == 0] == 0).all()
    np.testing.assert_array_equal(counts, case.expected_counts(tokens, num_near))


@every_target
def test_mass_is_that_of_softmax_on_every_target(target: Target) -> None:
    check_steps(target, SHAPES[0])


@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_mass_is_that_of_softmax_for_every_shape(shape: tuple[KVDType, int, int, int]) -> None:
    check_steps(NATIVE, shape)


def check_steps(target: Target, shape: tuple[KVDType, int, int, int]) -> None:
    """Prompts and single tokens, together and alone."""
    case = AttentionCase(*shape, (300, 200, 150, 531))
    check(target, case, case.tokens([1, *[0] * 101, 2, 2, 3], [200, *range(200, 301), 150, 33, 531]))
    check(target, case, case.tokens([3], [531]))
    check(target, case, case.tokens([0, 1, 2], [1, 16, 17]))


def test_pages_that_sequences_share_get_the_weights_of_all() -> None:
    case = AttentionCase("f16", 6, 2, 64, (130, 100, 190))
    case.share_pages(6)
    check(NATIVE, case, case.tokens([0, 1, 2, *[0] * 40], [130, 97, 190, *range(91, 131)]))


def test_mass_is_added_to_what_was_there_and_is_the_same_each_time() -> None:
    case = AttentionCase("f16", 6, 2, 64, (300, 40))
    tokens = case.tokens([*[0] * 60, 1], [*range(241, 301), 40])
    once, seen = scored(NATIVE, case, tokens)
    assert (scored(NATIVE, case, tokens)[0] == once).all()
    mass, counts = once.copy(), seen.copy()
    case.run(NATIVE, tokens, mass=mass, counts=counts)
    np.testing.assert_allclose(mass, 2 * once, 1e-5)
    assert (counts == 2 * seen).all()


def test_of_a_long_prompt_an_eighth_is_scored_but_for_what_is_near_and_none_of_single_tokens() -> None:
    case = AttentionCase("f16", 6, 2, 64, (300, 200, 150))
    tokens = case.tokens([*[0] * 300, 1, 2, 2], [*range(1, 301), 200, 149, 150])
    some = taken(tokens, 8)
    assert sorted(some.lengths[some.rows == 0]) == list(range(4, 301, 8)), "more than fit a tile"
    assert some.lengths[some.rows != 0].tolist() == [150]
    mass, counts = scored(NATIVE, case, tokens, 8)
    check_scores(case, some, mass, counts, 16)
    assert not mass[:, :, case.pages[1]].any() and not counts[case.pages[1]].any()


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
@given(data=st.data())
@examples(25)
def test_mass_of_any_step_is_that_of_softmax(shape: tuple[KVDType, int, int, int], data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 300), min_size=1, max_size=3))
    runs = data.draw(
        st.lists(st.tuples(st.integers(0, len(lengths) - 1), st.integers(1, 2 * MAX_TILE)), min_size=1, max_size=4)
    )
    rows = [row for row, count in runs for _ in range(count)][: LIMITS.num_tokens]
    seen = [data.draw(st.integers(1, lengths[row])) for row in rows]
    case = AttentionCase(*shape, lengths)
    check(NATIVE, case, case.tokens(rows, seen))
