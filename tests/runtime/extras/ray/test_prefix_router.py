"""A request goes to the replica that has its prefix, unless that is overloaded; the oracle keeps all texts."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from radixlm.runtime.extras.ray.prefix_router import PrefixRouter, RouterPolicy

NAMES = ("a", "b", "c")
POLICY = RouterPolicy(block_bytes=4, max_lead=3)
TEXTS = st.lists(st.sampled_from(["abcd", "efgh", "ab", "x"]), max_size=6).map(lambda parts: "".join(parts).encode())
NAMESPACES = st.sampled_from([b"", b"n", b"na"])


@dataclass
class SlowRouter:
    """Every text that was ever sent, compared byte by byte."""

    sent: dict[str, list[tuple[bytes, bytes]]] = field(default_factory=lambda: {name: [] for name in NAMES})

    def num_held_bytes(self, name: str, namespace: bytes, text: bytes) -> int:
        size = POLICY.block_bytes
        commons = [_num_common(text, other) // size * size for where, other in self.sent[name] if where == namespace]
        return max([0, *commons])


def _num_common(left: bytes, right: bytes) -> int:
    pairs = zip(left, right, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(left), len(right)))


@given(st.lists(st.tuples(st.sampled_from(NAMES), NAMESPACES, TEXTS), max_size=12), NAMESPACES, TEXTS, st.data())
def test_the_longest_prefix_wins_among_those_that_are_not_overloaded(
    sent: list[tuple[str, bytes, bytes]], namespace: bytes, text: bytes, data: st.DataObject
) -> None:
    router, slow = PrefixRouter(NAMES, POLICY), SlowRouter()
    for name, where, other in sent:
        router.record(name, where, other)
        slow.sent[name].append((where, other))
    held = {name: slow.num_held_bytes(name, namespace, text) for name in NAMES}
    assert {name: router.num_held_bytes(name, namespace, text) for name in NAMES} == held
    living = data.draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True))
    loads = {name: data.draw(st.integers(0, 6)) for name in living}
    chosen = router.choose(namespace, text, loads)
    free = [name for name in loads if loads[name] < min(loads.values()) + POLICY.max_lead]
    assert chosen in free
    assert held[chosen] == max(held[name] for name in free)
    assert loads[chosen] == min(loads[name] for name in free if held[name] == held[chosen])


def test_one_namespace_learns_nothing_of_what_another_sent() -> None:
    router = PrefixRouter(NAMES, POLICY)
    router.record("b", b"alice", b"a secret that is long enough")
    for namespace in (b"", b"bob", b"alic", b"alicea"):
        assert router.num_held_bytes("b", namespace, b"a secret that is long enough") == 0
        shifted = b"alice"[len(namespace) :] + b"a secret that is long enough"
        assert router.num_held_bytes("b", namespace, shifted) == 0


def test_memory_is_bounded_and_beginnings_are_forgotten_last() -> None:
    policy = RouterPolicy(block_bytes=4, max_blocks=10)
    router = PrefixRouter(["a"], policy)
    rng = random.Random(0)
    texts = [rng.randbytes(rng.randrange(60)) for _ in range(200)]
    for text in texts:
        router.record("a", b"", text)
        held = router.num_held_bytes("a", b"", text)
        assert held == min(len(text) // 4 * 4, 40)  # what is kept of the newest text is its beginning
    lengths = {text: router.num_held_bytes("a", b"", text) for text in texts}
    assert 0 < len({text[:end] for text, length in lengths.items() for end in range(4, length + 1, 4)}) <= 10


def test_of_a_long_text_only_the_beginning_counts() -> None:
    router = PrefixRouter(["a"], RouterPolicy(block_bytes=4, max_blocks_of_text=3))
    router.record("a", b"", b"x" * 100)
    assert router.num_held_bytes("a", b"", b"x" * 100) == 12


def test_new_conversations_spread_and_stay_where_they_are() -> None:
    router = PrefixRouter(NAMES, POLICY)
    talks = [bytes([number]) * 40 for number in range(30)]
    idle = dict.fromkeys(NAMES, 0)
    places = []
    for talk in talks:
        places.append(router.choose(b"", talk, idle))
        router.record(places[-1], b"", talk)
    assert {places.count(name) for name in NAMES} == {10}
    assert [router.choose(b"", talk + b" and more", idle) for talk in talks] == places


def test_who_was_started_anew_holds_nothing() -> None:
    router = PrefixRouter(NAMES, POLICY)
    router.record("a", b"", b"abcdefgh")
    router.forget("a")
    assert router.num_held_bytes("a", b"", b"abcdefgh") == 0


def test_a_namespace_that_is_forgotten_leaves_the_others_as_they_are() -> None:
    router = PrefixRouter(NAMES, POLICY)
    for name in NAMES:
        for namespace in (b"alice", b"bob"):
            router.record(name, namespace, b"abcdefgh")
    router.forget_namespace(b"alice")
    for name in NAMES:
        assert router.num_held_bytes(name, b"alice", b"abcdefgh") == 0
        assert router.num_held_bytes(name, b"bob", b"abcdefgh") == 8


def test_no_replica_to_choose_from_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError):
        PrefixRouter(NAMES).choose(b"", b"", {})


def test_forgetting_a_namespace_is_no_use_of_the_others() -> None:
    router = PrefixRouter(["a"], RouterPolicy(block_bytes=4, max_blocks=3))
    for text in (b"kept", b"left", b"kept"):
        router.record("a", b"alice", text)
    router.record("a", b"bob", b"gone")
    router.forget_namespace(b"bob")
    router.record("a", b"alice", b"new1new2")
    assert router.num_held_bytes("a", b"alice", b"kept") == 4
    assert router.num_held_bytes("a", b"alice", b"left") == 0


def test_forgetting_a_namespace_looks_at_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any client may ask for it as often as it likes, and the event loop went through all blocks of all replicas."""
    router, dropped = PrefixRouter(["a"], RouterPolicy(block_bytes=4)), list[bytes]()
    for number in range(200):
        router.record("a", b"alice", b"%04d" % number)
    router.record("a", b"bob", b"gonetoo!")
    held = router._held["a"]
    monkeypatch.setattr(type(held), "__iter__", lambda self: pytest.fail("all blocks are looked through"))
    forget = type(held).__delitem__
    monkeypatch.setattr(type(held), "__delitem__", lambda self, block: (dropped.append(block), forget(self, block))[1])
    router.forget_namespace(b"bob")
    assert len(dropped) == 2 and len(held) == 200
    router.forget_namespace(b"bob")
    assert len(dropped) == 2
