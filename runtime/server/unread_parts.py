"""Images and documents in results of tools: models here read text, and are told that something else stood there.

A result is not the client's to change: its tool has run, and to refuse the request would end the conversation, for the
result is sent again with every later one. What users attach themselves is refused where it is read.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from .errors import HTTPError

ADVICE: Final = "cannot be read: models here read text; leave it out"


def note(kind: str) -> str:
    """What a model reads in place of an image or a document; always the same, so that the prompt is found again.

    >>> note("image")
    '[image left out: this model reads text only, and cannot see it]'
    """
    return f"[{kind} left out: this model reads text only, and cannot see it]"


def require_none(names: Collection[str]) -> None:
    """What a strict server does with them.

    Raises:
        HTTPError: 400, there are some.
    """
    if names:
        name = min(names)
        raise HTTPError(400, f"{name} {ADVICE}, or start the server without --strict: it is then replaced by a note")
