"""However many children spell nearly the same, the one whose tokens go the farthest along a text is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st
from radixlm.runtime.cache.spelled_children import SpelledChildren

PIECES = st.lists(st.sampled_from([b"a", b"b", b"ab", b"ba", b"aab"]), min_size=1, max_size=6)


@dataclass(frozen=True)
class Child:
    node_id: int
    pieces: tuple[bytes, ...]

    def spelled_page(self, spell: Callable[[int], bytes]) -> tuple[bytes, int]:
        return b"".join(self.pieces), sum(1 << end for end in self.ends())

    def ends(self) -> list[int]:
        return list(accumulate(map(len, self.pieces), initial=0))

    def reach(self, text: bytes) -> int:
        page = b"".join(self.pieces)
        return max(end for end in self.ends() if text.startswith(page[:end]))


@given(st.lists(PIECES, min_size=1, max_size=40), PIECES)
def test_the_likeliest_child_goes_as_far_as_any(pages: list[list[bytes]], pieces: list[bytes]) -> None:
    text = b"".join(pieces)
    children = [Child(number, tuple(page)) for number, page in enumerate(pages)]
    spelled = SpelledChildren[Child](lambda token_id: b"")
    for child in children:
        spelled.add(child)
    found = list(spelled.like(text))
    assert max((child.reach(text) for child, _ in found), default=0) == max(child.reach(text) for child in children)
    assert all(most is None or child.reach(text) == most for child, most in found)
    for child in children:
        spelled.remove(child)
    assert not list(spelled.like(text))


def test_one_of_many_regenerated_replies_is_found_by_where_its_tokens_end() -> None:
    children = [Child(number, (b"The", b" tr", b"ee %d" % number)) for number in range(100)]
    children.append(Child(100, (b"The", b" tree", b"s")))
    spelled = SpelledChildren[Child](lambda token_id: b"")
    for child in children:
        spelled.add(child)
    *_, (likeliest, most) = spelled.like(b"The treetop")
    assert (likeliest.node_id, most) == (100, 8)
