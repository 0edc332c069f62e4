"""Make replies as a model may sample them: ids that spell a text, and often are not its encoding.

Knows a tokenizer's vocabulary; not prompts or caches.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from radixlm.tokenizer_fix import Tokenizer

Say = Callable[["Replies", str], list[int]]


class Replies:
    """Makes the ids of replies, without the end token; repeatable."""

    def __init__(self, tokenizer: Tokenizer, seed: int = 0) -> None:
        self._tokenizer = tokenizer
        self._random = random.Random(seed)
        special = tokenizer.profile.special_ids
        pieces: dict[bytes, list[int]] = {}
        for token_id in range(tokenizer.vocab_size):
            if token_id not in special and (spelled := tokenizer.token_bytes(token_id)):
                pieces.setdefault(spelled, []).append(token_id)
        self._pieces = pieces
        self._longest = max(map(len, pieces))

    def usual(self, text: str) -> list[int]:
        """Return the encoding of a text that continues inside a prompt."""
        return self._tokenizer.encode_inside(text)

    def split(self, text: str) -> list[int]:
        """Return ids that spell the text, drawn piece by piece: within words, over words, within characters.

        Half of all pieces are the longest there are, so that not all of a text is spelled in letters.
        """
        data, ids = text.encode(), list[int]()
        while data:
            lengths = [n for n in range(1, min(len(data), self._longest) + 1) if data[:n] in self._pieces]
            length = lengths[-1] if self._random.random() < 0.5 else self._random.choice(lengths)
            ids.append(self._random.choice(self._pieces[data[:length]]))
            data = data[length:]
        return ids

    def cut(self, ids: Sequence[int]) -> list[int]:
        """Return the first ids, at least two: a reply that ended at its limit."""
        return list(ids[: self._random.randint(2, max(2, len(ids) - 1))])

    def either(self, text: str) -> str:
        """Return the text with a space before it, or without."""
        return self._random.choice(["", " "]) + text


KINDS: Mapping[str, Say] = {
    "bare": lambda replies, text: replies.usual(text),
    "space": lambda replies, text: replies.usual(" " + text),
    "split": lambda replies, text: replies.split(replies.either(text)),
    "padded": lambda replies, text: replies.split(f"\n\n{text}\n"),
    "cut": lambda replies, text: replies.cut(replies.usual(replies.either(text))),
}
"""How replies begin: a word, a space; in any ids; with white space around; ended by their length, not by a token."""

ENDED = tuple(name for name in KINDS if name != "cut")  # by the end token
