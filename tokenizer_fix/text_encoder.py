"""Encode text to ids: with or without special tokens, within a limit, and only the new tail if possible.

No thread waits for another one's long text. `tokenizers` holds the interpreter's lock while it encodes one text, but
not while it encodes a batch of one, whose ids are the same. Knows special tokens, bos, and a namespace's earlier texts;
not chats, completions or suffixes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cached_property

import tokenizers

from .errors import InvalidText, InvalidTokenizer, TooManyTokens
from .pieces import byte_alphabet
from .probe import twin_of
from .profile import TokenizerProfile
from .seam_encoder import SeamEncoder, SeamEncoding, has_cut, is_safe, safe_cuts
from .text_bound import TextBound

PART_CHARACTERS = 1 << 16  # characters encoded at once if a text can be cut: about 30 MB
MAX_UNCUT_CHARACTERS = 1 << 19  # characters if it cannot: about 250 MB
LONG_TEXT = 1 << 15  # characters, which take about 30 ms; shorter texts need no turn
# Number of long texts encoded at once: each token takes about a hundred bytes until its text's ids are read. A server
# encodes at most two prompts, one text to tokenize and one history to truncate at a time
# (server/work_queues.py). None of these waits for another here.
MAX_LONG_TEXTS = 4


class TextEncoder:
    """The text encoder of one tokenizer; any thread may use it.

    Args:
        parsing: the library's tokenizer, which finds special tokens in a text.
        turns: limit of long texts, which may be shared with other encoders.
        clock: seconds, for the age of unused texts.

    Raises:
        InvalidTokenizer: bos is to be added and there is none, or it is not in the vocabulary.
    """

    def __init__(
        self,
        parsing: tokenizers.Tokenizer,
        profile: TokenizerProfile,
        turns: LongTextTurns,
        *,
        bos_token_id: int | None = None,
        add_bos_token: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if bos_token_id is not None and not 0 <= bos_token_id < profile.vocab_size:
            raise InvalidTokenizer(f"bos_token_id {bos_token_id} is not below {profile.vocab_size}")
        if add_bos_token and bos_token_id is None:
            raise InvalidTokenizer("add_bos_token is set, but the model names no bos_token_id")
        self._parsing, self._profile = parsing, profile
        self._bos_token_id, self._add_bos_token = bos_token_id, add_bos_token
        self._turns, self._clock = turns, clock
        self._encoder = Encoder(parsing, turns)

    def ids(
        self, text: str, *, add_bos: bool | None = None, parse_special: bool = False, max_tokens: int | None = None
    ) -> list[int]:
        """Return the ids of a text; see `Tokenizer.encode`."""
        self.require_within(text, max_tokens)
        encoder = self._encoder if parse_special else Encoder(self._plain, self._turns)
        if parse_special and max_tokens is None:
            ids = self._ids_in_parts(text, encoder)
        else:
            ids = encoder.ids(text, max_tokens=max_tokens)
        if not parse_special:
            self._check_plain(ids)
        return self.with_bos(ids, add_bos)

    def _ids_in_parts(self, text: str, encoder: Encoder) -> list[int]:
        """Return the ids of a text that is encoded in parts, because the library takes half a kilobyte per token.

        Raises:
            InvalidText: it cannot be cut, and is too long for one part.
        """
        ids: list[int] = []
        begin = 0
        for cut in safe_cuts(text, PART_CHARACTERS) if self.has_seams and len(text) > PART_CHARACTERS else ():
            ids += encoder.ids(_within_one_part(text[begin:cut]))
            begin = cut + (self._profile.dummy_prefix != "none")  # because it adds a space before the rest
        return ids + encoder.ids(_within_one_part(text[begin:]))

    def ids_from_seam(
        self, text: str, namespace: bytes | None, *, max_tokens: int | None = None, remembers: bool = True
    ) -> SeamEncoding:
        """Return the ids of a text with special tokens, encoding only the tail after the namespace's earlier texts.

        Args:
            namespace: None encodes the whole text, and remembers nothing.
            remembers: true if later texts can continue this one.

        Raises:
            InvalidText, TooManyTokens: as `ids`.
        """
        if namespace is None or self._seam is None:
            return SeamEncoding(self.ids(text, parse_special=True, max_tokens=max_tokens), 0)
        self.require_within(text, max_tokens)
        return self._seam.encode(text, namespace, max_tokens=max_tokens, remembers=remembers)

    def ids_inside(self, text: str) -> list[int]:
        """Return the ids of a text that continues inside a section: nothing is normalized or added before it."""
        if self._profile.kind == "sentencepiece":
            return [token.id for token in self._parsing.model.tokenize(text.replace(" ", "▁"))]
        if self._profile.dummy_prefix == "none":
            return self._plain.encode(text, add_special_tokens=False).ids
        if text.startswith(" "):  # the space that is added before the rest
            return self._plain.encode(text[1:], add_special_tokens=False).ids
        letters = {byte: letter for letter, byte in byte_alphabet().items()}
        found = (self._parsing.token_to_id(letters[byte]) for byte in text.encode())
        return [token_id for token_id in found if token_id is not None]

    def with_bos(self, ids: list[int], add_bos: bool | None = None) -> list[int]:
        """Return the ids after a bos, if the model or `add_bos` asks for one and they have none."""
        if not (self._add_bos_token if add_bos is None else add_bos):
            return ids
        if self._bos_token_id is None:
            raise InvalidTokenizer("add_bos is set, but the model names no bos_token_id")
        return ids if ids[:1] == [self._bos_token_id] else [self._bos_token_id, *ids]

    def require_within(self, text: str, max_tokens: int | None) -> None:
        """Check a text before it is encoded.

        Raises:
            InvalidText: it has lone surrogates.
            TooManyTokens: its length alone shows that it has more than `max_tokens`.
        """
        checked(text)
        if max_tokens is None or len(text) * 4 <= max_tokens:
            return
        if (fewest := self._bound.fewest_tokens(text)) > max_tokens:
            raise TooManyTokens(fewest, max_tokens)

    @property
    def has_seams(self) -> bool:
        """True if no token extends over a seam, at which `is_cut` cuts a text."""
        return self._seam is not None

    def forget(self, namespace: bytes) -> None:
        """Forget the namespace's texts."""
        if self._seam is not None:
            self._seam.forget(namespace)

    def forget_unused(self, since: float) -> None:
        """Forget the texts that were last sent before `since`, on the clock."""
        if self._seam is not None:
            self._seam.forget_unused(since)

    @cached_property
    def _bound(self) -> TextBound:
        """The lower bound of tokens of a text."""
        return TextBound.of(self._parsing, self._profile.kind)

    @cached_property
    def _seam(self) -> SeamEncoder | None:
        """The encoder of tails; None if tokens can extend over a seam."""
        drops_space = self._profile.dummy_prefix != "none"
        crosses = self._profile.kind == "sentencepiece" and self._profile.pieces_cross_space
        crosses = crosses or any(has_cut(token.text.encode()) for token in self._profile.added_tokens)
        if crosses or not is_safe(self._encode_with_ends, drops_space=drops_space):
            return None
        return SeamEncoder(self._encode_with_ends, drops_space=drops_space, clock=self._clock)

    def _encode_with_ends(
        self, text: str, is_start: bool, max_tokens: int | None = None
    ) -> tuple[list[int], list[int]]:
        """Return ids of a text, with bos if it begins the prompt, and the ends of its tokens."""
        ids, ends = self._encoder.ids_and_ends(text, max_tokens=max_tokens)
        if is_start and self._add_bos_token and self._bos_token_id is not None and ids[:1] != [self._bos_token_id]:
            return [self._bos_token_id, *ids], [0, *ends]
        return ids, ends

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """The library's tokenizer for plain text, in which special tokens are text."""
        # The setting affects the whole tokenizer, and other threads may be encoding: a second one is made at first use.
        plain = twin_of(self._parsing)
        plain.encode_special_tokens = True
        return plain

    def _check_plain(self, ids: Sequence[int]) -> None:
        """Raise InvalidText if plain text became a special token."""
        # A vocabulary may hold a control token among its pieces, which the model can then find (T5's Unigram).
        wrong = self._profile.special_ids.intersection(ids) - {self._profile.unk_token_id}
        if wrong:
            text = self._parsing.id_to_token(min(wrong))
            raise InvalidText(f"the text holds {text!r}, which cannot be encoded as plain text here; remove it")


