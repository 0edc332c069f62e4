"""The names that clients may call the one served model by.

Knows names, not models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from .errors import HTTPError

ANY = "*"


@dataclass(frozen=True)
class ModelNames:
    """At least one name, of which the first is the server's own word for the model.

    >>> names = ModelNames.of(["smollm2", "*"], default="SmolLM2 135M Instruct")
    >>> names.named("gpt-4o"), names.named(None), names.listed
    ('gpt-4o', 'smollm2', ('smollm2',))
    """

    listed: tuple[str, ...]
    takes_any: bool = False

    @classmethod
    def of(cls, asked: Sequence[str], *, default: str) -> Self:
        """The names that were asked for, each once, or the default; `*` among them is any name, and is not listed."""
        listed = tuple(dict.fromkeys(name for name in asked if name != ANY))
        return cls(listed or (default,), ANY in asked)

    @property
    def own(self) -> str:
        """The first."""
        return self.listed[0]

    def named(self, asked: str | None) -> str:
        """The name that a reply to such a request has: the one that was asked for.

        Raises:
            HTTPError: 404, there is no model of this name.
        """
        if not asked:
            return self.own
        if self.takes_any or asked in self.listed:
            return asked
        known = " and ".join(map(repr, self.listed))
        message = f"there is no model {asked!r:.200} here; this server has {known}"
        raise HTTPError(404, message, param="model", code="model_not_found")
