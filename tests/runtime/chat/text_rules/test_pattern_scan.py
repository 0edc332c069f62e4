"""A reply ends before the first match of a regular expression, however the text is cut: the same as Python's `re` says,
asked for each piece of the text in turn."""

from __future__ import annotations

import re
import time
from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from radixlm.runtime.chat.text_rules.pattern import MAX_POSITIONS, automaton_of
from radixlm.runtime.chat.text_rules.reply_text import Stops
from radixlm.runtime.chat.text_rules.text_search import PatternScan
from radixlm.runtime.errors import InvalidParameter

LETTERS = "abA\n"


def slow(text: str, patterns: list[str]) -> tuple[str, str | None]:
    """The text before the match that is complete first, the longest of those, and the expression that it is of."""
    compiled = [re.compile(pattern) for pattern in patterns]
    for end in range(1, len(text) + 1):
        for start in range(end):
            for each in compiled:
                if each.fullmatch(text, start, end):
                    return text[:start], each.pattern
    return text, None


def _repeated(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    signs = st.sampled_from(["*", "+", "?", "*?", "{2}", "{1,3}", "{0,2}", "{2,}", "{0}"])
    return st.builds(lambda part, sign: f"(?:{part}){sign}", inner, signs)


def _composed(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.builds(lambda *parts: "".join(parts), inner, inner),
        st.builds(lambda *parts: "(" + "|".join(parts) + ")", inner, inner),
        _repeated(inner),
        st.builds(lambda part, flag: f"(?{flag}:{part})", inner, st.sampled_from("ims")),
    )


LEAVES = ["a", "b", "A", r"\n", ".", "[ab]", "[^a]", "[a-z]", r"\w", r"\S", r"\s", "^", r"\A", "(?m:^)"]
patterns_of = st.recursive(st.sampled_from(LEAVES), _composed, max_leaves=6)


def _is_known(pattern: str) -> bool:
    try:
        automaton_of((pattern,))
    except InvalidParameter:
        return False
    return True


wanted = st.lists(patterns_of.filter(_is_known), min_size=1, max_size=3)


@given(st.lists(st.text(LETTERS, max_size=5), max_size=6), wanted)
@example(["ab", "c"], ["abc", "b"])
@example(["aa", "b"], ["a+b", "ab"])
@example(["\n", "a"], ["(?m:^)a"])
@example(["a\na"], ["a(?:(?m:^)|\n)a"])
def test_released_text_is_that_before_the_first_match(pieces: list[str], patterns: list[str]) -> None:
    found = Stops((), patterns)
    released = "".join(found.push(piece) for piece in pieces)
    matched = found.matched
    released += found.finish()
    assert (released, matched) == slow("".join(pieces), patterns)


@given(st.text(LETTERS, max_size=12), st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=3), wanted)
def test_strings_and_expressions_end_a_reply_together(text: str, strings: list[str], patterns: list[str]) -> None:
    found = Stops(strings, patterns)
    released = "".join(found.push(letter) for letter in text) + found.finish()
    assert released == slow(text, [*map(re.escape, strings), *patterns])[0]


@given(st.text(LETTERS, max_size=12), wanted)
def test_where_it_was_is_where_it_goes_on(text: str, patterns: list[str]) -> None:
    scan = PatternScan(patterns)
    states = [scan.state()]
    while len(states) <= len(text) and scan.push(text[len(states) - 1]) is None:
        states.append(scan.state())
    for place, state in enumerate(states):
        scan.restore(state)
        again = PatternScan(patterns)
        assert again.push(text[:place]) is None
        assert (scan.open_from, scan.push(text[place:])) == (again.open_from, again.push(text[place:]))


def test_no_more_is_held_back_than_may_become_a_match() -> None:
    stops = Stops((), [r"\n\d+\.$"[:-1]])
    assert [stops.push(piece) for piece in ("One\n", "1", "2", "x\n7", "\n")] == ["One", "", "", "\n12x", "\n7"]


