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
        return cls(_merge_ranges(ranges), categories, is_negated, flags)

    def matches(self, letter: str) -> bool:
        """Return whether the class contains a character."""
        code = ord(letter)
        variants = _case_variants(code, self.flags) if self.flags & re.IGNORECASE else (code,)
        is_in = any(map(self._has, variants)) or any(
            _compile_category(each, self.flags & re.ASCII).match(letter) for each in self.categories
        )
        return is_in != self.is_negated

    def _has(self, code: int) -> bool:
        """Return whether `ranges` contain a code point."""
        index = bisect_right(self.ranges, code, key=itemgetter(0)) - 1
        return index >= 0 and code < self.ranges[index][1]


def _merge_ranges(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return ranges `[start, stop)` of code points as sorted and disjoint ones."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)


@cache  # six of them, with and without a flag
def _compile_category(source: str, flags: int) -> re.Pattern[str]:
    """Return the compiled expression of a category, such as `\\d`."""
    return re.compile(source, flags)


def _case_variants(code: int, flags: int) -> Iterable[int]:
    """Return the code points that match `code` if case is ignored, as in Python's `re`, with `code` itself."""
    if flags & re.ASCII:
        letter = chr(code)
        return {code, ord(letter.lower()), ord(letter.upper())} if letter.isascii() else (code,)
    lower: int = _sre.unicode_tolower(code)
    lowers = (lower, *_casefix._EXTRA_CASES.get(lower, ()))
    return {code, *lowers, *(other for each in lowers for other in _uppercase_of().get(each, ()))}


@cache  # takes some hundredths of a second, once
def _uppercase_of() -> Mapping[int, list[int]]:
    """Return, by lowercase code point, the other code points that have it as their lowercase."""
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
    _matching: dict[str, int] = field(default_factory=dict)
    _after: tuple[dict[int, int], ...] = field(default_factory=lambda: ({}, {}, {}))

    def positions_matching(self, letter: str) -> int:
        """Return the positions whose class contains a character, as bits."""
        found = self._matching.get(letter)
        if found is None:
            found = reduce(or_, (bits for leaf, bits in self._leaves.items() if leaf.matches(letter)), 0)
            _remember(self._matching, letter, found)
        return found

    def positions_after(self, positions: int, context: int) -> int:
        """Return the positions that can follow any of `positions` in a context, as bits."""
        found = self._after[context].get(positions)
        if found is None:
            found = reduce(or_, (self.moves[context].follow[each] for each in _positions_in(positions)), 0)
            _remember(self._after[context], positions, found)
        return found


@lru_cache(maxsize=16)
def automaton_of(patterns: tuple[str, ...], param: str = "stop_regex") -> Automaton:
    """Compile expressions to one automaton.

    Raises:
        InvalidParameter: one is invalid, matches an empty text, uses an unsupported feature, or they are too large
            together; `param` names the field.
    """
    trees = [_parse_pattern(pattern, param) for pattern in patterns]
    readers: list[_Reader] = []
    moves: list[Moves] = []
    for context in (INSIDE, LINE_START, TEXT_START):
        if readers and not readers[0].has_anchors:  # all contexts are the same
            moves.append(moves[0])
            continue
        reader = _Reader(context, param)
        readers.append(reader)
        parts = [reader.read(tree, tree.state.flags, pattern) for tree, pattern in zip(trees, patterns, strict=True)]
        for part, pattern in zip(parts, patterns, strict=True):
            if part.is_nullable:
                raise InvalidParameter(f"{param} has {pattern!r:.60}, which matches an empty text", param=param)
        first = reduce(or_, (part.first for part in parts), 0)
        moves.append(Moves(first, tuple(reader.follow), tuple(part.last for part in parts)))
    return Automaton(patterns, tuple(moves), readers[0].leaves)


class _Part(NamedTuple):
    """A part of an expression (Glushkov, 1961): whether it can be empty, and the positions where it begins and ends."""

    is_nullable: bool
    first: int
    last: int


_EMPTY, _NOTHING = _Part(True, 0, 0), _Part(False, 0, 0)


class _Reader:
    """Assigns positions to the characters of expressions, and records which can follow which in one context."""

    def __init__(self, context: int, param: str) -> None:
        self.follow: list[int] = []
        self.leaves: dict[CharacterClass, int] = {}
        self.has_anchors = False
        self._context, self._param, self._num_visits = context, param, 0
        self._pattern = ""

    def read(self, tree: Any, flags: int, pattern: str) -> _Part:
        """Assign positions to a whole expression, as Python's parser returned it; return its begin and end."""
        self._pattern = pattern
        try:
            return self._read_sequence(tree, flags)
        except RecursionError:
            raise self._unsupported("has groups in groups too deep") from None

    def _read_sequence(self, tree: Any, flags: int) -> _Part:
        """Return the part of consecutive items of Python's parsed expression."""
        part = _EMPTY
        for code, value in tree:
            part = self._concatenate(part, self._read_item(code, value, flags))
        return part

    def _read_item(self, code: Any, value: Any, flags: int) -> _Part:
        """Return the part of one item of Python's parsed expression: a code and its value."""
        self._count_visit()
        if code in (codes.MAX_REPEAT, codes.MIN_REPEAT):
            return self._read_repetition(value[0], value[1], value[2], flags)
        if code is codes.BRANCH:
            parts = [self._read_sequence(each, flags) for each in value[1]]
            return _Part(
                any(part.is_nullable for part in parts),
                reduce(or_, (part.first for part in parts), 0),
                reduce(or_, (part.last for part in parts), 0),
            )
        if code is codes.SUBPATTERN:
            _, added, removed, tree = value
            return self._read_sequence(tree, (flags | added) & ~removed)
        if code is codes.AT:
            self.has_anchors = True
            if value is codes.AT_BEGINNING and flags & re.MULTILINE:
                value = codes.AT_BEGINNING_LINE
            if value not in _HOLDS_AT:
                raise self._unsupported("has $, \\Z, \\b or \\B, which depend on what comes next")
            return _EMPTY if self._context in _HOLDS_AT[value] else _NOTHING
        if code in _REFUSED:
            raise self._unsupported(_REFUSED[code])
        return self._add_position(CharacterClass.of(code, value, flags))

    def _add_position(self, leaf: CharacterClass) -> _Part:
        """Return the part of one character, at a new position."""
        position = len(self.follow)
        if position == MAX_POSITIONS:
            raise self._size_error()
        self.follow.append(0)
        self.leaves[leaf] = self.leaves.get(leaf, 0) | 1 << position
        return _Part(False, 1 << position, 1 << position)

    def _read_repetition(self, least: int, most: int, tree: Any, flags: int) -> _Part:
        """Return `least` copies, and optional ones up to `most`; the last one loops if there is no upper bound."""
        is_endless = most is codes.MAXREPEAT
        part = _EMPTY
        for number in range(max(least, 1) if is_endless else most):
            self._count_visit()
            copy = self._read_sequence(tree, flags)
            if is_endless and number == max(least, 1) - 1:
                self._link(copy.last, copy.first)
            part = self._concatenate(part, copy if number < least else copy._replace(is_nullable=True))
        return part

    def _concatenate(self, before: _Part, after: _Part) -> _Part:
        """Return the part of `before` followed by `after`."""
        self._link(before.last, after.first)
        return _Part(
            before.is_nullable and after.is_nullable,
            before.first | (after.first if before.is_nullable else 0),
            after.last | (before.last if after.is_nullable else 0),
        )

    def _link(self, last: int, first: int) -> None:
        """Record that the positions `first` can follow each of the positions `last`."""
        if first:
            for position in _positions_in(last):
                self.follow[position] |= first

    def _count_visit(self) -> None:
        """Count an item that is read; raise if repetitions make an expression too large."""
        self._num_visits += 1
        if self._num_visits > _MAX_VISITS:
            raise self._size_error()

    def _unsupported(self, why: str) -> InvalidParameter:
        """Return the error for an expression with an unsupported feature."""
        message = f"{self._param} has {self._pattern!r:.60}, which {why}; leave that out"
        return InvalidParameter(message, param=self._param)

    def _size_error(self) -> InvalidParameter:
        """Return the error for expressions that are too large together."""
        return InvalidParameter(
            f"{self._param} is too large: repetitions written out, all expressions together may have {MAX_POSITIONS} "
            f"characters; the limit is passed in {self._pattern!r:.60}",
            param=self._param,
        )


def _parse_pattern(pattern: str, param: str) -> Any:
    """Return an expression as parsed by Python's `re`; raise InvalidParameter if it is invalid."""
    try:
        return parser.parse(pattern)
    except (re.error, OverflowError, RecursionError, ValueError) as error:
        raise InvalidParameter(f"{param} has {pattern!r:.60}, which is wrong: {error}", param=param) from None


def _positions_in(positions: int) -> Iterator[int]:
    """Yield the positions of a set of bits, in order."""
    while positions:
        lowest = positions & -positions
        yield lowest.bit_length() - 1
        positions ^= lowest


def _remember(known: dict[Any, int], key: object, value: int) -> None:
    """Add an entry to a cache, which is emptied if it is full."""
    if len(known) >= _MAX_REMEMBERED:
        known.clear()
    known[key] = value
