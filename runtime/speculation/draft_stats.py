"""What a draft model takes of memory, and what it did.

Values only.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DraftAbout:
    """What a draft model takes of memory."""

    name: str
    weights_bytes: int
    kv_bytes: int


@dataclass(frozen=True)
class DraftStats:
    """What a draft model has and did."""

    about: DraftAbout | None
    num_pages: int
    num_free_pages: int
    num_cached_pages: int
    num_computed_tokens: int
