"""The lines of a KV log as types: the fields of each event, checked when a line is read.

Values only. `log.py` documents their meaning, `replay.py` the valid order.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0)]
NumPages = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
Change = tuple[int, int]  # before and after
Rows = tuple[int, int, int]


class Line(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    """The fields of every line."""

    time: float | None = None
    request: str | None = None


class SequenceFields(Line, frozen=True, kw_only=True):
    """The fields of every line of a sequence; `free` if pages are taken or released."""

    seq: int
    length: Change
    computed: Change
    free: Change | None = None


class Begin(Line, tag="begin", frozen=True):
    num_pages: NumPages


class SequenceState(msgspec.Struct, frozen=True):
    seq: int
    length: int
    computed: int
    pages: list[int]
    pruned: Rows | None
    private: bool
    request: str | None = None


class State(Line, tag="state", frozen=True):
    num_pages: NumPages
    tree: list[int]
    sequences: list[SequenceState]


class Open(SequenceFields, tag="open", frozen=True):
    pages: list[int]
    private: bool = False


class OpenPruned(SequenceFields, tag="open_pruned", frozen=True):
    pages: list[int]
    pruned: Rows


class Fork(SequenceFields, tag="fork", frozen=True):
    parent: int
    pages: list[int]
    state: bool = False  # the model keeps states: it resumes from one, which can be earlier


class Resume(SequenceFields, tag="resume", frozen=True):
    pages: list[int]


class Reserve(SequenceFields, tag="reserve", frozen=True):
    reserved: Change
    pages: list[int]
    copies: list[Rows]
    draft: Count = 0


class Accept(SequenceFields, tag="accept", frozen=True):
    pages: list[int]


class Commit(SequenceFields, tag="commit", frozen=True):
    kept: Count
    pages: list[int]
    state: bool = False  # the model keeps states: after a rejected draft token nothing is computed


class Share(SequenceFields, tag="share", frozen=True):
    kept: Count
    shared: Count
    pages: list[int]


class DropReservation(SequenceFields, tag="drop", frozen=True):
    pass


class Append(SequenceFields, tag="append", frozen=True):
    pass


class Pop(SequenceFields, tag="pop", frozen=True):
    state: bool = False  # as in `Fork`


class Preempt(SequenceFields, tag="preempt", frozen=True):
    pass


class Close(SequenceFields, tag="close", frozen=True):
    pass


class KeepPages(Line, tag="keep", frozen=True):
    pages: list[int]


class Evict(Line, tag="evict", frozen=True):
    pages: list[int]
    free: Change


class StartOver(Line, tag="start_over", frozen=True):
    pass


SequenceLine = (
    Open
    | OpenPruned
    | Fork
    | Resume
    | Reserve
    | Accept
    | Commit
    | Share
    | DropReservation
    | Append
    | Pop
    | Preempt
    | Close
)
AnyLine = SequenceLine | Begin | State | KeepPages | Evict | StartOver
DECODER: msgspec.json.Decoder[AnyLine] = msgspec.json.Decoder(AnyLine)
