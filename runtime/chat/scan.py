"""The interface for reading a reply while it is generated: a chain of scans, each reads the output of the one before.

    token -> StreamDecoder -> ReasoningSplitter -> Stops -> StringScan (banned) -> ToolCallReader -> ArgumentsReader
             text             reasoning, answer  answer   position of match      text and calls    JSON

`ReplyText` runs those up to the banned strings, in the engine; `ReplyEvents` runs the others, in the server.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

Piece = TypeVar("Piece", contravariant=True)
Certain = TypeVar("Certain", covariant=True)


class Scan(Protocol[Piece, Certain]):
    """Reads one reply piece by piece. However the reply is cut into pieces, the joined results are the same."""

    def push(self, piece: Piece, /) -> Certain:
        """Take the next piece, and return what is certain now; the scan holds back the rest."""
        ...

    def finish(self) -> Certain:
        """Return what was held back, because no more comes."""
        ...


class ReplyPiece(NamedTuple):
    """The text that a piece of a reply adds to its reasoning, and to its answer."""

    reasoning: str = ""
    answer: str = ""

    def followed_by(self, more: ReplyPiece) -> ReplyPiece:
        """Return both pieces as one."""
        return ReplyPiece(self.reasoning + more.reasoning, self.answer + more.answer)


@runtime_checkable
class Rewindable(Protocol):
    """A state that can be rewound, so that tokens of the reply are taken back."""

    def state(self) -> Any:
        """Return the value that `restore` needs to continue from here; it never changes."""
        ...

    def restore(self, state: Any) -> None:
        """Rewind to an earlier `state`."""
        ...


class RewindableScan(Scan[Piece, Certain], Rewindable, Protocol[Piece, Certain]):
    """A scan that can be rewound."""


def overlap(text: str, tag: str) -> int:
    """Return the length of the longest end of `text` that `tag` begins with: a scan holds it back."""
    return next((n for n in range(min(len(text), len(tag)), 0, -1) if text.endswith(tag[:n])), 0)
