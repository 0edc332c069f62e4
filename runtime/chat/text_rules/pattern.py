"""Match regular expressions with an automaton that reads each character once, whatever the expression.

The syntax is Python's, parsed by Python's own parser, without features that look back or ahead. The automaton is
Glushkov's (1961): one position for each character of the expression, and which can follow which. Python's `re` does not
match here: it can take exponential time, and cannot tell what may still become a match.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache, reduce
from operator import itemgetter, or_
from typing import Any, NamedTuple

import _sre  # type: ignore[import-not-found]  # how Python's expressions lower letters  # isort: skip
from re import _casefix, _constants as codes, _parser as parser  # type: ignore[attr-defined]  # isort: skip

from ...errors import InvalidParameter

MAX_POSITIONS = 256  # of all expressions of a request: the most work per character
_MAX_VISITS = 4096  # parts of expressions, repeated ones counted each time
_MAX_REMEMBERED = 1024
_CASED_STOP = 0x1E944  # no character beyond has a case

INSIDE, LINE_START, TEXT_START = range(3)
"""The context before a position: another character, the end of a line, or nothing."""

_HOLDS_AT = {  # anchors
    codes.AT_BEGINNING: {TEXT_START},
    codes.AT_BEGINNING_LINE: {LINE_START, TEXT_START},
    codes.AT_BEGINNING_STRING: {TEXT_START},
}
_CATEGORIES = {
    codes.CATEGORY_DIGIT: r"\d",
    codes.CATEGORY_NOT_DIGIT: r"\D",
    codes.CATEGORY_SPACE: r"\s",
    codes.CATEGORY_NOT_SPACE: r"\S",
    codes.CATEGORY_WORD: r"\w",
    codes.CATEGORY_NOT_WORD: r"\W",
}
_REFUSED = {
    codes.ASSERT: "looks ahead or back",
    codes.ASSERT_NOT: "looks ahead or back",
    codes.GROUPREF: "refers to a group",
    codes.GROUPREF_EXISTS: "refers to a group",
    codes.ATOMIC_GROUP: "has an atomic group",
    codes.POSSESSIVE_REPEAT: "has a possessive repetition",
    codes.FAILURE: "looks ahead or back",
}


@dataclass(frozen=True)
class CharacterClass:
    """A part of an expression that matches one character.

    Not compiled by `re`: Python compiles a class by visiting every letter of its ranges, and 16 classes of
    330 ranges took half a minute.

    Args:
        ranges: of code points, `[start, stop)`, sorted and disjoint.
        categories: such as `\\d`, whose characters are in the class, too.
        is_negated: the class has all other characters.
        flags: IGNORECASE and ASCII.
    """

    ranges: tuple[tuple[int, int], ...]
    categories: tuple[str, ...] = ()
    is_negated: bool = False
    flags: int = 0

    @classmethod
    def of(cls, code: Any, value: Any, flags: int) -> CharacterClass:
        """Return the class of a part of Python's parsed expression."""
        if code is codes.ANY:
            return (
                cls((), is_negated=True) if flags & re.DOTALL else cls(((ord("\n"), ord("\n") + 1),), is_negated=True)
            )
        flags &= re.IGNORECASE | re.ASCII
        if code is codes.IN:
            members = value
        else:
            assert code in (codes.LITERAL, codes.NOT_LITERAL), f"{code} is new"
            members = [(codes.NEGATE, None)] * (code is codes.NOT_LITERAL) + [(codes.LITERAL, value)]
        ranges = [(each[0], each[1] + 1) for kind, each in members if kind is codes.RANGE]
        ranges += [(each, each + 1) for kind, each in members if kind is codes.LITERAL]
        categories = tuple(_CATEGORIES[each] for kind, each in members if kind is codes.CATEGORY)
        is_negated = any(kind is codes.NEGATE for kind, _ in members)
        return cls(_merged(ranges), categories, is_negated, flags)

    def takes(self, letter: str) -> bool:
        """Return whether a character is in the class."""
        code = ord(letter)
        codes_alike = _alike(code, self.flags) if self.flags & re.IGNORECASE else (code,)
        is_in = any(map(self._has, codes_alike)) or any(
            _category(each, self.flags & re.ASCII).match(letter) for each in self.categories
        )
        return is_in != self.is_negated

    def _has(self, code: int) -> bool:
        place = bisect_right(self.ranges, code, key=itemgetter(0)) - 1
        return place >= 0 and code < self.ranges[place][1]


