"""Texts that formats write, as a model may write them: with slots, and with other white space.

A slot is `{index}`, digits, or `{id}`, letters and digits that the model thinks of. White space may be any, or missing,
where the text has some and around the punctuation of JSON. `"arguments"` and `"parameters"` are one name. Knows how a
text begins, not what it means.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Final, Literal, NamedTuple

from .lark import Specials, cut_at_specials, escaped, quoted

WHITE: Final = " \t\r\n"
MAX_WHITE: Final = 16  # characters in one place, of what a grammar allows
BLANK: Final = f"[ \\t\\r\\n]{{0,{MAX_WHITE}}}"

_SLOT: Final = re.compile(r"\{(index|id)\}")
_PATTERNS: Final = {"index": "[0-9]{1,3}", "id": "[a-zA-Z0-9]{9}"}  # of what is written in them
_WRITTEN: Final = re.compile(r"[a-zA-Z0-9]*")
_WORDS: Final = ("arguments", "parameters")
_MARK: Final = "\0"
_BLANKS: Final = re.compile(r"\s+|(?<=[{,:\[])(?=\")|(?<=\")(?=[,:}\]])")
_PIECES: Final = re.compile(rf"({_MARK})|(?<=\")({'|'.join(_WORDS)})(?=\")")

PieceKind = Literal["text", "blank", "index", "id", "word", "end of name"]


class Piece(NamedTuple):
    """A part of a text: literal, or what `kind` says."""

    kind: PieceKind
    text: str = ""

    @property
    def pattern(self) -> str:
        """A regular expression for it."""
        match self.kind:
            case "text":
                return escaped(self.text)
            case "blank":
                return BLANK
            case "word":
                return f"({'|'.join(_WORDS)})"
            case "end of name":
                return ""
        return _PATTERNS[self.kind]


END_OF_NAME: Final = Piece("end of name")


class Fit(NamedTuple):
    """How much of a text's beginning is there.

    Args:
        length: characters that fit.
        is_whole: all of it is there; else the text was too short to tell.
        call_id: what `{id}` is.
    """

    length: int
    is_whole: bool
    call_id: str = ""


def filled(text: str, index: int, call_id: str) -> str:
    """A text with its slots filled."""
    return text.replace("{index}", str(index)).replace("{id}", call_id)


def cut_at_slots(text: str) -> list[tuple[str, str]]:
    """The texts between slots, each with the regular expression of the slot behind it, or none.

    >>> cut_at_slots(":{index}<args>")
    [(':', '[0-9]{1,3}'), ('<args>', '')]
    """
    pieces = _SLOT.split(text)
    return [(pieces[at], _PATTERNS[pieces[at + 1]] if at + 1 < len(pieces) else "") for at in range(0, len(pieces), 2)]


@cache
def loose(text: str) -> tuple[Piece, ...]:
    """The pieces of a text, with the white space that a model may write in it.

    >>> [piece.text or piece.kind for piece in loose('{"name": "')]
    ['{', 'blank', '"name"', 'blank', ':', 'blank', '"']
    """
    pieces: list[Piece] = []
    for number, part in enumerate(_SLOT.split(text)):
        if number % 2:
            pieces.append(Piece("index" if part == "index" else "id"))
            continue
        for each in _PIECES.split(_BLANKS.sub(_MARK, part)):
            if each == _MARK:
                pieces.append(Piece("blank"))
            elif each:
                pieces.append(Piece("word") if each in _WORDS else Piece("text", each))
    return tuple(pieces)


def loose_after_white(text: str) -> tuple[Piece, ...]:
    """The same, with white space before it."""
    return (Piece("blank"), *loose(text.strip()))


def pattern_of(pieces: tuple[Piece, ...]) -> str:
    """A regular expression for a text in these pieces."""
    return "".join(piece.pattern for piece in pieces)


def prefix_pattern(pieces: tuple[Piece, ...]) -> str:
    """A regular expression for all that a text in these pieces begins with, from nothing to all of it.

    >>> prefix_pattern((Piece("text", "ab"),))
    '(a(b)?)?'
    """
    pattern = ""
    for piece in reversed(pieces):
        for part in reversed([escaped(letter) for letter in piece.text] if piece.text else [piece.pattern]):
            pattern = f"({part}{pattern})?" if part else pattern
    return pattern


def lexemes(name: str, pieces: tuple[Piece, ...], specials: Specials) -> list[str]:
    """A rule of a grammar for a text in pieces: one lexeme, or several where it has special tokens."""
    parts: list[tuple[Piece, ...] | str] = [()]
    for piece in pieces:
        for text in cut_at_specials(piece.text, specials) if piece.text else [""]:
            if text in dict(specials):
                parts += [text, ()]
            else:
                parts[-1] = (*parts[-1], piece._replace(text=text))
    if len(parts) == 1:
        pattern = pattern_of(pieces)
        return [f"{name}[lazy]: /{pattern}/" if pattern else f'{name}: ""']
    written = []
    for part in parts:
        if isinstance(part, str):
            written.append(quoted(part, specials))
        elif part:
            is_blank = all(piece.kind == "blank" for piece in part)
            written.append("WS?" if is_blank else f"/{pattern_of(part)}/")
    return [f"{name}: {' '.join(written)}"]


def fit(held: str, pieces: tuple[Piece, ...]) -> Fit | None:
    """How `held` begins with a text in these pieces; None if it does not.

    >>> text = loose("f:{index} <args>")
    >>> fit("f:0<args>{", text), fit("f:0 <ar", text), fit("g", text)
    (Fit(length=9, is_whole=True, call_id=''), Fit(length=7, is_whole=False, call_id=''), None)
    """
    at, call_id = 0, ""
    for kind, text in pieces:
        rest = held[at:]
        match kind:
            case "text":
                if not rest.startswith(text):
                    return Fit(len(held), is_whole=False) if text.startswith(rest) else None
                at += len(text)
            case "blank":
                at += len(rest) - len(rest.lstrip(WHITE))
            case "word":
                word = next((each for each in _WORDS if rest.startswith(each)), None)
                if word is None:
                    may_be = any(each.startswith(rest) for each in _WORDS)
                    return Fit(len(held), is_whole=False) if may_be else None
                at += len(word)
            case "end of name":
                if not rest:
                    return Fit(at, is_whole=False)
                if rest[0].isalnum() or rest[0] in "_-.":
                    return None
            case _:
                found = _WRITTEN.match(rest)
                written = found[0] if found is not None else ""
                at += len(written)
                if at == len(held):
                    return Fit(at, is_whole=False)
                if not written:
                    return None
                call_id = written if kind == "id" else call_id
    return Fit(at, is_whole=True, call_id=call_id)


def overlap(text: str, tag: str) -> int:
    """The length of the longest end of `text` that `tag` begins with."""
    return next((n for n in range(min(len(text), len(tag)), 0, -1) if text.endswith(tag[:n])), 0)
