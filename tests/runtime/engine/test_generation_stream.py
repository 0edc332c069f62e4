"""What a stream hands on, and whom it wakes for it."""

from __future__ import annotations

import pytest
from radixlm.runtime.engine.completion import CacheMatch, Completion, Delta, RequestOutput, Timings, Usage
from radixlm.runtime.engine.generation_stream import GenerationStream
from radixlm.runtime.errors import EngineError

COMPLETION = Completion(
    "ab", (1, 2), (5,), None, "length", Usage(1, 2, 0), Timings(0.1, None, 0.2), CacheMatch(None, 0, None)
)
FIRST = RequestOutput("r", Delta("a", (1,)))
LAST = RequestOutput("r", Delta("b", (2,), finish_reason="length"), COMPLETION)


class Woken:
    """A stream, and how often it said that it has something."""

    def __init__(self) -> None:
        self.count = 0
        self.stream = GenerationStream("r", (5,), cancel=lambda _: None, on_ready=self._wake)

    def _wake(self) -> None:
        self.count += 1


def test_each_delta_wakes_a_reader() -> None:
    woken = Woken()
    woken.stream.deliver(FIRST)
    woken.stream.deliver(LAST)
    assert (woken.count, [delta.text for delta in woken.stream]) == (2, ["a", "b"])


def test_who_waits_for_the_end_is_woken_once() -> None:
    woken = Woken()
    woken.stream.deliver(FIRST)
    woken.stream.skip_to_end()
    for _ in range(5):
        woken.stream.deliver(FIRST)
    assert woken.count == 1
    woken.stream.deliver(LAST)
    assert (woken.count, woken.stream.result()) == (2, COMPLETION)


def test_who_waits_for_the_end_gets_an_error() -> None:
    woken = Woken()
    woken.stream.skip_to_end()
    woken.stream.deliver(FIRST)
    woken.stream.deliver(RequestOutput("r", error=EngineError("no")))
    with pytest.raises(EngineError, match="no"):
        woken.stream.result()
