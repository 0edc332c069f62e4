"""For each dimension of a namespace: the same reuses, different never, unset and set never, equal strings across never.

The matrix of vLLM's RFC #53194, held at the cache, where a prefix is found or not, and at the model's door, where its
tokens are computed or not.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from radixlm.runtime.cache.cache_namespace import MAX_LENGTH, CacheNamespaces, CacheScope, ModelIdentity
from radixlm.runtime.cache.page_pool import PagePool
from radixlm.runtime.cache.prefix_cache import PrefixCache
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.errors import InvalidParameter

from ..fake_model import Bench

SECRET = b"a secret of this test"
OF_MODEL = [field.name for field in fields(ModelIdentity)]
OF_CLIENT = [field.name for field in fields(CacheScope)]
DIMENSIONS = OF_MODEL + OF_CLIENT
PROMPT = [*range(30), *range(10), 7]
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1)
IsReused = Callable[[bytes, bytes], bool]
TEXT = st.none() | st.text(max_size=8)


def namespace(**dimensions: str | None) -> bytes:
    """The namespace of a client and a model; dimensions not named are unset."""
    model = ModelIdentity(**{name: dimensions.get(name) for name in OF_MODEL})
    return CacheNamespaces(model, SECRET).of(CacheScope(**{name: dimensions.get(name) for name in OF_CLIENT}))


def is_found(first: bytes, second: bytes) -> bool:
    """Whether a prompt computed in one namespace is found in the other."""
    cache = PrefixCache(PagePool(8))
    sequence = cache.open(cache.match(PROMPT, namespace=first), context_length=64)
    with cache.begin() as transaction:
        transaction.reserve(sequence, len(PROMPT))
        transaction.commit()
    cache.close(sequence)
    num_tokens = cache.match(PROMPT, namespace=second).num_tokens
    assert num_tokens in (0, 40)
    return num_tokens == 40


def is_not_computed_again(first: bytes, second: bytes) -> bool:
    """Whether an engine computes a prompt in one namespace, and then none of it in the other; live ones share alike."""
    bench = Bench()
    for name, space in (("first", first), ("second", second), ("third", second)):
        bench.add(name, PROMPT, ONE_TOKEN, space)
    bench.run()
    assert bench.tokens("first") == bench.tokens("second") == bench.tokens("third")
    num_computed = bench.model.num_tokens
    assert num_computed in (41 + 1 + 1, 41 + 41 + 1)  # the last token is always computed
    return num_computed == 41 + 1 + 1


TIERS = {"cache": is_found, "engine": is_not_computed_again}


@pytest.fixture(params=TIERS)
def is_reused(request: pytest.FixtureRequest) -> IsReused:
    """Whether what is computed in one namespace is reused in another, by a tier."""
    return TIERS[request.param]


def test_the_matrix_has_every_dimension() -> None:
    assert set(DIMENSIONS) == {
        *("api_key", "cache_salt", "prompt_cache_key", "adapter"),
        *("model_digest", "tokenizer_digest", "quantization"),
    }


@pytest.mark.parametrize("name", DIMENSIONS)
@pytest.mark.parametrize("value", ["", "a", "ключ\0"])
def test_the_same_reuses(is_reused: IsReused, name: str, value: str) -> None:
    assert is_reused(namespace(**{name: value}), namespace(**{name: value}))


@pytest.mark.parametrize("name", DIMENSIONS)
@pytest.mark.parametrize(("first", "second"), [("a", "b"), ("a", "aa"), ("a", "A"), ("a", "a\0"), ("é", "e\u0301")])
def test_different_never_reuses(is_reused: IsReused, name: str, first: str, second: str) -> None:
    assert not is_reused(namespace(**{name: first}), namespace(**{name: second}))
    assert not is_reused(namespace(**{name: second}), namespace(**{name: first}))


@pytest.mark.parametrize("name", DIMENSIONS)
@pytest.mark.parametrize("value", ["", "a", "None", "null", "0", "\0"])
def test_unset_and_set_never_reuse(is_reused: IsReused, name: str, value: str) -> None:
    assert not is_reused(namespace(), namespace(**{name: value}))
    assert not is_reused(namespace(**{name: value}), namespace())


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(DIMENSIONS, 2)))
@pytest.mark.parametrize("value", ["", "a"])
def test_equal_strings_across_dimensions_never_reuse(is_reused: IsReused, one: str, other: str, value: str) -> None:
    assert not is_reused(namespace(**{one: value}), namespace(**{other: value}))
    assert not is_reused(namespace(**{other: value}), namespace(**{one: value}))
    assert not is_reused(namespace(**{one: value}), namespace(**{one: value, other: value}))


@given(st.lists(TEXT, min_size=len(DIMENSIONS), max_size=len(DIMENSIONS)), st.data())
def test_no_two_scopes_share_a_namespace(values: list[str | None], data: st.DataObject) -> None:
    others = [data.draw(st.just(value) | TEXT) for value in values]
    first = namespace(**dict(zip(DIMENSIONS, values, strict=True)))
    second = namespace(**dict(zip(DIMENSIONS, others, strict=True)))
    assert (first == second) == (values == others)


def test_values_do_not_flow_into_their_neighbours() -> None:
    assert namespace(cache_salt="ab", prompt_cache_key="c") != namespace(cache_salt="a", prompt_cache_key="bc")


def test_namespaces_cannot_be_made_without_the_secret_and_say_nothing() -> None:
    scope = CacheScope(api_key="sk-1234")
    first, second = CacheNamespaces(ModelIdentity()), CacheNamespaces(ModelIdentity())
    assert first.of(scope) != second.of(scope)
    assert len(first.of(scope)) == 32 and b"sk-1234" not in first.of(scope)


@pytest.mark.parametrize("name", OF_CLIENT)
@pytest.mark.parametrize("value", ["x" * (MAX_LENGTH + 1), "\ud800"])
def test_what_clients_send_is_limited(name: str, value: str) -> None:
    with pytest.raises(InvalidParameter, match=name):
        replace(CacheScope(), **{name: value})
    assert replace(CacheScope(), **{name: "x" * MAX_LENGTH}) != CacheScope()
