"""Encode a prompt that continues an earlier one by encoding only its new tail; the ids are the same.

The tail begins at a retokenization seam: a position in the text over which no token or merge extends. The seam is a
single space between two ASCII letters. GPT-2's family of pre-tokenizers always splits there, and no SentencePiece piece
extends over it. The profile says whether a tokenizer is of these kinds. A text that begins like an earlier one keeps
that one's ids up to the last common seam. Knows one tokenizer, and the latest texts of each namespace.
"""

from __future__ import annotations

import re
import threading
import time
from array import array
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from .errors import TooManyTokens

MIN_CHARACTERS = 256  # shorter texts are encoded faster than looked up
MAX_CHARACTERS = 16 << 20  # of remembered texts, over all namespaces
_SHARE = 2  # a namespace has at most 1/_SHARE of the characters, and beyond that forgets its own texts
_SAMPLE = (
    8  # more characters per token than texts have: a text that is much too long is refused after so many of its first
)

_BETWEEN_WORDS = re.compile(r"[A-Za-z] (?=[A-Za-z])")
_LEFT = ("word", "1st a", "it's", "x\n\n a", "(a", "é b", "A,B", "  a", "a_b", "don't")
_RIGHT = ("be", "b's", "b1", "b\n\n", "b  c", "bé", "B.", "the end", "s", "b ")


class Encode(Protocol):
    """A function that returns the ids of a text, and the number of its characters after which each ends.

    The flag is true if the text begins the prompt. It may raise TooManyTokens if there are more than `max_tokens`.
    """

    def __call__(
        self, text: str, is_start: bool, /, *, max_tokens: int | None = None
    ) -> tuple[list[int], list[int]]: ...


@dataclass(frozen=True)
class SeamEncoding:
    """An encoding: `ids` of the text, of which the first `num_known` were known from an earlier one."""

    ids: list[int]
    num_known: int


@dataclass(frozen=True)
class _KnownText:
    """The ids of a remembered text, the ends of its tokens, and the time of its last use."""

    ids: array[int]  # 4 bytes each; a list of integers has 36
    ends: array[int]
    used_at: float


@dataclass
class _NamespaceTexts:
    """The remembered texts of one namespace."""

    texts: list[str] = field(default_factory=list)  # sorted
    known: OrderedDict[str, _KnownText] = field(default_factory=OrderedDict)  # the oldest first
    num_characters: int = 0


