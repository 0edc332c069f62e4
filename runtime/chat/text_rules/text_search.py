"""Search for strings and regular expressions in a text that comes in pieces, and for strings in tokens.

A search tells from where on the text may still become a match. Knows strings, an automaton of expressions and what
tokens spell; not replies, nor what follows from a match. The automaton for strings is that of Aho and Corasick (1975,
"Efficient string matching"): it reads each character once, however many strings there are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from radixlm.tokenizer_fix import Tokenizer

from .pattern import INSIDE, LINE_START, TEXT_START, automaton_of

IntArray = npt.NDArray[np.intp]

_NUM_KEPT = 16  # results, for clients that send the same strings with each request
_BETWEEN = "\ud800"  # half a character, which no token spells
_Places = tuple[tuple[tuple[int, int], ...], int, int]


class Found(NamedTuple):
    """The position of a match: characters `[start, stop)` of the whole text, and the rule as requested."""

    stop: int
    start: int
    rule: str


def _unchanged(letter: str) -> str:
    """Return the letter unchanged."""
    return letter


def lower(letter: str) -> str:
    """Return the letter in lower case, if that is one letter.

    >>> lower("A"), lower("\\N{LATIN CAPITAL LETTER I WITH DOT ABOVE}") == "\\N{LATIN CAPITAL LETTER I WITH DOT ABOVE}"
    ('a', True)
    """
    small = letter.lower()
    return small if len(small) == 1 else letter


class StringScan:
    """Reads a text until one of `strings` is complete.

    The string that completes first is found, and of those completed by the same character the longest; so the result
    does not depend on how the text is cut into pieces.

    >>> scan = StringScan(("cab", "abc"))
    >>> scan.push("xa"), scan.open_from, scan.push("bcd")
    (None, 1, Found(stop=4, start=1, rule='abc'))

    Args:
        ignores_case: whether letters count as equal in both cases.
    """

    def __init__(self, strings: Sequence[str], *, ignores_case: bool = False) -> None:
        self._trie = _build_trie(tuple(strings), ignores_case)
        self._fold: Callable[[str], str] = lower if ignores_case else _unchanged
        self._node, self._num_read = 0, 0

    @property
    def open_from(self) -> int:
        """The start of the text that may still become one of the strings; the end of the text if there is none."""
        return self._num_read - self._trie.depths[self._node]

    def push(self, text: str, *, may_stop: bool = True) -> Found | None:
        """Read the next piece of text, up to the first string that it completes.

        A string that completes while stops are off is text. Returns None if the piece completes none.
        """
        node, nexts, fails, rules = self._node, self._trie.nexts, self._trie.fails, self._trie.rules
        for place, letter in enumerate(map(self._fold, text), start=1):
            while (found := nexts[node].get(letter)) is None and node:
                node = fails[node]
            node = found or 0
            if may_stop and (rule := rules[node]) is not None:
                self._node, self._num_read = node, self._num_read + place
                return Found(self._num_read, self._num_read - len(rule), rule)
        self._num_read += len(text)
        while node and not nexts[node]:  # a whole string is not held back, but its end may begin another
            node = fails[node]
        self._node = node
        return None

    def state(self) -> tuple[int, int]:
        """Return the value that `restore` needs to continue from here."""
        return self._node, self._num_read

    def restore(self, state: tuple[int, int]) -> None:
        """Rewind to an earlier `state`."""
        self._node, self._num_read = state


class _Trie(NamedTuple):
    """A trie with failure links (Aho and Corasick, 1975): nodes are beginnings of strings, 0 is the empty one."""

    nexts: list[dict[str, int]]
    fails: list[int]  # the longest other beginning that each one ends with
    depths: list[int]  # their lengths
    rules: list[str | None]  # the longest string that each one ends with


@lru_cache(maxsize=64)
def _build_trie(strings: tuple[str, ...], ignores_case: bool) -> _Trie:
    """Return the trie of some strings, in lower case if `ignores_case`."""
    trie = _Trie([{}], [0], [0], [None])
    for string in strings:
        node = 0
        for letter in map(lower, string) if ignores_case else string:
            if letter not in trie.nexts[node]:
                trie.nexts[node][letter] = len(trie.nexts)
                trie.nexts.append({})
                trie.depths.append(trie.depths[node] + 1)
                trie.fails.append(0)
                trie.rules.append(None)
            node = trie.nexts[node][letter]
        trie.rules[node] = trie.rules[node] or string
    order = [0]
    for node in order:  # by length: the suffix of each node is known before it
        for letter, longer in trie.nexts[node].items():
            order.append(longer)
            shorter = trie.fails[node]
            while node and shorter and letter not in trie.nexts[shorter]:
                shorter = trie.fails[shorter]
            trie.fails[longer] = trie.nexts[shorter].get(letter, 0) if node else 0
            trie.rules[longer] = trie.rules[longer] or trie.rules[trie.fails[longer]]
    return trie


class PatternScan:
    """Reads a text until a match of one of `patterns` is complete.

    The match that completes first is found, and of those that end there the longest; so the result does not depend on
    how the text is cut into pieces, and a repetition at the end of an expression matches as little as possible.

    >>> scan = PatternScan([r"\\n\\d+\\."])
    >>> scan.push("One\\n1"), scan.open_from, scan.push("2. two")
    (None, 3, Found(stop=7, start=3, rule='\\\\n\\\\d+\\\\.'))

    Raises:
        InvalidParameter: like `automaton_of`.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self._automaton = automaton_of(tuple(patterns))
        # starts of possible matches, and the positions that each can be at; the oldest first, and no
        # position twice: of two matches at the same position the longer is kept
        self._open: list[tuple[int, int]] = []
        self._num_read, self._context = 0, TEXT_START

    @property
    def open_from(self) -> int:
        """The start of the text that may still become a match; the end of the text if there is none."""
        return self._open[0][0] if self._open else self._num_read

    def push(self, text: str, *, may_stop: bool = True) -> Found | None:
        """Read the next piece of text, up to the first match that it completes.

        A match that completes while stops are off is text, and may continue. Returns None if the piece completes none.
        """
        automaton = self._automaton
        for letter in text:
            matching, context = automaton.positions_matching(letter), self._context
            left, still_open = matching, []
            for start, positions in self._open:
                if reached := automaton.positions_after(positions, context) & left:
                    still_open.append((start, reached))
                    left &= ~reached
            if begun := automaton.moves[context].first & left:
                still_open.append((self._num_read, begun))
            self._open, self._num_read = still_open, self._num_read + 1
            self._context = LINE_START if letter == "\n" else INSIDE
            if may_stop and still_open and (found := self._find_complete()) is not None:
                return found
        return None

    def state(self) -> _Places:
        """Return the value that `restore` needs to continue from here."""
        return tuple(self._open), self._num_read, self._context

    def restore(self, state: _Places) -> None:
        """Rewind to an earlier `state`."""
        still_open, self._num_read, self._context = state
        self._open = list(still_open)

    def _find_complete(self) -> Found | None:
        """Return the longest match that ends with the last character read; None if there is none."""
        last = self._automaton.moves[self._context].last
        for start, positions in self._open:
            for rule, ends in zip(self._automaton.patterns, last, strict=True):
                if positions & ends:
                    return Found(self._num_read, start, rule)
        return None


