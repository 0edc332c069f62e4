"""Profile a tokenizer: read tokenizer.json, and test what the tokenizer does to sample texts.

Knows one tokenizer, not the model. There is no table of known tokenizers: a property that is not found is absent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping

import tokenizers

from .errors import InvalidTokenizer
from .pieces import Kind
from .profile import AddedToken, DummyPrefix, TokenizerProfile

_SPACE_MARKS: Mapping[Kind, str] = {"byte_level_bpe": "Ġ", "sentencepiece": "▁", "wordpiece": " ", "other": " "}
# Possible characters before a prompt's last space: a letter, a digit, punctuation, brackets, a new line.
_BEFORE_SUFFIX = ("Hello", "a", "7", "Assistant:", "[/INST]", "### Response:", "?", ">", '"', "é", "a\n")
# Characters that normalizers change: accents, ligatures, wide letters, capitals, runs of spaces, ends, quotes.
_NORMALIZED = ("e\u0301", "é", "\ufb01", "\uff21", "A", "a  b", "a\tb", "a\nb", "a ", "\u00a0a", "“a”")


def load_tokenizer(tokenizer_json: str | bytes) -> tokenizers.Tokenizer:
    """Return the library's tokenizer without truncation, padding and dropout, which make encoding lossy or random.

    Raises:
        InvalidTokenizer: the library cannot read it.
    """
    try:
        if isinstance(tokenizer_json, bytes):
            tokenizer = tokenizers.Tokenizer.from_buffer(tokenizer_json)
        else:
            tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # the library raises bare Exception
        raise InvalidTokenizer(f"tokenizer.json cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None
    return tokenizer


def twin_of(tokenizer: tokenizers.Tokenizer, spell: Callable[[str], str] = str) -> tokenizers.Tokenizer:
    """Return a second tokenizer that shares the pieces in memory; `spell` renames its added tokens.

    Settings of one, such as `encode_special_tokens`, do not affect the other.
    """
    twin = tokenizers.Tokenizer(tokenizer.model)
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (part := getattr(tokenizer, name)) is not None:
            setattr(twin, name, part)
    added = tokenizer.get_added_tokens_decoder()
    twin.add_tokens([_spelled(added[token_id], spell) for token_id in sorted(added)])
    return twin


def _spelled(token: tokenizers.AddedToken, spell: Callable[[str], str]) -> tokenizers.AddedToken:
    """Return an added token with its text renamed."""
    return tokenizers.AddedToken(
        spell(token.content),
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=token.special,
    )


def profile_tokenizer(tokenizer_json: str | bytes) -> TokenizerProfile:
    """Return what the tokenizer does to text; takes a second for a large vocabulary.

    Raises:
        InvalidTokenizer: tokenizer.json does not parse.
    """
    tokenizer = load_tokenizer(tokenizer_json)
    try:
        return _Probe(tokenizer, json.loads(tokenizer_json)).profile()
    except (KeyError, TypeError, AttributeError) as error:  # read by the library, yet not as documented
        raise InvalidTokenizer(f"tokenizer.json has an unexpected form: {error!r}") from error


class _Probe:
    """Tests of one tokenizer on sample texts, which make its profile."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, document: dict[str, object]) -> None:
        self.tokenizer = tokenizer
        self.document = document
        self.model = _section(document, "model")
        self.vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        self.added = _added_tokens(document)
        self.byte_fallback = bool(self.model.get("byte_fallback")) and "<0x00>" in self.vocabulary
        self.kind = self._kind()
        self.space = _SPACE_MARKS[self.kind]

    def profile(self) -> TokenizerProfile:
        """Return the profile of the tokenizer."""
        template = self.tokenizer.encode("a").ids
        plain = self._ids("a")
        at = next((n for n in range(len(template)) if template[n : n + len(plain)] == plain), 0)
        dummy_prefix = self._dummy_prefix()
        return TokenizerProfile(
            kind=self.kind,
            model=str(self.model["type"]) if "type" in self.model else type(self.tokenizer.model).__name__,
            vocab_size=max(self.vocabulary.values(), default=-1) + 1,
            added_tokens=self.added,
            unk_token_id=self._unk_token_id(),
            byte_fallback=self.byte_fallback,
            normalizers=_types(self.document.get("normalizer"), "normalizers"),
            pre_tokenizers=_types(self.document.get("pre_tokenizer"), "pretokenizers"),
            normalizer_changes_text=any(map(self._is_changed, _NORMALIZED)),
            dummy_prefix=dummy_prefix,
            dummy_prefix_before_space=dummy_prefix != "none" and self._begins_with(" a", self.space * 2),
            decoding_strips_space=self._decoding_strips_space(),
            suffix_ids=self._suffix_ids(),
            pieces_cross_space=any(self._crosses_space(piece) for piece in self.vocabulary),
            template_prefix_ids=tuple(template[:at]),
            template_suffix_ids=tuple(template[at + len(plain) :]),
        )

    def _kind(self) -> Kind:
        """Return the alphabet of its pieces; "other" for an unknown one."""
        parts = {
            *_types(self.document.get("decoder"), "decoders"),
            *_types(self.document.get("pre_tokenizer"), "pretokenizers"),
        }
        if "ByteLevel" in parts:
            return "byte_level_bpe" if isinstance(self.tokenizer.model, tokenizers.models.BPE) else "other"
        if isinstance(self.tokenizer.model, tokenizers.models.WordPiece):
            return "wordpiece"
        writes_marks = "▁" in self._written("a b")
        models = (tokenizers.models.BPE, tokenizers.models.Unigram)
        return "sentencepiece" if writes_marks and isinstance(self.tokenizer.model, models) else "other"

    def _unk_token_id(self) -> int | None:
        """Return the id of the unknown token; None if there is none."""
        if isinstance(unk_id := self.model.get("unk_id"), int):  # the form of Unigram
            return unk_id
        return self.vocabulary.get(str(self.model.get("unk_token")))

    def _dummy_prefix(self) -> DummyPrefix:
        """Return the positions in a text at which the tokenizer adds a space."""
        if not self._begins_with("a", self.space):
            return "none"
        special = next((token for token in self.added if token.special), None)
        if special is None:
            return "text_start"
        pieces = self.tokenizer.encode(f"b{special.text}a", add_special_tokens=False).tokens
        after = "".join(pieces[pieces.index(special.text) + 1 :]) if special.text in pieces else ""
        return "every_section" if after.startswith(self.space) else "text_start"

    def _suffix_ids(self) -> tuple[int, ...]:
        """Return the tokens of a lone space at the end of a text."""
        found: dict[int, None] = {}  # used as an ordered set
        for text in _BEFORE_SUFFIX:
            *before, last = self._ids(text + " ") or [-1]
            is_space = last >= 0 and self.tokenizer.id_to_token(last) in (self.space, " ")
            if is_space and before == self._ids(text):
                found[last] = None
        return tuple(found)

    def _decoding_strips_space(self) -> bool:
        """Return whether decoding drops a space that begins the text."""
        if self.kind == "wordpiece":
            return True
        encoding = self.tokenizer.encode("b a", add_special_tokens=False)
        at = next((n for n, piece in enumerate(encoding.tokens) if n and piece.startswith(self.space)), None)
        return at is not None and not self.tokenizer.decode(encoding.ids[at:]).startswith(" ")

    def _is_changed(self, text: str) -> bool:
        """Return whether the normalizer changes a text, other than by a dummy prefix."""
        if self.tokenizer.normalizer is None:
            return False
        normalized = self.tokenizer.normalizer.normalize_str(text).replace(self.space, " ")
        return normalized not in (text, " " + text)  # a dummy prefix is not a change

    def _crosses_space(self, piece: str) -> bool:
        """Return whether a piece continues over the beginning of a word."""
        stem = piece.lstrip(self.space)
        return self.space in stem and not any(token.text == piece for token in self.added)

    def _ids(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def _begins_with(self, text: str, mark: str) -> bool:
        """Return whether the first token of a text begins with a mark."""
        return self._written(text).startswith(mark)

    def _written(self, text: str) -> str:
        """Return the pieces of a text, joined."""
        return "".join(self.tokenizer.encode(text, add_special_tokens=False).tokens)


def _section(document: Mapping[str, object], name: str) -> dict[str, object]:
    """Return a section of tokenizer.json. Raises InvalidTokenizer if it is not an object."""
    section = document[name]
    if not isinstance(section, dict):
        raise InvalidTokenizer(f'"{name}" of tokenizer.json is not an object')
    return section


def _added_tokens(document: Mapping[str, object]) -> tuple[AddedToken, ...]:
    """Return the added tokens of tokenizer.json."""
    listed = document.get("added_tokens") or []
    assert isinstance(listed, list)  # the library has read it
    tokens = (AddedToken(int(one["id"]), str(one["content"]), bool(one.get("special"))) for one in listed)
    return tuple(sorted(tokens, key=lambda token: token.id))


def _types(part: object, members: str) -> tuple[str, ...]:
    """Return the types of a normalizer, pre-tokenizer or decoder; members of a Sequence one by one."""

    def walk(part: object) -> Iterator[str]:
        if not isinstance(part, dict):
            return
        if part.get("type") != "Sequence":
            yield str(part.get("type"))
        for member in part.get(members) or ():
            yield from walk(member)

    return tuple(walk(part))