class SeamEncoder:
    """An encoder that remembers texts by namespace. Any thread may use it; namespaces do not see each other.

    Args:
        drops_space: true if the tokenizer adds a space before a text, so that a tail must drop its own.
        clock: seconds; only differences matter.
    """

    def __init__(
        self,
        encode: Encode,
        *,
        drops_space: bool,
        max_characters: int = MAX_CHARACTERS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._encode, self._drops_space, self._max_characters = encode, drops_space, max_characters
        self._clock = clock
        self._lock = threading.Lock()
        self._namespaces: dict[bytes, _NamespaceTexts] = {}
        self._used: OrderedDict[tuple[bytes, str], None] = OrderedDict()  # of all namespaces, the oldest first
        self._num_characters = 0

    def encode(
        self, text: str, namespace: bytes = b"", *, max_tokens: int | None = None, remembers: bool = True
    ) -> SeamEncoding:
        """Return the ids of a rendered prompt; if it `remembers` the text, later texts can continue it.

        Raises:
            TooManyTokens: there are more than `max_tokens`; such a text is not remembered.
        """
        if len(text) < MIN_CHARACTERS:
            return SeamEncoding(self._encode_within(text, True, max_tokens)[0], 0)
        with self._lock:
            known, num_common = self._nearest(namespace, text)
        cut, count = self._cut(known, text, num_common)
        if known is None or count == 0:
            ids, ends = self._encode_within(text, True, max_tokens)
        else:
            begin = cut + self._drops_space
            room = None if max_tokens is None else max_tokens - count
            try:
                tail, tail_ends = self._encode_within(text[begin:], False, room)
            except TooManyTokens as error:
                raise TooManyTokens(count + error.num_tokens, count + error.max_tokens) from None
            ids = known.ids[:count].tolist() + tail
            ends = known.ends[:count].tolist() + [begin + end for end in tail_ends]
        if remembers:
            with self._lock:
                self._remember(namespace, text, _KnownText(array("i", ids), array("i", ends), self._clock()))
        return SeamEncoding(ids, count)

    def forget(self, namespace: bytes | None = None) -> None:
        """Forget a namespace's texts, or all."""
        with self._lock:
            for name in [name for name in self._namespaces if namespace in (None, name)]:
                for text in list(self._namespaces[name].known):
                    self._drop(name, text)

    def forget_unused(self, since: float) -> None:
        """Forget the texts that were last sent before `since`, on the encoder's clock."""
        with self._lock:
            while self._used:
                namespace, text = next(iter(self._used))
                if self._namespaces[namespace].known[text].used_at >= since:
                    break
                self._drop(namespace, text)

    @property
    def num_characters(self) -> int:
        """Number of characters of all remembered texts."""
        return self._num_characters

    def check(self) -> None:
        """Raise AssertionError unless the texts, their order of use and the counts of characters agree."""
        with self._lock:
            for own in self._namespaces.values():
                assert own.texts and own.texts == sorted(own.known), "a namespace without texts, or one in disorder"
                assert own.num_characters == sum(map(len, own.texts))
            used = {(name, text) for name, own in self._namespaces.items() for text in own.texts}
            assert used == self._used.keys(), "a text that would never be forgotten, or one that is no longer there"
            assert self._num_characters == sum(len(text) for _, text in used)

    def _encode_within(self, text: str, is_start: bool, max_tokens: int | None) -> tuple[list[int], list[int]]:
        """Encode as `Encode` does, but refuse a text that is much too long after encoding only its beginning.

        That costs no more than a text that fits.
        """
        if max_tokens is not None and len(text) > _SAMPLE * max_tokens:
            cut = _last_cut(text, _SAMPLE * max_tokens)
            if cut:
                self._encode_checked(text[:cut], is_start, max_tokens)
        return self._encode_checked(text, is_start, max_tokens)

    def _encode_checked(self, text: str, is_start: bool, max_tokens: int | None) -> tuple[list[int], list[int]]:
        """Encode a text. Raises TooManyTokens if there are more than `max_tokens`."""
        ids, ends = self._encode(text, is_start, max_tokens=max_tokens)
        if max_tokens is not None and len(ids) > max_tokens:
            raise TooManyTokens(len(ids), max_tokens)
        return ids, ends

    def _nearest(self, namespace: bytes, text: str) -> tuple[_KnownText | None, int]:
        """Return the remembered text with the longest common beginning, and its number of common characters.

        Texts are sorted, so it is one of the two neighbours of this one.
        """
        own = self._namespaces.get(namespace)
        best, most = None, 0
        if own is None:
            return best, most
        place = bisect_left(own.texts, text)
        for candidate in own.texts[max(place - 1, 0) : place + 1]:
            num_common = _num_common(candidate, text)
            if num_common > most:
                best, most = own.known[candidate], num_common
        return best, most

    def _cut(self, known: _KnownText | None, text: str, num_common: int) -> tuple[int, int]:
        """Return the last seam in the common beginning, and the number of ids before it; zeros if there is none."""
        cut = _last_cut(text, num_common)
        while known is not None and cut > 0:
            count = bisect_right(known.ends, cut)
            if count and known.ends[count - 1] == cut:
                return cut, count
            cut = _last_cut(text, cut + 1)
        return 0, 0

    def _remember(self, namespace: bytes, text: str, known: _KnownText) -> None:
        """Remember a text, and forget the oldest ones beyond the limits."""
        most = self._max_characters // _SHARE
        if len(text) > most:
            return
        own = self._namespaces.setdefault(namespace, _NamespaceTexts())
        if text not in own.known:
            insort(own.texts, text)
            own.num_characters += len(text)
            self._num_characters += len(text)
        own.known[text] = known
        own.known.move_to_end(text)
        self._used[namespace, text] = None
        self._used.move_to_end((namespace, text))
        while own.num_characters > most:
            self._drop(namespace, next(iter(own.known)))
        while self._num_characters > self._max_characters:
            self._drop(*next(iter(self._used)))

    def _drop(self, namespace: bytes, text: str) -> None:
        """Forget one text of a namespace."""
        own = self._namespaces[namespace]
        del own.known[text], self._used[namespace, text]
        del own.texts[bisect_left(own.texts, text)]
        own.num_characters -= len(text)
        self._num_characters -= len(text)
        if not own.texts:
            del self._namespaces[namespace]


def is_safe(encode: Encode, *, drops_space: bool) -> bool:
    """Return whether both sides of a seam can be encoded apart, tested on words that may be next to one."""
    for left in _LEFT:
        for right in _RIGHT:
            before, after = encode(left, True)[0], encode(f" {right}"[drops_space:], False)[0]
            if encode(f"{left} {right}", True)[0] != before + after:
                return False
    return True


def safe_cuts(text: str, length: int) -> Iterator[int]:
    """Yield seams that cut a text into parts of at most `length` characters, or longer ones without a seam."""
    begin = 0
    while len(text) - begin > length:
        cut = begin + _last_cut(text[begin : begin + length], length)
        if cut == begin:
            cut = next((at.start() + 1 for at in _BETWEEN_WORDS.finditer(text, begin + length - 2)), len(text))
        if cut >= len(text):
            return
        yield cut
        begin = cut


def _last_cut(text: str, length: int) -> int:
    """Return the last seam in the first `length` characters; 0 if there is none."""
    cut = text.rfind(" ", 1, max(length - 1, 1))
    while cut > 0 and not (_is_letter(text[cut - 1]) and _is_letter(text[cut + 1])):
        cut = text.rfind(" ", 1, cut)
    return max(cut, 0)


def _is_letter(character: str) -> bool:
    """Return whether a character is an ASCII letter."""
    return character.isascii() and character.isalpha()


def has_cut(text: bytes) -> bool:
    """Return whether a text has a seam: a token that spells all of it would be cut, too."""
    return any(is_cut(text, at) for at in range(1, len(text)))


def is_cut(text: bytes, at: int) -> bool:
    """Return whether `at` is a seam, which is a single space between two letters.

    >>> [at for at in range(9) if is_cut(b"a b 1 c d", at)]
    [1, 7]
    """
    return text[at : at + 1] == b" " and text[at - 1 : at].isalpha() and text[at + 1 : at + 2].isalpha()


def _num_common(left: str, right: str) -> int:
    """Return the number of common first characters, by bisection: each comparison is one memcmp."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left.startswith(right[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low
