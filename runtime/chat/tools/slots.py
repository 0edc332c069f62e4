"""Texts with slots: `{index}`, digits, and `{id}`, letters and digits that the model thinks of.

Knows how a text begins, not what it means.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

_SLOT: Final = re.compile(r"\{(index|id)\}")
_PATTERNS: Final = {"index": "[0-9]{1,3}", "id": "[a-zA-Z0-9]{9}"}  # of what is written in them
_WRITTEN: Final = re.compile(r"[a-zA-Z0-9]*")


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


def fit(held: str, text: str) -> Fit | None:
    """How `held` begins with a text that may have slots; None if it does not.

    >>> fit("f:0<args>{", "f:{index}<args>"), fit("f:0<ar", "f:{index}<args>"), fit("g", "f:{index}<args>")
    (Fit(length=9, is_whole=True, call_id=''), Fit(length=6, is_whole=False, call_id=''), None)
    """
    at, call_id = 0, ""
    for number, piece in enumerate(_SLOT.split(text)):
        if number % 2:
            match = _WRITTEN.match(held, at)
            written = match[0] if match is not None else ""
            at += len(written)
            if at == len(held):
                return Fit(at, is_whole=False)
            if not written:
                return None
            call_id = written if piece == "id" else call_id
        elif held.startswith(piece, at):
            at += len(piece)
        else:
            return Fit(len(held), is_whole=False) if piece.startswith(held[at:]) else None
    return Fit(at, is_whole=True, call_id=call_id)


def overlap(text: str, tag: str) -> int:
    """The length of the longest end of `text` that `tag` begins with."""
    return next((n for n in range(min(len(text), len(tag)), 0, -1) if text.endswith(tag[:n])), 0)
