"""How many tokens a text has at least, by its length alone: what is far too long is never encoded.

A token stands for no more bytes than the longest of the vocabulary spells, unless the tokenizer drops some of the text
before it looks for tokens. Knows what tokenizers may drop, not what a text says.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import tokenizers
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from .pieces import Kind, byte_alphabet

# By which factor normal forms may shrink a text: 'K' of three bytes is one of ASCII, mathematical letters have four.
# Texts of ASCII they leave as they are.
_SHRINKS = {"NFC": 3, "NFD": 3, "NFKC": 4, "NFKD": 4, "Lowercase": 3}
_KEEPS = ("Prepend", "ByteLevel", "Metaspace", "Digits", "Split", "Sequence")
# Other parts drop as much as they like: white space, accents, runs of unknown characters. That they keep a sixteenth of
# the bytes is a guess, and the only one here; a text of which they keep less is refused though it would fit.
_MAY_DROP = 16


@dataclass(frozen=True)
class TextBound:
    """Of one tokenizer.

    >>> TextBound(bytes_per_token=10, shrinks=3).fewest_tokens("a" * 95), TextBound(10, 3).fewest_tokens("é" * 95)
    (10, 7)
    """

    bytes_per_token: int  # of what is left of a text, at most
    shrinks: int  # by this factor at most, if it is more than ASCII
    drops: int = 1  # by this factor in any case
    unknown_bytes: bytes = b""  # nothing spells them: they are dropped

    def fewest_tokens(self, text: str) -> int:
        """No encoding of the text has fewer."""
        factor = self.drops * (1 if text.isascii() else self.shrinks)
        num_bytes = len(text.encode().translate(None, delete=self.unknown_bytes))
        return -(-num_bytes // (self.bytes_per_token * factor))

    @classmethod
    def of(cls, tokenizer: tokenizers.Tokenizer, kind: Kind) -> TextBound:
        """The bound of what `load_tokenizer` gave; takes a tenth of a second for a large vocabulary."""
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
            keeps = keeps and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))  # else all in a row are one
        longest = max([1, *lengths, *(len(token.content.encode()) for token in added)])
        shrinks = max((_SHRINKS.get(str(part["type"]), 1) for part in parts), default=1)
        return cls(longest, shrinks, 1 if keeps else _MAY_DROP, unknown)


def _keeps(part: Mapping[str, object]) -> bool:
    """Whether a normalizer or pre-tokenizer drops nothing, but for what `_SHRINKS` says."""
    if part["type"] == "Replace":  # as SentencePiece's of ' ' by '▁', which its pieces spell as ' '
        pattern = part.get("pattern")
        return pattern == {"String": " "} and part.get("content") == "▁"
    if part["type"] in _SHRINKS:
        return True
    return part["type"] in _KEEPS and part.get("behavior") != "Removed"


def _parts(component: Normalizer | PreTokenizer | None, members: str) -> Iterator[Mapping[str, object]]:
    """A tokenizer's normalizer or pre-tokenizer as in tokenizer.json, those in a Sequence one by one."""

    def walk(part: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
        yield part
        listed = part.get(members)
        for member in listed if isinstance(listed, list) else ():
            yield from walk(member)

    if component is not None:
        yield from walk(json.loads(component.__getstate__()))
