"""Find the tokens of a model that hold a string by themselves, letters in either case.

Knows what tokens spell, not replies.
"""

from __future__ import annotations

import re
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt
from radixlm.tokenizer_fix import Tokenizer

from .text_search import lower

IntArray = npt.NDArray[np.intp]

_NUM_KEPT = 16  # answers, for clients that ask the same with each request
_BETWEEN = "\ud800"  # half a character, which no token spells


class TokenTexts:
    """The texts of a model's tokens; any thread may ask. They are spelled when first needed.

    Args:
        vocab_size: of what is sampled, at most the tokenizer's.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._holding_any = lru_cache(_NUM_KEPT)(
            lambda strings: np.unique(np.concatenate([self.holding(string) for string in strings]))
        )

    def prepare(self) -> None:
        """Spell all tokens here, and not in the engine's thread."""
        assert self._joined

    def holding_any(self, strings: tuple[str, ...]) -> IntArray:
        """Return the tokens whose own text has one of several strings, in order."""
        return self._holding_any(strings) if strings else np.empty(0, np.intp)

    def holding(self, string: str) -> IntArray:
        """Return the tokens whose own text has a string that is not empty, in order."""
        text, starts = self._joined
        found = [match.start() for match in re.finditer(re.escape("".join(map(lower, string))), text)]
        return np.unique(np.searchsorted(starts, found, side="right") - 1)

    @cached_property
    def _joined(self) -> tuple[str, npt.NDArray[np.int64]]:
        """What all tokens spell, in lower case, and where each begins; special tokens are no text."""
        special_ids, spell = self._tokenizer.profile.special_ids, self._tokenizer.token_bytes
        pieces = (b"" if each in special_ids else spell(each) for each in range(self._vocab_size))
        texts = ["".join(map(lower, piece.decode(errors="replace"))) + _BETWEEN for piece in pieces]
        lengths = np.fromiter(map(len, texts), np.int64, len(texts))
        return "".join(texts), np.cumsum(lengths) - lengths
