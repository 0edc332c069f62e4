"""What an extra adds to a disk tier: it offers requests rows to begin with, and observes prompts that are computed.

Protocols only. Without an extra the tier loads and saves whole pages. All methods are called in the engine's thread,
between two steps.
"""

from __future__ import annotations

from typing import Protocol

from ..cache.radix_node import Node
from ..cache.sequence import Sequence
from .loaded_prefix import Wanted


class Offers(Protocol):
    """Offers rows of a stored prefix, for a sequence to begin with instead of the prefix's pages."""

    def begin(self, wanted: Wanted) -> bool:
        """Return whether the request is to wait for rows. Then it goes on with them by `DiskTier.go_on`, or without by
        `DiskTier.load_pages`.
        """
        ...

    def abandon(self, name: str) -> None:
        """Drop the offer to a request that has ended."""
        ...

    def end(self, namespace: bytes | None = None) -> None:
        """Drop the offers to the requests of a namespace, or all; the requests go on before the next step."""
        ...

    def read_ahead(self) -> None:
        """Read something for later requests, if the disk has nothing to read."""
        ...

    def close(self) -> None:
        """Close files; the reader has ended."""
        ...


class Observer(Protocol):
    """Learns which rows prompts attend to, and stores what it learned while nothing else is to be written."""

    @property
    def is_ready(self) -> bool:
        """Whether `advance` has something to store, and the writer is idle."""
        ...

    def advance(self) -> None:
        """Have the writer store the next part of what was learned. Called when no page waits to be saved."""
        ...

    def computed(self, sequence: Sequence, *, num_reused: int) -> None:
        """Note that the prompt of a sequence is computed: it begins with offered rows, or else its first `num_reused`
        tokens were found. One without a namespace does not share anything.
        """
        ...

    def leaving(self, node: Node) -> None:
        """Have stored what was learned of a node that is about to leave memory."""
        ...

    def forget(self, namespace: bytes | None = None) -> None:
        """Drop what waits to be stored, of one namespace or all."""
        ...

    def close(self) -> None:
        """Have stored what was learned and is not; the last call."""
        ...


class TierExtra(Protocol):
    """Both hooks, for one tier."""

    @property
    def offers(self) -> Offers: ...
    @property
    def observer(self) -> Observer: ...
    @property
    def num_read_bytes(self) -> int:
        """Bytes that it asked of the disk itself."""
        ...

    def stats(self) -> object:
        """Counts as of now, for whoever knows the extra; from any thread."""
        ...
