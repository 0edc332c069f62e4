"""Say what of a prompt is cached, by which kind of match, and why not more.

Values only; `prefix_cache.py` makes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from .why_not_more import WhyNotMore

# `off`: nothing is found for a request, and nothing is kept of it
MatchPolicy = Literal["exact", "seam", "text", "off"]
# from strong to weak: ids of the prompt's encoding; the same, found without encoding everything again; what the model
# generated where it spells the prompt; a reply that the template renders with other white space
MatchKind = Literal["exact", "seam", "text", "alias"]


@dataclass(frozen=True)
class PartialPage:
    """The first `num_rows` rows of page `page_id` are reused by copying them; a reservation says when."""

    page_id: int
    num_rows: int


@dataclass(frozen=True)
class PrefixMatch:
    """What of a prompt is cached. Holds no page: it is true until the cache changes.

    `pages` are the full pages that are shared, `partial` the page after them of which rows are copied.
    `num_tokens == PAGE_SIZE * len(pages) + partial.num_rows == sum(tokens_by_kind.values())`.
    """

    prompt_ids: tuple[int, ...]
    num_match: int
    namespace: bytes | None  # None: nothing is shared with anybody
    tokens_by_kind: Mapping[MatchKind, int]
    pages: tuple[int, ...]
    partial: PartialPage | None
    why_not_more: WhyNotMore
    version: int  # of the tree that it was found in

    @property
    def num_tokens(self) -> int:
        """Prompt tokens that need no forward."""
        return sum(self.tokens_by_kind.values())
