"""Encode a prompt that goes on from an earlier one, without encoding all of it again; the ids are the same.

A text that begins like one that was encoded before keeps that one's ids up to a place where nothing joins what is
before with what comes after: before a single space between two ASCII letters. GPT-2's family of pre-tokenizers cuts
there whatever follows, and in SentencePiece no piece goes over it; the profile says whether a tokenizer is of these
kinds. Knows one tokenizer, and the latest texts of each namespace.
"""

from __future__ import annotations

import threading
import time
from array import array
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

MIN_CHARACTERS = 256  # shorter texts are encoded faster than looked up
MAX_CHARACTERS = 16 << 20  # remembered, of all namespaces

_LEFT = ("word", "1st a", "it's", "x\n\n a", "(a", "é b", "A,B", "  a", "a_b", "don't")
_RIGHT = ("be", "b's", "b1", "b\n\n", "b  c", "bé", "B.", "the end", "s", "b ")

Encode = Callable[[str, bool], tuple[list[int], list[int]]]
"""Ids of a text, and after how many of its characters each ends; the flag says that the text begins the prompt."""


@dataclass(frozen=True)
class SeamEncoding:
    """`ids` are the encoding of the text; the first `num_known` were known from an earlier one."""

    ids: list[int]
    num_known: int


@dataclass(frozen=True)
class _Known:
    ids: array[int]  # 4 bytes each, where a list of integers has 36
    ends: array[int]
    used_at: float


class SeamEncoder:
    """Any thread may use it. Nothing is found in another namespace's texts.

    Args:
        drops_space: whether the tokenizer puts a space before a text, so that a tail loses its own.
        clock: seconds; only differences count.
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
        self._texts: dict[bytes, list[str]] = {}  # sorted
        self._known: OrderedDict[tuple[bytes, str], _Known] = OrderedDict()
        self._num_characters = 0

    def encode(self, text: str, namespace: bytes = b"") -> SeamEncoding:
        """The ids of a rendered prompt."""
        if len(text) < MIN_CHARACTERS:
            return SeamEncoding(self._encode(text, True)[0], 0)
        with self._lock:
            known, num_common = self._nearest(namespace, text)
        cut, count = self._cut(known, text, num_common)
        if known is None or count == 0:
            ids, ends = self._encode(text, True)
        else:
            begin = cut + self._drops_space
            tail, tail_ends = self._encode(text[begin:], False)
            ids = known.ids[:count].tolist() + tail
            ends = known.ends[:count].tolist() + [begin + end for end in tail_ends]
        with self._lock:
            self._remember(namespace, text, _Known(array("i", ids), array("i", ends), self._clock()))
        return SeamEncoding(ids, count)

    def forget(self, namespace: bytes | None = None) -> None:
        """Forget a namespace's texts, or all."""
        with self._lock:
            for key in [key for key in self._known if namespace in (None, key[0])]:
                self._drop(key)

    def forget_unused(self, since: float) -> None:
        """Forget the texts that nobody sent since then, on the encoder's clock."""
        with self._lock:
            while self._known and next(iter(self._known.values())).used_at < since:
                self._drop(next(iter(self._known)))

    def _nearest(self, namespace: bytes, text: str) -> tuple[_Known | None, int]:
        """Of sorted texts, one of the two beside this one begins most like it; it, and in how many characters."""
        texts = self._texts.get(namespace, [])
        place = bisect_left(texts, text)
        best, most = None, 0
        for candidate in texts[max(place - 1, 0) : place + 1]:
            num_common = _num_common(candidate, text)
            if num_common > most:
                best, most = self._known[namespace, candidate], num_common
        return best, most

    def _cut(self, known: _Known | None, text: str, num_common: int) -> tuple[int, int]:
        """The last safe place in what is common, and how many ids are before it; zeros if there is none."""
        cut = text.rfind(" ", 1, max(num_common - 1, 1))
        while known is not None and cut > 0:
            if _is_letter(text[cut - 1]) and _is_letter(text[cut + 1]):
                count = bisect_right(known.ends, cut)
                if count and known.ends[count - 1] == cut:
                    return cut, count
            cut = text.rfind(" ", 1, cut)
        return 0, 0

    def _remember(self, namespace: bytes, text: str, known: _Known) -> None:
        key = (namespace, text)
        if key in self._known:
            self._known[key] = known
            self._known.move_to_end(key)
            return
        self._known[key] = known
        insort(self._texts.setdefault(namespace, []), text)
        self._num_characters += len(text)
        while self._num_characters > self._max_characters:
            self._drop(next(iter(self._known)))

    def _drop(self, key: tuple[bytes, str]) -> None:
        namespace, text = key
        del self._known[key]
        texts = self._texts[namespace]
        del texts[bisect_left(texts, text)]
        if not texts:
            del self._texts[namespace]
        self._num_characters -= len(text)


def is_safe(encode: Encode, *, drops_space: bool) -> bool:
    """Whether the encodings of both sides of such a space are the whole's, tried on what words may stand beside."""
    for left in _LEFT:
        for right in _RIGHT:
            before, after = encode(left, True)[0], encode(f" {right}"[drops_space:], False)[0]
            if encode(f"{left} {right}", True)[0] != before + after:
                return False
    return True


def _is_letter(character: str) -> bool:
    return character.isascii() and character.isalpha()


def has_cut(text: bytes) -> bool:
    """Whether a text has a place where texts are cut: a token that spells all of it would be cut, too."""
    return any(is_cut(text, at) for at in range(1, len(text)))


def is_cut(text: bytes, at: int) -> bool:
    """Whether nothing joins what is before `at` with what comes after: there a single space is between two letters.

    >>> [at for at in range(9) if is_cut(b"a b 1 c d", at)]
    [1, 7]
    """
    return text[at : at + 1] == b" " and text[at - 1 : at].isalpha() and text[at + 1 : at + 2].isalpha()


def _num_common(left: str, right: str) -> int:
    """In how many characters both begin alike, by bisection: each comparison is one memcmp."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left.startswith(right[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low