class LongTextTurns:
    """A limit of the long texts that one or several encoders encode at a time."""

    def __init__(self, num_texts: int = MAX_LONG_TEXTS) -> None:
        self._turns = threading.BoundedSemaphore(num_texts)

    def for_text(self, text: str) -> threading.BoundedSemaphore | nullcontext[None]:
        """Return the lock to hold while `text` is encoded and its ids are read; a null context for a short text."""
        return self._turns if len(text) > LONG_TEXT else nullcontext()


class Encoder:
    """One tokenizer of the library; any thread may use it."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, turns: LongTextTurns) -> None:
        self._tokenizer, self._turns = tokenizer, turns

    def ids(self, text: str, *, max_tokens: int | None = None) -> list[int]:
        """Return the ids of valid Unicode; nothing is added to them.

        Raises:
            TooManyTokens: there are more than `max_tokens`.
        """
        with self._turns.for_text(text):
            return self.encode(text, max_tokens).ids

    def ids_and_ends(self, text: str, *, max_tokens: int | None = None) -> tuple[list[int], list[int]]:
        """Return the ids, and the number of characters of the text after which each ends.

        Raises:
            TooManyTokens: as `ids`.
        """
        with self._turns.for_text(text):
            encoding = self.encode(text, max_tokens)
            return encoding.ids, [end for _, end in encoding.offsets]

    def encode(self, text: str, max_tokens: int | None = None) -> tokenizers.Encoding:
        """Return the library's encoding, which takes memory until it is dropped; for a long text, hold a turn.

        Raises:
            TooManyTokens: as `ids`.
        """
        [encoding] = self._tokenizer.encode_batch([text], add_special_tokens=False)
        if max_tokens is not None and len(encoding) > max_tokens:  # before its ids become Python objects
            raise TooManyTokens(len(encoding), max_tokens)
        return encoding


def _within_one_part(text: str) -> str:
    """Return a text that is short enough to be encoded at once. Raises InvalidText for others."""
    if len(text) > MAX_UNCUT_CHARACTERS:
        raise InvalidText(
            f"the text has {len(text)} characters without two words beside each other, at most {MAX_UNCUT_CHARACTERS} "
            "are encoded at once; send it in parts"
        )
    return text


def checked(text: str) -> str:
    """Return the text. Raises InvalidText if it has lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise InvalidText(
            f"character {error.start} of the text is the lone surrogate U+{code:04X}; send valid Unicode"
        ) from error
    return text
