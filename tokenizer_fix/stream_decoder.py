"""Text from tokens as they come, never a part of a character.

Knows bytes and UTF-8, not vocabularies. Nothing is decoded twice: `tokenizers.decoders.DecodeStream` holds
text back while it ends in U+FFFD, so that one wrong byte silences it until the next character, and it forgets
what it holds at the end; here the only state is the bytes of an unfinished character, at most three.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class StreamDecoder:
    """The text of a reply, piece by piece; `Tokenizer.stream` makes one.

    The concatenation of what `push` and `finish` return is `decode(prompt_ids + reply_ids)` without
    `decode(prompt_ids)`; with `swallow_leading_space`, also without one space at its beginning, which belongs
    to the prompt. If the prompt ends within a character, that whole character is the reply's. What is
    `healed` are the bytes that the prompt ends with beyond `prompt_ids`, and that the reply's ids begin with.
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
        """The text that `token_id` completes, often with earlier tokens; "" for special tokens.

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
        """U+FFFD for an unfinished character, if there is one, else ""."""
        text, self._pending = decode_utf8(self._pending, replace_each_byte=self._replace_each_byte, final=True)
        return self._without_leading_spaces(text)

    def state(self) -> tuple[int, int, bytes]:
        """What `restore` needs to go on from here."""
        return self._num_bytes_to_drop, self._num_spaces_to_drop, self._pending

    def restore(self, state: tuple[int, int, bytes]) -> None:
        """Go on from where `state` was asked for."""
        self._num_bytes_to_drop, self._num_spaces_to_drop, self._pending = state

    def _visible(self, token_id: int) -> bytes:
        return b"" if token_id in self._skipped_ids else self._spell(token_id)

    def _unfinished(self, prompt_ids: Sequence[int], tail: bytes) -> bytes:
        for token_id in reversed(prompt_ids):
            if len(tail) >= 3:  # the longest unfinished character
                break
            tail = self._visible(token_id) + tail
        return decode_utf8(tail, replace_each_byte=self._replace_each_byte)[1]

    def _without_leading_spaces(self, text: str) -> str:
        while text and self._num_spaces_to_drop:
            if text[0] != " ":
                self._num_spaces_to_drop = 0
                break
            text = text[1:]
            self._num_spaces_to_drop -= 1
        return text


def decode_all(spellings: Iterable[bytes], *, strips_leading_space: bool, replace_each_byte: bool) -> str:
    """What a `StreamDecoder` says in all, at once."""
    text, _ = decode_utf8(b"".join(spellings), replace_each_byte=replace_each_byte, final=True)
    return text[1:] if strips_leading_space and text.startswith(" ") else text


def decode_utf8(data: bytes, *, replace_each_byte: bool, final: bool = False) -> tuple[str, bytes]:
    """The text of `data`, and the bytes of an unfinished character at its end (none if `final`).

    Wrong bytes become U+FFFD: one for each byte, as SentencePiece does, or one for each longest beginning of
    a character, as byte-level decoders do (Unicode 15, section 3.9, "U+FFFD Substitution of Maximal
    Subparts").

    >>> decode_utf8(b"caf\\xc3", replace_each_byte=False)
    ('caf', b'\\xc3')
    """
    try:
        return data.decode(), b""
    except UnicodeDecodeError:
        return _decode_wrong_utf8(data, replace_each_byte, final)


def _decode_wrong_utf8(data: bytes, replace_each_byte: bool, final: bool) -> tuple[str, bytes]:
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
