"""Neither a stop string nor what follows it is ever released, however the text is cut."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st
from radixlm.runtime.chat.text_rules.reply_text import Stops

LETTERS = "ab"


def slow(text: str, stops: list[str], num_exempt: int = 0) -> tuple[str, str | None]:
    """The text before the stop string that is complete first, the longest of those, and which it is.

    Those that end within the first `num_exempt` characters are none.
    """
    for end in range(num_exempt + 1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    st.lists(st.text(LETTERS, max_size=5), max_size=8),
    st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=3),
)
@example(["ab", "c"], ["abc", "b"])
@example(["aaab"], ["aab"])
def test_released_text_is_that_before_the_first_stop(pieces: list[str], stops: list[str]) -> None:
    found = Stops(stops)
    released = "".join(found.push(piece) for piece in pieces)
    matched = found.matched
    released += found.finish()
    assert (released, matched) == slow("".join(pieces), stops)


@given(
    st.lists(st.text(LETTERS, max_size=5), max_size=4),
    st.lists(st.text(LETTERS, max_size=5), max_size=4),
    st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=3),
)
@example(["ab"], ["c"], ["ab", "abd"])  # complete before it may be found, and held back for the other
@example(["a"], ["b"], ["ab"])
def test_a_stop_that_is_complete_before_it_may_be_found_is_text(
    exempt: list[str], pieces: list[str], stops: list[str]
) -> None:
    found = Stops(stops)
    released = "".join(found.push(piece, may_stop=False) for piece in exempt)
    assert found.matched is None
    released += "".join(found.push(piece) for piece in pieces)
    matched = found.matched
    released += found.finish()
    assert (released, matched) == slow("".join([*exempt, *pieces]), stops, len("".join(exempt)))


@given(st.text(LETTERS, max_size=20), st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=3))
def test_no_more_is_held_back_than_may_become_a_stop(text: str, stops: list[str]) -> None:
    found = Stops(stops)
    released = found.push(text)
    if found.matched is None:
        held = text[len(released) :]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_text_passes_straight_through_without_stops() -> None:
    assert Stops([]).push("anything") == "anything"


def test_nothing_is_released_after_a_stop() -> None:
    stops = Stops(["X"])
    assert (stops.push("aXb"), stops.push("c"), stops.finish()) == ("a", "", "")
