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


def mass_of(target: Target, case: AttentionCase, tokens: Tokens) -> np.ndarray:
    mass = np.zeros(case.expected_mass(tokens).shape, np.float32)
    y = case.run(target, tokens, mass=mass)
    assert (y == case.run(target, tokens)).all()
    return mass


def check(target: Target, case: AttentionCase, tokens: Tokens) -> None:
    """To 1e-5 of what a row can have got at the most, which is 1 from each token and query head that sees it."""
    expected, group = case.expected_mass(tokens), case.num_heads // case.layout.num_kv_heads
    mass = mass_of(target, case, tokens)
    np.testing.assert_allclose(mass, expected, 1e-4, 1e-5 * group)
    np.testing.assert_allclose(mass[LAYER].sum(axis=(1, 2)), len(tokens) * group, 1e-5)
    assert (mass[expected == 0] == 0).all()


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
    once = mass_of(NATIVE, case, tokens)
    assert (mass_of(NATIVE, case, tokens) == once).all()
    mass = once.copy()
    case.run(NATIVE, tokens, mass=mass)
    np.testing.assert_allclose(mass, 2 * once, 1e-5)


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
