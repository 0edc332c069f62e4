"""A lower bound of a text's number of tokens, from its length alone, so that a far too long text is not encoded.

A token has no more bytes than the longest of the vocabulary, unless the tokenizer drops some of the text before. Knows
what tokenizers may drop, not what a text says.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import tokenizers
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from .pieces import Kind, byte_alphabet

# Factors by which normal forms can shrink a text: the Kelvin sign's three bytes become ASCII's 'K', and mathematical
# letters have four bytes. ASCII text is unchanged.
_SHRINKS = {"NFC": 3, "NFD": 3, "NFKC": 4, "NFKD": 4, "Lowercase": 3}
_KEEPS = ("Prepend", "ByteLevel", "Metaspace", "Digits", "Split", "Sequence")
# Other parts can drop any amount: white space, accents, runs of unknown characters. The only guess here is that they
# keep a sixteenth of the bytes. A text of which they keep less is refused although it would fit.
_MAY_DROP = 16


@dataclass(frozen=True)
class TextBound:
    """The bound of one tokenizer.

    >>> TextBound(bytes_per_token=10, shrinks=3).fewest_tokens("a" * 95), TextBound(10, 3).fewest_tokens("é" * 95)
    (10, 7)
    """

    bytes_per_token: int  # at most, of the text after shrinking and dropping
    shrinks: int  # largest factor, if the text is not all ASCII
    drops: int = 1  # factor for any text
    unknown_bytes: bytes = b""  # bytes that no token spells, which are dropped

    def fewest_tokens(self, text: str) -> int:
        """Return a lower bound of the number of tokens of any encoding of the text."""
        factor = self.drops * (1 if text.isascii() else self.shrinks)
        num_bytes = len(text.encode().translate(None, delete=self.unknown_bytes))
        return -(-num_bytes // (self.bytes_per_token * factor))

    @classmethod
    def of(cls, tokenizer: tokenizers.Tokenizer, kind: Kind) -> TextBound:
        """Return the bound of a loaded tokenizer; takes a tenth of a second for a large vocabulary."""
        vocabulary: Mapping[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        added = tokenizer.get_added_tokens_decoder().values()
        parts = [*_parts(tokenizer.normalizer, "normalizers"), *_parts(tokenizer.pre_tokenizer, "pretokenizers")]
        keeps = all(map(_keeps, parts)) and not any(token.lstrip or token.rstrip for token in added)
        unknown = b""
        if kind == "byte_level_bpe":
            lengths = {len(piece) for piece in vocabulary}
            unknown = bytes(byte for letter, byte in byte_alphabet().items() if letter not in vocabulary)
        else:
            lengths = {len(piece.replace("▁", " ").encode()) for piece in vocabulary}
            # otherwise a run of them is one token
            keeps = keeps and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
        longest = max([1, *lengths, *(len(token.content.encode()) for token in added)])
        shrinks = max((_SHRINKS.get(str(part["type"]), 1) for part in parts), default=1)
        return cls(longest, shrinks, 1 if keeps else _MAY_DROP, unknown)


def _keeps(part: Mapping[str, object]) -> bool:
    """Return whether a normalizer or pre-tokenizer drops nothing beyond the factors of `_SHRINKS`."""
    if part["type"] == "Replace":  # such as SentencePiece's of ' ' by '▁', which its pieces spell as ' '
        pattern = part.get("pattern")
        return pattern == {"String": " "} and part.get("content") == "▁"
    if part["type"] in _SHRINKS:
        return True
    return part["type"] in _KEEPS and part.get("behavior") != "Removed"


def _parts(component: Normalizer | PreTokenizer | None, members: str) -> Iterator[Mapping[str, object]]:
    """Yield a tokenizer's normalizer or pre-tokenizer as in tokenizer.json; members of a Sequence one by one."""

    def walk(part: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
        yield part
        listed = part.get(members)
        for member in listed if isinstance(listed, list) else ():
            yield from walk(member)

    if component is not None:
        yield from walk(json.loads(component.__getstate__()))