@pytest.mark.parametrize("pattern", [r"(a+)+b", r"(a|a)*b", r"(a|aa)+b", r"(.*)*b", r"(x+x+)+y", r"(?:a?){60}a{60}b"])
def test_a_hostile_expression_delays_nobody(pattern: str) -> None:
    scan, text = PatternScan([pattern]), "ax" * 10_000
    begun = time.process_time()
    for at in range(0, len(text), 4):
        assert scan.push(text[at : at + 4]) is None
    assert time.process_time() - begun < 10.0  # `re` would not end today


def test_the_largest_expression_is_read_at_a_bounded_cost() -> None:
    begun = time.process_time()
    letters = "".join(chr(0x4E00 + number) for number in range(2000))  # no two alike: nothing can be remembered
    scan = PatternScan([f"(?:[^b]?){{{MAX_POSITIONS - 1}}}b"])
    assert scan.push(letters) is None
    assert time.process_time() - begun < 10.0


# Of letters beyond U+FFFF whose case does not count, Python finds some only alone in a class.
ODD_LETTERS = (
    "aAkK\u212a\u0130\u0131iI\u03c3\u03c2\u03a3\xdf\u1e9e\u01c4\u01c5\u01c6\u2126\u0345\u03b9\u1fbe\u4e00 _9\u0669-"
)
MEMBERS = st.one_of(
    st.sampled_from(ODD_LETTERS).map(re.escape),
    st.lists(st.sampled_from(ODD_LETTERS), min_size=2, max_size=2)
    .map(sorted)
    .map(lambda two: "-".join(map(re.escape, two))),
    st.sampled_from([r"\d", r"\W", r"\s", r"\S"]),
)


@given(
    st.sampled_from(["", "(?i)", "(?a)", "(?ai)", "(?s)"]),
    st.sampled_from(["[{}]", "[^{}]"]),
    st.lists(MEMBERS, min_size=1, max_size=4).map("".join),
)
def test_a_class_has_the_letters_that_it_has_for_python(flags: str, brackets: str, members: str) -> None:
    source = flags + brackets.format(members)
    taken = [letter for letter in ODD_LETTERS if PatternScan([source]).push(letter) is not None]
    assert taken == [letter for letter in ODD_LETTERS if re.fullmatch(source, letter)]


def test_no_class_of_a_client_is_compiled_by_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes through every letter of every range: six such classes took 27 s."""
    compiled: list[object] = []
    monkeypatch.setattr(re, "compile", lambda *arguments: compiled.append(arguments))
    ranges = "".join(f"{chr(0x300 + number)}-\uffff" for number in range(330))
    automaton = automaton_of((f"(?i)[{ranges}]", f"[^{ranges}]"))
    assert automaton.positions_matching("\u0400") == 1 and automaton.positions_matching("a") == 2
    assert not compiled


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(", "is wrong: missing )"),
        ("a*", "matches an empty text"),
        ("^", "matches an empty text"),
        ("(?m)^", "matches an empty text"),
        ("a|", "matches an empty text"),
        ("a$", "depend on what comes next"),
        (r"a\b", "depend on what comes next"),
        (r"a\Z", "depend on what comes next"),
        ("(?=a)b", "looks ahead or back"),
        ("(?<!a)b", "looks ahead or back"),
        (r"(a)\1", "refers to a group"),
        ("(?>a)b", "atomic"),
        ("a++", "possessive"),
        ("a{300}", "is too large"),
        ("(?:a{99}){99}", "is too large"),
        ("(?:(?:){9999}){9999}a", "is too large"),
        ("a{99999999999999999999}", "is wrong"),
    ],
)
def test_what_cannot_be_followed_is_refused(pattern: str, why: str) -> None:
    with pytest.raises(InvalidParameter, match=re.escape(why)) as refused:
        automaton_of((pattern,))
    assert refused.value.param == "stop_regex"


def test_groups_in_groups_are_read_or_refused() -> None:
    with suppress(InvalidParameter):
        automaton_of(("(" * 511 + "a" + ")" * 511,))


def test_the_limit_is_that_of_all_expressions_together() -> None:
    automaton_of(("a{128}", "b{128}"))
    with pytest.raises(InvalidParameter, match="too large"):
        automaton_of(("a{128}", "b{129}"))