class TokenTexts:
    """The texts of a model's tokens, for any thread. They are decoded when first needed.

    Args:
        vocab_size: number of tokens that can be sampled, at most the tokenizer's.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._holding_any = lru_cache(_NUM_KEPT)(
            lambda strings: np.unique(np.concatenate([self.holding(string) for string in strings]))
        )

    def prepare(self) -> None:
        """Decode all tokens now, rather than on the engine's thread."""
        assert self._joined

    def holding_any(self, strings: tuple[str, ...]) -> IntArray:
        """Return the tokens whose own text contains one of several strings, in order."""
        return self._holding_any(strings) if strings else np.empty(0, np.intp)

    def holding(self, string: str) -> IntArray:
        """Return the tokens whose own text contains a string, which must not be empty, in order."""
        text, starts = self._joined
        found = [match.start() for match in re.finditer(re.escape("".join(map(lower, string))), text)]
        return np.unique(np.searchsorted(starts, found, side="right") - 1)

    @cached_property
    def _joined(self) -> tuple[str, npt.NDArray[np.int64]]:
        """The joined texts of all tokens, in lower case, and where each begins; special tokens are empty."""
        special_ids, spell = self._tokenizer.profile.special_ids, self._tokenizer.token_bytes
        pieces = (b"" if each in special_ids else spell(each) for each in range(self._vocab_size))
        texts = ["".join(map(lower, piece.decode(errors="replace"))) + _BETWEEN for piece in pieces]
        lengths = np.fromiter(map(len, texts), np.int64, len(texts))
        return "".join(texts), np.cumsum(lengths) - lengths
