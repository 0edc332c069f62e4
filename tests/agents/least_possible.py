"""How many tokens of a prompt any cache must compute: those behind the first byte that differs from all earlier texts.

Knows bytes and tokens' lengths, not how a cache works. What a model generated is an earlier text, too, but for the last
token of a reply, whose keys and values nobody has computed.
"""

from __future__ import annotations

from collections.abc import Sequence


class EarlierTexts:
    """The texts of one namespace.

    >>> earlier = EarlierTexts()
    >>> earlier.least([b"How", b" are", b" you?"])
    3
    >>> earlier.add([b"How", b" are", b" you?", b" Fine", b"<end>"])
    >>> earlier.least([b"How are", b" you? F", b"i", b"ne. And you?"])
    1
    """

    def __init__(self) -> None:
        self._texts: list[bytes] = []

    def least(self, prompt: Sequence[bytes]) -> int:
        """How many of a prompt's tokens cannot be had; the last is one, for the reply's first token is drawn of it."""
        text = b"".join(prompt)
        shared = max((_num_shared(text, each) for each in self._texts), default=0)
        end = num_held = 0
        for token in prompt:
            end += len(token)
            if end > shared:
                break
            num_held += 1
        return max(1, len(prompt) - num_held)

    def add(self, tokens: Sequence[bytes]) -> None:
        """Note a prompt and its reply."""
        self._texts.append(b"".join(tokens[:-1]))


def _num_shared(one: bytes, other: bytes) -> int:
    """Bytes that both begin with.

    >>> _num_shared(b"abcd", b"abxd"), _num_shared(b"ab", b"abc")
    (2, 2)
    """
    low, high = 0, min(len(one), len(other))
    while low < high:  # the longest n for which one[:n] == other[:n]
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
