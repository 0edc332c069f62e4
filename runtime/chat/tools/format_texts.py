"""Match and describe the texts of tool-call formats: as models write them, and as Lark grammars.

A slot is `{index}`, digits, or `{id}`, letters and digits that the model makes up. White space can be any, or missing,
if the text has some, between tags and around the punctuation of JSON. `"arguments"` and `"parameters"` are one name.

A *piece* of a text is a literal, or a variable part: white space, a slot, or one of these names. A *rule* is one line
`name: expression` of a Lark grammar; an *expression* is its right side, without the name.

Knows texts, special tokens and schemas, and Lark as llguidance reads it; not what a call looks like.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Final, Literal, NamedTuple

from ...errors import InvalidGrammar
from ..grammar import MAX_GRAMMAR_LENGTH

Specials = Sequence[tuple[str, int]]
"""Special tokens: the text of each, and its id."""

WHITE: Final = " \t\r\n"
MAX_WHITE: Final = 16  # characters in one place that a grammar allows
BLANK: Final = f"[ \\t\\r\\n]{{0,{MAX_WHITE}}}"

_SLOT: Final = re.compile(r"\{(index|id)\}")
_PATTERNS: Final = {"index": "[0-9]{1,3}", "id": "[a-zA-Z0-9]{9}"}  # of the text in them
_WRITTEN: Final = re.compile(r"[a-zA-Z0-9]*")
_WHITES: Final = re.compile(f"[{WHITE}]*")
_WORDS: Final = ("arguments", "parameters")
_MARK: Final = "\0"
_BLANKS: Final = re.compile(r"\s+|(?<=[{,:\[])(?=\")|(?<=\")(?=[,:}\]])|(?<=[>\]])(?=[<\[{])")
_PIECES: Final = re.compile(rf"({_MARK})|(?<=\")({'|'.join(_WORDS)})(?=\")")

# The white space that templates write when they render a call of an earlier turn: a call with the same white space
# is in the next prompt as it was generated, and its KV is reused.
AS_TEMPLATES_WRITE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

PieceKind = Literal["text", "blank", "index", "id", "word", "end of name"]


class Piece(NamedTuple):
    """A part of a text: a literal, or the kind of variable part."""

    kind: PieceKind
    text: str = ""

    @property
    def pattern(self) -> str:
        """The regular expression for this piece; empty for the end of a name."""
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


class PieceMatch(NamedTuple):
    """The result of matching the beginning of a text with pieces.

    Args:
        length: number of characters that match.
        is_whole: all pieces match; else the text was too short to tell.
        call_id: the text of the slot `{id}`.
    """

    length: int
    is_whole: bool
    call_id: str = ""


def filled(text: str, index: int, call_id: str) -> str:
    """Return the text with its slots filled."""
    return text.replace("{index}", str(index)).replace("{id}", call_id)


def cut_at_slots(text: str) -> list[tuple[str, str]]:
    """Return the texts between slots, each with the regular expression of the slot after it, or an empty one.

    >>> cut_at_slots(":{index}<args>")
    [(':', '[0-9]{1,3}'), ('<args>', '')]
    """
    pieces = _SLOT.split(text)
    return [(pieces[at], _PATTERNS[pieces[at + 1]] if at + 1 < len(pieces) else "") for at in range(0, len(pieces), 2)]


@cache
def loose(text: str) -> tuple[Piece, ...]:
    """Return a format's text as pieces: literals, slots, and blanks where a model can write any white space or none.

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
    """Return the pieces of a text as `loose` does, after one for white space before it."""
    return (Piece("blank"), *loose(text.strip()))


def pattern_of(pieces: tuple[Piece, ...]) -> str:
    """Return a regular expression for a text in these pieces."""
    return "".join(piece.pattern for piece in pieces)


def prefix_pattern(pieces: tuple[Piece, ...]) -> str:
    """Return a regular expression for every beginning of a text in these pieces, from empty to complete.

    >>> prefix_pattern((Piece("text", "ab"),))
    '(a(b)?)?'
    """
    pattern = ""
    for piece in reversed(pieces):
        for part in reversed([escaped(letter) for letter in piece.text] if piece.text else [piece.pattern]):
            pattern = f"({part}{pattern})?" if part else pattern
    return pattern


def lexeme_rule(name: str, pieces: tuple[Piece, ...], specials: Specials) -> list[str]:
    """Return the grammar rule `name`, alone in a list, for a text in pieces.

    It is one lexeme, or several if the text has special tokens.
    """
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


