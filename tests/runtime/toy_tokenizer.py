"""A tokenizer of few letters and many overlapping pieces, so that texts have many spellings and often meet.

Its merges are BPE's, so that what is put behind a text changes the text's last tokens. Every byte is a token, too.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

from radixlm.tokenizer_fix import SpelledPrompt
from radixlm.tokenizer_fix.spelled_prompt import MARK, special_mark

BOS, END, USER, MODEL = range(4)
SPECIALS = frozenset((BOS, END, USER, MODEL))
LETTERS = ("a", "b", " ", "é")
_FIRST_BYTE, _FIRST_PIECE = 10, 300


def _pieces() -> list[bytes]:
    """Two thirds of all words of two to four letters: from each of the others some merges lead nowhere."""
    words = ["".join(letters) for size in (1, 2, 3, 4) for letters in itertools.product(LETTERS, repeat=size)]
    kept = [word for word in words if len(word) == 1 or random.Random(word).random() < 0.6]
    random.Random(4).shuffle(kept)  # their order is that of the merges
    return [word.encode() for word in kept if len(word.encode()) > 1]


PIECES = _pieces()
ID_OF = {bytes([byte]): _FIRST_BYTE + byte for byte in range(256)} | {
    piece: _FIRST_PIECE + rank for rank, piece in enumerate(PIECES)
}
BYTES_OF = {token_id: piece for piece, token_id in ID_OF.items()}
LONGEST = max(map(len, ID_OF))


def spell(token_id: int) -> bytes:
    is_text = token_id not in SPECIALS and MARK not in BYTES_OF[token_id]
    return BYTES_OF[token_id] if is_text else special_mark(token_id)


def spell_all(ids: Sequence[int]) -> bytes:
    return b"".join(map(spell, ids))


def decode(ids: Sequence[int]) -> str:
    """The text of a reply, as its client gets it."""
    return b"".join(map(BYTES_OF.__getitem__, ids)).decode(errors="replace")


def encode(text: str) -> list[int]:
    """The merge of lowest rank first, the leftmost of equals."""
    parts = [bytes([byte]) for byte in text.encode()]
    while True:
        merges = [
            (ID_OF[left + right], at)
            for at, (left, right) in enumerate(itertools.pairwise(parts))
            if left + right in ID_OF
        ]
        if not merges:
            return [ID_OF[part] for part in parts]
        at = min(merges)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def split(text: bytes, lengths: Sequence[int]) -> list[int]:
    """Other ids of the same bytes: pieces of up to the next of `lengths`, which are used round."""
    ids, at = [], 0
    for length in itertools.cycle(lengths):
        if at == len(text):
            return ids
        width = next(width for width in range(min(length, len(text) - at), 0, -1) if text[at : at + width] in ID_OF)
        ids.append(ID_OF[text[at : at + width]])
        at += width
    raise AssertionError


def spelled(ids: Sequence[int]) -> SpelledPrompt:
    return SpelledPrompt(tuple(ids), spell, encode)
