"""Convert text to ids and back, with a model's own tokenizer.

Knows special tokens, bos and the appended suffix; not chat templates, requests or models.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

from .appended_suffix import PreparedPrompt, is_lone_space, keep_suffix, strip_completion, strip_suffix
from .errors import InvalidTokenizer, TooManyTokens
from .pieces import Pieces
from .probe import load_tokenizer, profile_tokenizer
from .profile import TokenizerProfile
from .spelled_prompt import MarkedPieces, SpelledPrompt
from .stream_decoder import StreamDecoder, decode_all
from .text_encoder import LongTextTurns, TextEncoder, checked
from .typed_specials import TypedSpecials, written_ids


class Tokenizer:
    """A model's tokenizer; any thread may use it.

    >>> tokenizer = Tokenizer(artifact.tokenizer_json)              # doctest: +SKIP
    >>> tokenizer.decode(tokenizer.encode("Hello"))                 # doctest: +SKIP
    'Hello'
    """

    def __init__(
        self,
        tokenizer_json: str | bytes,
        profile: TokenizerProfile | None = None,
        *,
        bos_token_id: int | None = None,
        add_bos_token: bool = False,
        template_texts: Iterable[str] = (),
        sought_texts: Iterable[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Load tokenizer.json; without a stored `profile` the tokenizer is profiled, which takes a second.

        Args:
            template_texts: texts that the chat template writes; added tokens in them are control tokens, special or
                not.
            sought_texts: texts that it looks for in messages.

        Raises:
            InvalidTokenizer: tokenizer.json does not parse, is of a kind that cannot be decoded, or bos is to be added
                and there is none.
        """
        parsing = load_tokenizer(tokenizer_json)
        self.profile = profile if profile is not None else profile_tokenizer(tokenizer_json)
        if self.profile.kind == "other":
            raise InvalidTokenizer(
                f"the tokenizer ({self.profile.model}) is neither byte-level BPE nor SentencePiece-like nor WordPiece; "
                "only those can be decoded token by token"
            )
        self.bos_token_id = bos_token_id
        self.add_bos_token = add_bos_token
        self._parsing = parsing
        self._turns = LongTextTurns()
        self._encoder = TextEncoder(
            parsing,
            self.profile,
            self._turns,
            bos_token_id=bos_token_id,
            add_bos_token=add_bos_token,
            clock=clock,
        )
        self._sought = tuple(sought_texts)
        self._special_ids = self.profile.special_ids
        self._pieces = Pieces(parsing, self.profile.kind, self.profile.byte_fallback, self.profile.vocab_size)
        self._control_ids = self._special_ids | written_ids(self.profile.added_tokens, template_texts)
        self._marked = MarkedPieces(self._pieces.spell, self._control_ids)

    @property
    def vocab_size(self) -> int:
        """Number of token ids; all ids are smaller.

        A model may have more rows of logits, which spell nothing.
        """
        return self.profile.vocab_size

    def encode(
        self, text: str, *, add_bos: bool | None = None, parse_special: bool = False, max_tokens: int | None = None
    ) -> list[int]:
        """Return the ids of `text`; `add_bos` overrides the model's setting, and never doubles an existing bos.

        Text that looks like a special token stays text unless `parse_special`. Other threads can run meanwhile.

        Raises:
            InvalidText: the text has lone surrogates, or plain text would become a special token.
            TooManyTokens: it has more than `max_tokens`; a text that is far too long is not encoded.
        """
        return self._encoder.ids(text, add_bos=add_bos, parse_special=parse_special, max_tokens=max_tokens)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Return the text of `ids`, as `tokenizers` does, except for wrong bytes of byte-fallback tokenizers.

        For one wrong byte, the library turns a whole run of byte tokens into U+FFFD. No character of a run is then
        certain before its end. Here, as in SentencePiece, only the wrong bytes become U+FFFD.

        Raises:
            InvalidTokenId: an id is outside the vocabulary.
        """
        skipped = self._special_ids if skip_special else frozenset[int]()
        return decode_all(
            (self._pieces.spell(token_id) for token_id in ids if token_id not in skipped),
            strips_leading_space=self.profile.decoding_strips_space,
            replace_each_byte=self.profile.byte_fallback,
        )

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, perhaps a part of a character.

        Raises:
            InvalidTokenId: the id is outside the vocabulary.
        """
        return self._pieces.spell(token_id)

    def spelled(self, ids: Sequence[int]) -> SpelledPrompt:
        """Return the bytes of an encoding, for matching by text; special tokens are marks.

        Raises:
            InvalidTokenId: an id is outside the vocabulary.
        """
        return SpelledPrompt(ids, self._marked.__getitem__, self._encoder.ids_inside, has_cuts=self._encoder.has_seams)

    def encode_inside(self, text: str) -> list[int]:
        """Return the ids of a text that continues inside a section: nothing is normalized or added before it.

        >>> tokenizer.encode_inside("Hello")     # Llama-2: no '▁' that the text does not have    # doctest: +SKIP
        [10994]
        """
        return self._encoder.ids_inside(text)

    def special_ids_in(self, text: str) -> frozenset[int]:
        """Return the special tokens whose text occurs in `text`, however that is encoded."""
        added = self.profile.added_tokens
        return frozenset(token.id for token in added if token.special and token.text and token.text in text)

    def stream(
        self,
        *,
        prompt_ids: Sequence[int] = (),
        swallow_leading_space: bool = False,
        healed: bytes = b"",
        shown_ids: frozenset[int] = frozenset(),
    ) -> StreamDecoder:
        """Return a decoder of the reply to `prompt_ids`; see StreamDecoder. Of special tokens it shows `shown_ids`.

        Raises:
            InvalidTokenId: a prompt id is outside the vocabulary.
        """
        return StreamDecoder(
            self._pieces.spell,
            skipped_ids=self._special_ids - shown_ids,
            strips_leading_space=self.profile.decoding_strips_space,
            replace_each_byte=self.profile.byte_fallback,
            prompt_ids=prompt_ids,
            swallow_leading_space=swallow_leading_space,
            healed=healed,
        )

    def render_typed(self, values: Sequence[Any], template: Callable[[Sequence[Any]], str]) -> tuple[str, bool]:
        """Render a template for `prepare_chat`, guarding control tokens typed by clients. Returns text and a flag.

        The flag says whether the text has guards. Guarded text of clients is never a control token. See
        `TypedSpecials.render`.

        Raises:
            InvalidText: the values are nested too deeply.
        """
        return self._typed.render(values, template)

    def prepare_chat(
        self,
        rendered: str,
        *,
        seam_of: bytes | None = None,
        has_marks: bool = False,
        max_tokens: int | None = None,
        strips_suffix: bool = True,
        remembers: bool = True,
    ) -> PreparedPrompt:
        """Prepare a chat as its template rendered it: special tokens parsed, bos not doubled, suffix stripped.

        Args:
            seam_of: a namespace; only the tail after its earlier texts is encoded, and the ids are the same.
            has_marks: the flag of `render_typed`.
            strips_suffix: False keeps the suffix in the prompt.
            remembers: true if later texts can continue this one.

        Raises:
            InvalidText: the text has lone surrogates, or guarded text cannot be encoded as text.
            TooManyTokens: as `encode`, before the suffix is stripped.
        """
        if has_marks:
            marked, rendered = checked(rendered), self._typed.unmark(rendered)
            self._encoder.require_within(rendered, max_tokens)
            ids, num_known = self._encoder.with_bos(self._typed.encode(marked, max_tokens=max_tokens)), 0
        else:
            encoding = self._encoder.ids_from_seam(rendered, seam_of, max_tokens=max_tokens, remembers=remembers)
            ids, num_known = encoding.ids, encoding.num_known
        end = strip_suffix if strips_suffix else keep_suffix
        return end(ids, rendered, self.profile.suffix_ids, num_known=num_known)

    def prepare_completion(
        self,
        text_or_ids: str | Sequence[int],
        *,
        parse_special: bool = True,
        seam_of: bytes | None = None,
        max_tokens: int | None = None,
        strips_suffix: bool = False,
    ) -> PreparedPrompt:
        """Prepare a raw prompt as written: bos is added to text if the model asks for it, and nothing to ids.

        Args:
            strips_suffix: true to drop the token of a lone space at its end, if that is one token and the reply can
                return the space.

        Raises:
            InvalidText, TooManyTokens: as `encode`.
            InvalidTokenId: an id is outside the vocabulary.
        """
        if isinstance(text_or_ids, str):
            text: str | None = text_or_ids
            ids, num_known = self._encode_completion(text_or_ids, parse_special, seam_of, max_tokens)
            before = text_or_ids[:-1] if text_or_ids.endswith(" ") else ""
        else:
            if max_tokens is not None and len(text_or_ids) > max_tokens:
                raise TooManyTokens(len(text_or_ids), max_tokens)
            text, num_known = None, 0
            ids = [self._pieces.check(token_id) for token_id in text_or_ids]
            before = self.decode(ids[-5:-1], skip_special=False)  # a character has at most four tokens
        kept = keep_suffix(ids, text, self.profile.suffix_ids, num_known=num_known)
        if not strips_suffix or not self._ends_in_suffix(ids) or not is_lone_space(before):
            return kept
        if text is not None:
            ids_before, _ = self._encode_completion(before, parse_special, seam_of, None, remembers=False)
            if ids_before != ids[:-1]:
                return kept
        return strip_completion(kept)

    def forget_texts(self, namespace: bytes) -> None:
        """Forget the texts that were encoded with this namespace as `seam_of`."""
        self._encoder.forget(namespace)

    def forget_unused_texts(self, since: float) -> None:
        """Forget texts encoded with `seam_of` that were last used before `since` on `clock`."""
        self._encoder.forget_unused(since)

    def _ends_in_suffix(self, ids: Sequence[int]) -> bool:
        """Return whether the ids end in the token of a lone space, after a token that is text."""
        has_text = any(token_id not in self._special_ids for token_id in ids[:-1])
        return has_text and ids[-1] in self.profile.suffix_ids

    def _encode_completion(
        self, text: str, parse_special: bool, seam_of: bytes | None, max_tokens: int | None, *, remembers: bool = True
    ) -> tuple[list[int], int]:
        """Return the ids of a completion's text, and the number known from earlier texts."""
        if not parse_special:
            return self.encode(text, max_tokens=max_tokens), 0
        encoding = self._encoder.ids_from_seam(text, seam_of, max_tokens=max_tokens, remembers=remembers)
        return encoding.ids, encoding.num_known

    @cached_property
    def _typed(self) -> TypedSpecials:
        """The renderer and encoder of conversations."""
        return TypedSpecials(self._parsing, self.profile.added_tokens, self._control_ids, self._turns, self._sought)