def match_pieces(held: str, pieces: tuple[Piece, ...], start: int = 0) -> PieceMatch | None:
    """Match `held`, from index `start` on, with a text in pieces; return how far they agree, or None if they differ.

    The match is not whole if `held` ends too early to tell. `held` can have more text after it, and is not copied.

    >>> text = loose("f:{index} <args>")
    >>> match_pieces("f:0<args>{", text), match_pieces("f:0 <ar", text), match_pieces("g", text)
    (PieceMatch(length=9, is_whole=True, call_id=''), PieceMatch(length=7, is_whole=False, call_id=''), None)
    """
    at, call_id = start, ""
    for kind, text in pieces:
        match kind:
            case "text":
                if not held.startswith(text, at):
                    return PieceMatch(len(held) - start, is_whole=False) if _may_become(held, at, text) else None
                at += len(text)
            case "blank":
                at += _num_matched(_WHITES, held, at)
            case "word":
                word = next((each for each in _WORDS if held.startswith(each, at)), None)
                if word is None:
                    may_be = any(_may_become(held, at, each) for each in _WORDS)
                    return PieceMatch(len(held) - start, is_whole=False) if may_be else None
                at += len(word)
            case "end of name":
                if at == len(held):
                    return PieceMatch(at - start, is_whole=False)
                if held[at].isalnum() or held[at] in "_-.":
                    return None
            case _:
                length = _num_matched(_WRITTEN, held, at)
                at += length
                if at == len(held):
                    return PieceMatch(at - start, is_whole=False)
                if not length:
                    return None
                call_id = held[at - length : at] if kind == "id" else call_id
    return PieceMatch(at - start, is_whole=True, call_id=call_id)


def _may_become(held: str, at: int, text: str) -> bool:
    """Return whether the rest of `held` from `at` is a proper beginning of `text`."""
    return len(held) - at < len(text) and text.startswith(held[at:])


def _num_matched(pattern: re.Pattern[str], held: str, at: int) -> int:
    """Return how many characters of `held` a pattern matches at `at`; it can match none."""
    found = pattern.match(held, at)
    return 0 if found is None else found.end() - at


def quoted(text: str, specials: Specials = ()) -> str:
    """Return a grammar expression for a literal text: in quotes, its special tokens by id; an empty text is `""`.

    >>> quoted("<call>now", [("<call>", 7)])
    '<[7]> "now"'
    """
    ids = dict(specials)
    return " ".join(
        f"<[{ids[piece]}]>" if piece in ids else json.dumps(piece, ensure_ascii=False)
        for piece in cut_at_specials(text, specials) or [""]
    )


def cut_at_specials(text: str, specials: Specials) -> list[str]:
    """Return the parts of a text, which is split before and after each special token; in order, without empty ones."""
    texts = sorted((special for special, _ in specials), key=len, reverse=True)
    if not texts:
        return [text] if text else []
    return [piece for piece in re.split(f"({'|'.join(map(re.escape, texts))})", text) if piece]


def escaped(text: str) -> str:
    """Return a text escaped so that it stands for itself in a regular expression of a grammar."""
    return "".join(
        "\\n" if char == "\n" else char if char.isalnum() or char in "_<> " or not char.isascii() else f"\\{char}"
        for char in text
    )


class Rules(list[str]):
    """Rules of a grammar, limited in size: schemas that refer to each other could fill all memory."""

    def __init__(self, rules: Iterable[str] = ()) -> None:
        super().__init__()
        self._num_characters = 0
        self.add(rules)

    def add(self, rules: Iterable[str]) -> None:
        """Append rules.

        Raises:
            InvalidGrammar: all rules together are longer than `MAX_GRAMMAR_LENGTH`.
        """
        for rule in rules:
            self.append(rule)
            self._num_characters += len(rule) + 1
            if self._num_characters > MAX_GRAMMAR_LENGTH:
                raise InvalidGrammar(
                    f"the schemas make a grammar of more than {MAX_GRAMMAR_LENGTH} characters; shorten them"
                )


def json_expression(schema: Mapping[str, Any], *, is_strict: bool, is_loose: bool = False) -> str:
    """Return the grammar expression for JSON that fits a schema, with the white space of templates; any if loose."""
    return f"%json {with_options(schema, is_strict=is_strict, **({} if is_loose else AS_TEMPLATES_WRITE))}"


def with_options(schema: Mapping[str, Any], *, is_strict: bool, **options: object) -> str:
    """Return the schema as JSON text, with the library's options for its enforcement."""
    options |= {"lenient": not is_strict, "coerce_one_of": not is_strict}
    return json.dumps({**schema, "x-guidance": options}, separators=(",", ":"))
