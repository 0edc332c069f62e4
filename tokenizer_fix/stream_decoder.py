"""Decode tokens to text as they arrive, in whole characters only.

Knows bytes and UTF-8, not vocabularies. Nothing is decoded twice. `tokenizers.decoders.DecodeStream` holds text back
while it ends in U+FFFD, so that one wrong byte delays all text until the next character. It also drops held text at the
end. Here the only state is the bytes of an incomplete character, at most three.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class StreamDecoder:
    """A decoder of one reply's text; `Tokenizer.stream` creates it.

    The concatenation of all results of `push` and `finish` is `decode(prompt_ids + reply_ids)` without
    `decode(prompt_ids)`. With `swallow_leading_space`, one leading space, which belongs to the prompt, is removed, too.
    If the prompt ends within a character, that whole character is part of the reply. `healed` are bytes of the prompt
    after `prompt_ids`, with which the reply's ids begin.
    """

    def __init__(
        self,
        spell: Callable[[int], bytes],
        *,
        skipped_ids: Container[int],
        strips_leading_space: bool,
        replace_each_byte: bool,
        prompt_ids: Sequence[int] = (),
        swallow_leading_space: bool = False,
        healed: bytes = b"",
    ) -> None:
        self._spell = spell
        self._skipped_ids = skipped_ids
        self._replace_each_byte = replace_each_byte
        self._num_bytes_to_drop = len(healed)
        has_text = bool(healed) or any(self._visible(token_id) for token_id in prompt_ids)
        self._num_spaces_to_drop = int(strips_leading_space and not has_text) + int(swallow_leading_space)
        self._pending = self._unfinished(prompt_ids, healed)

    def push(self, token_id: int) -> str:
        """Return the text that `token_id` completes, often with earlier tokens; "" for special tokens.

        Raises InvalidTokenId, with nothing changed.
        """
        visible = self._visible(token_id)
        if self._num_bytes_to_drop:
            size = self._num_bytes_to_drop
            self._num_bytes_to_drop = max(0, size - len(visible))
            visible = visible[size:]
        data = self._pending + visible
        text, self._pending = decode_utf8(data, replace_each_byte=self._replace_each_byte)
        return self._without_leading_spaces(text) if self._num_spaces_to_drop else text

    def finish(self) -> str:
        """Return U+FFFD for an incomplete character, if there is one, else ""."""
        text, self._pending = decode_utf8(self._pending, replace_each_byte=self._replace_each_byte, final=True)
        return self._without_leading_spaces(text)

    def state(self) -> tuple[int, int, bytes]:
        """Return the state that `restore` needs to continue from here."""
        return self._num_bytes_to_drop, self._num_spaces_to_drop, self._pending

    def restore(self, state: tuple[int, int, bytes]) -> None:
        """Continue from the position at which `state` was called."""
        self._num_bytes_to_drop, self._num_spaces_to_drop, self._pending = state

    def _visible(self, token_id: int) -> bytes:
        """Return the bytes of a token; b"" for skipped special tokens."""
        return b"" if token_id in self._skipped_ids else self._spell(token_id)

    def _unfinished(self, prompt_ids: Sequence[int], tail: bytes) -> bytes:
        """Return the bytes of an incomplete character at the end of a prompt."""
        for token_id in reversed(prompt_ids):
            if len(tail) >= 3:  # the longest incomplete character
                break
            tail = self._visible(token_id) + tail
        return decode_utf8(tail, replace_each_byte=self._replace_each_byte)[1]

    def _without_leading_spaces(self, text: str) -> str:
        """Return text without the leading spaces that are still to be dropped."""
        while text and self._num_spaces_to_drop:
            if text[0] != " ":
                self._num_spaces_to_drop = 0
                break
            text = text[1:]
            self._num_spaces_to_drop -= 1
        return text


def decode_all(spellings: Iterable[bytes], *, strips_leading_space: bool, replace_each_byte: bool) -> str:
    """Return the text of a whole `StreamDecoder` at once."""
    text, _ = decode_utf8(b"".join(spellings), replace_each_byte=replace_each_byte, final=True)
    return text[1:] if strips_leading_space and text.startswith(" ") else text


def decode_utf8(data: bytes, *, replace_each_byte: bool, final: bool = False) -> tuple[str, bytes]:
    """Return the text of `data`, and the bytes of an incomplete character at its end (none if `final`).

    Wrong bytes become U+FFFD. With `replace_each_byte` there is one for each byte, as in SentencePiece. Otherwise there
    is one for each longest beginning of a character, as in byte-level decoders (Unicode 15, section 3.9, "U+FFFD
    Substitution of Maximal Subparts").

    >>> decode_utf8(b"caf\\xc3", replace_each_byte=False)
    ('caf', b'\\xc3')
    """
    try:
        return data.decode(), b""
    except UnicodeDecodeError:
        return _decode_wrong_utf8(data, replace_each_byte, final)


def _decode_wrong_utf8(data: bytes, replace_each_byte: bool, final: bool) -> tuple[str, bytes]:
    """Return the text of bytes that are not valid UTF-8, and those of an incomplete character."""
    text: list[str] = []
    start = 0
    while True:
        try:
            text.append(data[start:].decode())
            return "".join(text), b""
        except UnicodeDecodeError as error:
            wrong, end = start + error.start, start + error.end
            text.append(data[start:wrong].decode())
            if end == len(data) and error.reason == "unexpected end of data" and not final:
                return "".join(text), data[wrong:]
            text.append(REPLACEMENT * (end - wrong if replace_each_byte else 1))
            start = end
