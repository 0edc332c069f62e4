"""How a reply is read while it is generated: by scans, each of which reads what the one before it makes certain.

    token -> StreamDecoder -> ReasoningSplitter -> Stops -> StringScan (banned) -> ToolCallReader -> ArgumentsReader
             text             reasoning, answer  answer   where it begins        text and calls    JSON

`ReplyText` runs those up to the banned strings, in the engine; `ReplyEvents` runs the others, in the server.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

Piece = TypeVar("Piece", contravariant=True)
Certain = TypeVar("Certain", covariant=True)


class Scan(Protocol[Piece, Certain]):
    """Reads one reply piece by piece. However the reply is cut into pieces, what it returns is the same in all."""

    def push(self, piece: Piece, /) -> Certain:
        """Take the next piece, and return what is certain now; the scan holds back what is not."""
        ...

    def finish(self) -> Certain:
        """Return what was held back: no more comes."""
        ...


class Said(NamedTuple):
    """What a piece of a reply adds to its reasoning, and to its answer."""

    reasoning: str = ""
    answer: str = ""

    def followed_by(self, more: Said) -> Said:
        """Both pieces as one."""
        return Said(self.reasoning + more.reasoning, self.answer + more.answer)


@runtime_checkable
class Rewindable(Protocol):
    """What can go back, so that tokens of the reply are taken back."""

    def state(self) -> Any:
        """Return what `restore` needs to go on from here: a value that never changes."""
        ...

    def restore(self, state: Any) -> None:
        """Go on from where `state` was asked for, which was not behind this place."""
        ...


class RewindableScan(Scan[Piece, Certain], Rewindable, Protocol[Piece, Certain]):
    """A scan that can go back."""


def overlap(text: str, tag: str) -> int:
    """The length of the longest end of `text` that `tag` begins with: as much as a scan holds back of it."""
    return next((n for n in range(min(len(text), len(tag)), 0, -1) if text.endswith(tag[:n])), 0)