def _merged(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the same code points in sorted and disjoint ranges."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)


@cache  # six of them, with and without a flag
def _category(source: str, flags: int) -> re.Pattern[str]:
    return re.compile(source, flags)


def _alike(code: int, flags: int) -> Iterable[int]:
    """Return the code points that are one letter if case is ignored, as in Python's `re`."""
    if flags & re.ASCII:
        letter = chr(code)
        return {code, ord(letter.lower()), ord(letter.upper())} if letter.isascii() else (code,)
    lower: int = _sre.unicode_tolower(code)
    lowers = (lower, *_casefix._EXTRA_CASES.get(lower, ()))
    return {code, *lowers, *(other for each in lowers for other in _raised().get(each, ()))}


@cache  # takes some hundredths of a second, once
def _raised() -> Mapping[int, list[int]]:
    """Return the code points that lowercase to another one, by that one."""
    raised = defaultdict[int, list[int]](list)
    for code in range(_CASED_STOP):
        if (lower := _sre.unicode_tolower(code)) != code:
            raised[lower].append(code)
    return dict(raised)


class Moves(NamedTuple):
    """Sets of positions, as bits, in one context: those that begin a match, and those that can follow each."""

    first: int
    follow: tuple[int, ...]
    last: tuple[int, ...]  # those that complete a match, for each expression


@dataclass(frozen=True)
class Automaton:
    """All expressions of a request in one automaton.

    Attributes:
        patterns: as requested.
        moves: by context: `INSIDE`, `LINE_START`, `TEXT_START`.
    """

    patterns: tuple[str, ...]
    moves: tuple[Moves, ...]
    _leaves: dict[CharacterClass, int]  # the positions that match each class
    _takes: dict[str, int] = field(default_factory=dict)
    _behind: tuple[dict[int, int], ...] = field(default_factory=lambda: ({}, {}, {}))

    def taking(self, letter: str) -> int:
        """Return the positions that match a character."""
        found = self._takes.get(letter)
        if found is None:
            found = reduce(or_, (bits for leaf, bits in self._leaves.items() if leaf.takes(letter)), 0)
            _remember(self._takes, letter, found)
        return found

    def behind(self, positions: int, place: int) -> int:
        """Return the positions that can follow some of these."""
        found = self._behind[place].get(positions)
        if found is None:
            found = reduce(or_, (self.moves[place].follow[each] for each in _bits(positions)), 0)
            _remember(self._behind[place], positions, found)
        return found


@lru_cache(maxsize=16)
def automaton_of(patterns: tuple[str, ...], param: str = "stop_regex") -> Automaton:
    """Return the automaton of expressions.

    Raises:
        InvalidParameter: one is invalid, matches an empty text, uses an unsupported feature, or they are too large
            together; `param` names the field.
    """
    trees = [_parsed(pattern, param) for pattern in patterns]
    readers: list[_Reader] = []
    moves: list[Moves] = []
    for place in (INSIDE, LINE_START, TEXT_START):
        if readers and not readers[0].has_anchors:  # all contexts are the same
            moves.append(moves[0])
            continue
        reader = _Reader(place, param)
        readers.append(reader)
        parts = [reader.read(tree, tree.state.flags, pattern) for tree, pattern in zip(trees, patterns, strict=True)]
        for part, pattern in zip(parts, patterns, strict=True):
            if part.is_nullable:
                raise InvalidParameter(f"{param} has {pattern!r:.60}, which matches an empty text", param=param)
        first = reduce(or_, (part.first for part in parts), 0)
        moves.append(Moves(first, tuple(reader.follow), tuple(part.last for part in parts)))
    return Automaton(patterns, tuple(moves), readers[0].leaves)


class _Part(NamedTuple):
    """A part of an expression: whether it can be empty, and the positions that it begins and ends with."""

    is_nullable: bool
    first: int
    last: int


_EMPTY, _NOTHING = _Part(True, 0, 0), _Part(False, 0, 0)


class _Reader:
    """Assigns positions to the characters of expressions, and records which can follow which in one context."""

    def __init__(self, place: int, param: str) -> None:
        self.follow: list[int] = []
        self.leaves: dict[CharacterClass, int] = {}
        self.has_anchors = False
        self._place, self._param, self._num_visits = place, param, 0
        self._pattern = ""

    def read(self, tree: Any, flags: int, pattern: str) -> _Part:
        """Return the part of a whole expression."""
        self._pattern = pattern
        try:
            return self._joined(tree, flags)
        except RecursionError:
            raise self._refused("has groups in groups too deep") from None

    def _joined(self, tree: Any, flags: int) -> _Part:
        part = _EMPTY
        for code, value in tree:
            part = self._then(part, self._part(code, value, flags))
        return part

    def _part(self, code: Any, value: Any, flags: int) -> _Part:
        self._count_visit()
        if code in (codes.MAX_REPEAT, codes.MIN_REPEAT):
            return self._repeated(value[0], value[1], value[2], flags)
        if code is codes.BRANCH:
            parts = [self._joined(each, flags) for each in value[1]]
            return _Part(
                any(part.is_nullable for part in parts),
                reduce(or_, (part.first for part in parts), 0),
                reduce(or_, (part.last for part in parts), 0),
            )
        if code is codes.SUBPATTERN:
            _, added, removed, tree = value
            return self._joined(tree, (flags | added) & ~removed)
        if code is codes.AT:
            self.has_anchors = True
            if value is codes.AT_BEGINNING and flags & re.MULTILINE:
                value = codes.AT_BEGINNING_LINE
            if value not in _HOLDS_AT:
                raise self._refused("has $, \\Z, \\b or \\B, which depend on what comes next")
            return _EMPTY if self._place in _HOLDS_AT[value] else _NOTHING
        if code in _REFUSED:
            raise self._refused(_REFUSED[code])
        return self._leaf(CharacterClass.of(code, value, flags))

    def _leaf(self, leaf: CharacterClass) -> _Part:
        position = len(self.follow)
        if position == MAX_POSITIONS:
            raise self._too_large()
        self.follow.append(0)
        self.leaves[leaf] = self.leaves.get(leaf, 0) | 1 << position
        return _Part(False, 1 << position, 1 << position)

    def _repeated(self, least: int, most: int, tree: Any, flags: int) -> _Part:
        """Return `least` copies, and optional ones up to `most`; the last one loops if there is no upper bound."""
        is_endless = most is codes.MAXREPEAT
        part = _EMPTY
        for number in range(max(least, 1) if is_endless else most):
            self._count_visit()
            copy = self._joined(tree, flags)
            if is_endless and number == max(least, 1) - 1:
                self._link(copy.last, copy.first)
            part = self._then(part, copy if number < least else copy._replace(is_nullable=True))
        return part

    def _then(self, part: _Part, after: _Part) -> _Part:
        self._link(part.last, after.first)
        return _Part(
            part.is_nullable and after.is_nullable,
            part.first | (after.first if part.is_nullable else 0),
            after.last | (part.last if after.is_nullable else 0),
        )

    def _link(self, last: int, first: int) -> None:
        if first:
            for position in _bits(last):
                self.follow[position] |= first

    def _count_visit(self) -> None:
        self._num_visits += 1
        if self._num_visits > _MAX_VISITS:
            raise self._too_large()

    def _refused(self, why: str) -> InvalidParameter:
        message = f"{self._param} has {self._pattern!r:.60}, which {why}; leave that out"
        return InvalidParameter(message, param=self._param)

    def _too_large(self) -> InvalidParameter:
        return InvalidParameter(
            f"{self._param} is too large: repetitions written out, all expressions together may have {MAX_POSITIONS} "
            f"characters; the limit is passed in {self._pattern!r:.60}",
            param=self._param,
        )


def _parsed(pattern: str, param: str) -> Any:
    try:
        return parser.parse(pattern)
    except (re.error, OverflowError, RecursionError, ValueError) as error:
        raise InvalidParameter(f"{param} has {pattern!r:.60}, which is wrong: {error}", param=param) from None


def _bits(positions: int) -> Iterator[int]:
    while positions:
        lowest = positions & -positions
        yield lowest.bit_length() - 1
        positions ^= lowest


def _remember(known: dict[Any, int], key: object, value: int) -> None:
    if len(known) >= _MAX_REMEMBERED:
        known.clear()
    known[key] = value
