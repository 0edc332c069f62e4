"""A prompt whose prefix is looked for on disk, and what became of that.

Knows prompts by name, not requests, nor how pages come.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ..cache.prefix_cache import PrefixCache
from ..cache.prefix_match import MatchKind, PrefixMatch
from .loaded_prefix import LoadedPrefix, LoadedRows

FindPrefix = Callable[[PrefixCache], PrefixMatch]
"""What a request may reuse of a cache: of the one in memory, and of the one on disk."""


@dataclass(eq=False)
class Wanted:
    """A prompt that is looked for on disk, and what was found.

    Args:
        go_on: called when a request that waits need wait no longer, with what came from disk: pages, or rows that
            an extra offers.
        met: called with what the disk had of the prompt, when the prompt's end has come from there while the request
            computed or was still queued.
        num_tokens_ahead: that are computed before a request that does not wait; None: not known.
        options: what the request asks for, as an extra may know it.
    """

    name: str
    find: FindPrefix
    go_on: Callable[[LoadedPrefix | None, LoadedRows | None], None]
    met: Callable[[LoadedPrefix, PrefixMatch], None]
    num_tokens_ahead: int | None = None
    options: object = None
    is_abandoned: bool = False
    num_tries: int = 0
    match: PrefixMatch | None = None  # of the disk, at the last try
    num_in_memory: int = 0  # pages, before the first try
    memory_by_kind: Mapping[MatchKind, int] = field(default_factory=dict)  # likewise
    loaded: LoadedPrefix | None = None
