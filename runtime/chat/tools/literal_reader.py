"""Convert literals that come in pieces to JSON: names without quotes, Python's strings and words, Gemma's quotes.

Knows how literals are written, not what they mean.
"""

from __future__ import annotations

import json
import math
import re
from typing import Final

from ..scan import overlap
from .arguments import StepReader
from .schema_types import string

_WORDS: Final = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_BRACKETS: Final = {"(": "{", ")": "}", "{": "{", "}": "}", "[": "[", "]": "]"}
_JOINTS: Final = {"=": ": ", ":": ": "}
_BARE: Final = re.compile(r"[^\s,=:(){}\[\]'\"<]+")
_CUT_NUMBER: Final = re.compile(r"-?(\d+(\.\d*)?([eE][-+]?\d*)?)?", re.ASCII)
_KEY: Final = re.compile(r"[^,=:(){}\[\]]+")  # names in schemas can have spaces
_ESCAPED: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_CODES: Final = {"x": 2, "u": 4, "U": 8}  # digits after an escape


class LiteralReader(StepReader):
    """Reads the text between two brackets. Of repeated arguments only the first is used.

    Args:
        quote: around strings, which are not escaped; None: Python's quotes and escapes.
    """

    def __init__(self, quote: str | None) -> None:
        super().__init__()
        self._quotes = ("'", '"') if quote is None else (quote,)
        self._is_raw = quote is not None
        self._quote: str | None = None  # of the current string
        self._comma = ""
        self._open: list[str] = []  # brackets, innermost last
        self._names, self._is_known = set[str](), False  # names of arguments; whether the current one came before
        self._is_named = False  # the name before the next value was read

    def finish(self) -> str:
        """Return the JSON of the text that is held back at the end of a reply; empty for a begun quote or escape.

        A begun word is read as `true`, `false` or `null` if it can become that, else as a number or a string. Strings
        and brackets are not closed.
        """
        held, self.rest = self.rest, ""
        if self._is_known:
            return ""
        if self._quote is None:
            word = held.strip()
            if not word or any(quote.startswith(word) for quote in self._quotes):
                return ""
            if self._is_key:
                return self._comma + string(word)[:-1]
            known = next((json for said, json in _WORDS.items() if said.startswith(word)), None)
            begun = known[: len(word)] if known else word if _CUT_NUMBER.fullmatch(word) else string(word)[:-1]
            return self._comma + begun
        if self._is_raw:
            return string(held[: len(held) - overlap(held, self._quote)])[1:-1]
        return ""

    # Each reads one element of `held`, and returns its JSON and the number of characters read: 0 if it needs more text.

    def _next(self, held: str) -> tuple[str, int]:
        written, length = self._read_string_piece(held) if self._quote is not None else self._read_token(held)
        return "" if self._is_known else written, length

    def _read_token(self, held: str) -> tuple[str, int]:
        """Return the next element outside strings as JSON, and the number of characters read: 0 if it needs more text.

        That is white space, a comma, the sign after a name, a bracket, an opening quote, or a word without quotes.
        White space is left out, and a comma comes before the next element.
        """
        if not held:
            return "", 0
        if held[0].isspace():
            return "", 1
        if held[0] == ",":
            self._comma, self._is_known = ", ", self._is_known and len(self._open) > 1
            return "", 1
        if held[0] in _JOINTS:
            self._is_named = True
            return _JOINTS[held[0]], 1
        if held[0] in _BRACKETS:
            return self._read_bracket(_BRACKETS[held[0]]), 1
        for quote in self._quotes:
            if held.startswith(quote):
                self._quote = quote
                return self._after_comma('"'), len(quote)
        if any(quote.startswith(held) for quote in self._quotes):
            return "", 0
        return self._read_unquoted(held)

    def _read_unquoted(self, held: str) -> tuple[str, int]:
        """Return a name, number or word as JSON, and the number of characters read: 0 if it may go on."""
        is_key = self._is_key
        found = (_KEY if is_key else _BARE).match(held)
        word = held[0] if found is None else found[0]
        if len(word) == len(held):
            return "", 0
        written = string(word.rstrip()) if is_key else _WORDS.get(word) or _json_number(word) or string(word)
        if is_key and len(self._open) == 1:
            self._is_known = written in self._names
            self._names.add(written)
        return self._after_comma(written), len(word)

    @property
    def _is_key(self) -> bool:
        """Return whether a name comes next."""
        return self._open[-1:] == ["{"] and not self._is_named

    def _read_string_piece(self, held: str) -> tuple[str, int]:
        """Return the next piece of a string as JSON, and the number of characters read: 0 if it needs more text."""
        assert self._quote is not None
        if held.startswith(self._quote):
            length = len(self._quote)
            self._quote = None
            return '"', length
        if self._is_raw:
            at = held.find(self._quote)
            num_safe = at if at >= 0 else len(held) - overlap(held, self._quote)
            return string(held[:num_safe])[1:-1], num_safe
        if held.startswith("\\"):
            return self._read_escape(held)
        ends = [at for at in (held.find(self._quote), held.find("\\")) if at >= 0]
        num_safe = min(ends, default=len(held))
        return string(held[:num_safe])[1:-1], num_safe

    def _read_escape(self, held: str) -> tuple[str, int]:
        """Return the Python escape at the start of `held` as JSON, and the number of characters read: 0 if incomplete.

        An unknown escape stays as it is written.
        """
        if len(held) < 2:
            return "", 0
        num_digits = _CODES.get(held[1], 0)
        if len(held) < 2 + num_digits:
            return "", 0
        if num_digits:
            return _json_escape(held[: 2 + num_digits], held[2 : 2 + num_digits]), 2 + num_digits
        if held[1] in _ESCAPED:
            return string(_ESCAPED[held[1]])[1:-1], 2
        return string(held[1] if held[1] in "\\'\"" else held[:2])[1:-1], 2

    def _read_bracket(self, bracket: str) -> str:
        """Open or close one of JSON's brackets, and return it, after a comma if needed.

        Closing the outermost one completes the arguments.
        """
        if bracket in "{[":
            text = self._after_comma(bracket)
            self._open.append(bracket)
            return text
        self._comma = ""  # a comma before a closing bracket separates nothing
        del self._open[-1:]
        self.is_whole = not self._open
        self._is_known = self._is_known and not self.is_whole
        return bracket

    def _after_comma(self, text: str) -> str:
        comma, self._comma, self._is_named = self._comma, "", False
        return comma + text


def _json_number(word: str) -> str | None:
    """Return a word unchanged if it is a finite number in JSON; None if it is not."""
    try:
        value = json.loads(word)
    except ValueError:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return word if is_number and math.isfinite(value) else None


def _json_escape(escape: str, digits: str) -> str:
    """Return an escape with digits, such as `\\x41`, as the inside of a JSON string; if invalid, as it is written.

    Pairs of surrogates remain pairs.

    Args:
        escape: all of it.
        digits: its hexadecimal digits.
    """
    try:
        code = int(digits, 16)
        return f"\\u{code:04x}" if code <= 0xFFFF else string(chr(code))[1:-1]
    except (ValueError, OverflowError):
        return string(escape)[1:-1]
