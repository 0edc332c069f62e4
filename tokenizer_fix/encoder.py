"""Run the library's encoding beside other threads: no thread waits for another one's long text.

`tokenizers` keeps the interpreter to itself while it encodes one text, but not while it encodes a batch of one, whose
ids are the same. Knows texts and how many tokens they may have, not what a tokenizer does to them.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext

import tokenizers

from .errors import TooManyTokens

LONG_TEXT = 1 << 15  # characters, which take some 30 ms; shorter texts need no turn
# Encoded at once: each token takes some hundred bytes until its text's ids are read. A server has two prompts, one text
# to tokenize and one history to truncate at a time (server/lanes.py); none of these waits for another here.
MAX_LONG_TEXTS = 4


class LongTextTurns:
    """Lets few long texts at a time be encoded by one or several encoders."""

    def __init__(self, num_texts: int = MAX_LONG_TEXTS) -> None:
        self._turns = threading.BoundedSemaphore(num_texts)

    def for_text(self, text: str) -> threading.BoundedSemaphore | nullcontext[None]:
        """What a thread holds while it encodes `text` and reads the ids; nothing for a short text."""
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
            return self.encode(text, max_tokens).ids

    def ids_and_ends(self, text: str, *, max_tokens: int | None = None) -> tuple[list[int], list[int]]:
        """The ids, and after how many characters of the text each ends.

        Raises:
            TooManyTokens: as `ids`.
        """
        with self._turns.for_text(text):
            encoding = self.encode(text, max_tokens)
            return encoding.ids, [end for _, end in encoding.offsets]

    def encode(self, text: str, max_tokens: int | None = None) -> tokenizers.Encoding:
        """The library's encoding, which takes memory until it is dropped: for a long text, hold a turn meanwhile.

        Raises:
            TooManyTokens: as `ids`.
        """
        [encoding] = self._tokenizer.encode_batch([text], add_special_tokens=False)
        if max_tokens is not None and len(encoding) > max_tokens:  # before its ids become objects of Python
            raise TooManyTokens(len(encoding), max_tokens)
        return encoding
