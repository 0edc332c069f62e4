"""Run the library's encoding beside other threads: none of them waits for a long text.

`tokenizers` keeps the interpreter to itself while it encodes one text, but not while it encodes a batch of one, whose
ids are the same. Knows texts and how many tokens they may have, not what a tokenizer does to them.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext

import tokenizers

from .errors import TooManyTokens

LONG_TEXT = 1 << 15  # characters, which take some 30 ms: shorter texts wait for nobody
# Encoded at once: each token takes some hundred bytes until its text's ids are read. A server has two prompts, one text
# to tokenize and one history to truncate at a time (server/lanes.py); these wait for none of each other here.
MAX_LONG_TEXTS = 4


class LongTextTurns:
    """Lets few long texts at a time be encoded by one or several encoders."""

    def __init__(self, num_texts: int = MAX_LONG_TEXTS) -> None:
        self._turns = threading.BoundedSemaphore(num_texts)

    def for_text(self, text: str) -> threading.BoundedSemaphore | nullcontext[None]:
        """What is to be held while `text` is encoded."""
        return self._turns if len(text) > LONG_TEXT else nullcontext()


class Encoder:
    """One tokenizer of the library; any thread may use it."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, turns: LongTextTurns) -> None:
        self._tokenizer, self._turns = tokenizer, turns

    def ids(self, text: str, *, max_tokens: int | None = None) -> list[int]:
        """The ids of valid Unicode; nothing is added to them.

        Raises:
            TooManyTokens: there are more than `max_tokens`.
        """
        with self._turns.for_text(text):
            return self._encoded(text, max_tokens).ids

    def ids_and_ends(self, text: str, *, max_tokens: int | None = None) -> tuple[list[int], list[int]]:
        """The ids, and after how many characters of the text each ends.

        Raises:
            TooManyTokens: as `ids`.
        """
        with self._turns.for_text(text):
            encoding = self._encoded(text, max_tokens)
            return encoding.ids, [end for _, end in encoding.offsets]

    def _encoded(self, text: str, max_tokens: int | None) -> tokenizers.Encoding:
        [encoding] = self._tokenizer.encode_batch([text], add_special_tokens=False)
        if max_tokens is not None and len(encoding) > max_tokens:  # before its ids become objects of Python
            raise TooManyTokens(len(encoding), max_tokens)
        return encoding
