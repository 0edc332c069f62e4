"""The lines of a KV log as types: the fields of each event, checked when a line is read.

Values only. `log.py` says what they mean, `replay.py` what may follow what.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0)]
NumPages = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
Change = tuple[int, int]  # before and after
Rows = tuple[int, int, int]


class Line(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    """What every line has."""

    time: float | None = None
    request: str | None = None


class OfSequence(Line, frozen=True, kw_only=True):
    """What every line of a sequence has; `free` where pages are taken or given back."""

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


class Open(OfSequence, tag="open", frozen=True):
    pages: list[int]
    private: bool = False


class OpenPruned(OfSequence, tag="open_pruned", frozen=True):
    pages: list[int]
    pruned: Rows


class Fork(OfSequence, tag="fork", frozen=True):
    parent: int
    pages: list[int]
    state: bool = False  # the model keeps states: it goes on from one, which may stand earlier


class Resume(OfSequence, tag="resume", frozen=True):
    pages: list[int]


class Reserve(OfSequence, tag="reserve", frozen=True):
    reserved: Change
    pages: list[int]
    copies: list[Rows]
    draft: Count = 0


class Accept(OfSequence, tag="accept", frozen=True):
    pages: list[int]


class Commit(OfSequence, tag="commit", frozen=True):
    kept: Count
    pages: list[int]
    state: bool = False  # the model keeps states: after a wrong guess nothing is computed


class Share(OfSequence, tag="share", frozen=True):
    kept: Count
    shared: Count
    pages: list[int]


class Drop(OfSequence, tag="drop", frozen=True):
    pass


class Append(OfSequence, tag="append", frozen=True):
    pass


class Pop(OfSequence, tag="pop", frozen=True):
    state: bool = False  # as of a fork


class Preempt(OfSequence, tag="preempt", frozen=True):
    pass


class Close(OfSequence, tag="close", frozen=True):
    pass


class Keep(Line, tag="keep", frozen=True):
    pages: list[int]


class Evict(Line, tag="evict", frozen=True):
    pages: list[int]
    free: Change


class StartOver(Line, tag="start_over", frozen=True):
    pass


SequenceLine = (
    Open | OpenPruned | Fork | Resume | Reserve | Accept | Commit | Share | Drop | Append | Pop | Preempt | Close
)
AnyLine = SequenceLine | Begin | State | Keep | Evict | StartOver
DECODER: msgspec.json.Decoder[AnyLine] = msgspec.json.Decoder(AnyLine)
