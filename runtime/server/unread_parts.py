"""Images and documents in tool results: replaced by a note, because the models read text only.

A client cannot change a tool result: the tool has run, and every later request sends the result again, so refusing it
would end the conversation. Images that users attach themselves are refused by the endpoints.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from .errors import HTTPError

ADVICE: Final = "cannot be read: the models read text only; remove it"


def note(kind: str) -> str:
    """Return the note that replaces an image or document. It is constant, so that the prompt stays cached.

    >>> note("image")
    '[image left out: this model reads text only, and cannot see it]'
    """
    return f"[{kind} left out: this model reads text only, and cannot see it]"


def refuse_unread(names: Collection[str]) -> None:
    """Refuse unread parts, as a strict server does.

    Raises:
        HTTPError: 400 if there are any.
    """
    if names:
        name = min(names)
        raise HTTPError(400, f"{name} {ADVICE}, or start the server without --strict: it is then replaced by a note")
