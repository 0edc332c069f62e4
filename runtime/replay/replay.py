"""Compute the requests of a recording again, and find the first token that differs, or has other logprobs.

Knows an engine from outside; `recording.py` defines the lines.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from radixlm.tokenizer_fix import PreparedPrompt

from ..chat.artifact_tokenizer import refusing
from ..engine.completion import Completion
from ..engine.generation_stream import GenerationStream
from ..errors import EngineError, InvalidRequest
from .recording import Computed, RecordedRequest, WhyNot, digests_of, lines_of

if TYPE_CHECKING:
    from ..engine.engine import Engine

NUM_AT_ONCE = 16  # requests computed at once


@dataclass(frozen=True)
class Difference:
    """The first difference of a reply.

    Attributes:
        request: the recorded request's id.
        number: its number in the recording, from 1.
        place: index of the token in the reply; None if the request could not be computed.
        says: what differs, in words.
    """

    request: str
    number: int
    place: int | None
    says: str


@dataclass
class Replayed:
    """The result of a replay.

    Attributes:
        computed: the last recorded engine.
        num_equal: replies with the same ids, the same finish reason and the same bits of logprobs.
        num_tokens: tokens of these replies.
        differences: one for each other reply.
        not_compared: number of requests that were not compared, by reason.
    """

    computed: Computed | None = None
    num_equal: int = 0
    num_tokens: int = 0
    differences: list[Difference] = field(default_factory=list)
    not_compared: Counter[WhyNot] = field(default_factory=Counter)


def first_line(path: Path) -> Computed | None:
    """Return the engine that computed a recording's first replies; None if it is empty.

    Raises:
        RecordingUnusable, OSError: like `lines_of`.
    """
    line = next(lines_of(path), None)
    assert line is None or isinstance(line, Computed)
    return line


def replay(path: Path, engine: Engine) -> Replayed:
    """Compute all requests of a recording again on `engine`, several at once, and compare the replies.

    Returns:
        The number of equal replies, the first difference of each other one, and the number of requests that were not
        compared, by reason.

    Raises:
        RecordingUnusable, OSError: like `lines_of`.
        EngineError: the engine died, or was closed.
    """
    replayed, running = Replayed(), deque[tuple[int, RecordedRequest, GenerationStream | str]]()
    for number, request, context_length in _recorded_requests(path, replayed):
        if request.why_not is not None:
            replayed.not_compared[request.why_not] += 1
            continue
        if len(running) == NUM_AT_ONCE:
            _compare(replayed, *running.popleft())
        running.append((number, request, _start(engine, request, context_length)))
    while running:
        _compare(replayed, *running.popleft())
    return replayed


def _recorded_requests(path: Path, replayed: Replayed) -> Iterator[tuple[int, RecordedRequest, int]]:
    """Yield each recorded request: its number, the request, and the context length of the engine that computed it.

    The line of that engine is put into `replayed.computed`.
    """
    number = 0
    for line in lines_of(path):
        if isinstance(line, Computed):
            replayed.computed = line
            continue
        number += 1
        assert replayed.computed is not None, "a file begins with it"
        yield number, line, replayed.computed.context_length


def _start(engine: Engine, request: RecordedRequest, context_length: int) -> GenerationStream | str:
    """Start computing a recorded request again. Returns its stream, or the error if it cannot be computed."""
    given = request.prompt
    prompt = PreparedPrompt(
        given.ids,
        len(given.ids),
        given.swallow_leading_space,
        given.text,
        space_id=given.space_id,
        healed=given.healed,
    )
    try:
        asked = request.sampling()
        room = context_length - len(given.ids)  # the room of the recorded engine
        most = room if asked.max_tokens is None else min(asked.max_tokens, room)
        params = replace(asked, max_tokens=most, prompt_logprobs=None)
        with refusing():
            reply = engine.prompts.reply(prompt, params, request.grammar, is_chat=request.is_chat)
        return engine.stream_prepared(prompt, reply, params)
    except (InvalidRequest, EngineError) as error:
        return str(error)


def _compare(replayed: Replayed, number: int, request: RecordedRequest, stream: GenerationStream | str) -> None:
    """Wait for a reply, compare it with the recorded one, and add the result to `replayed`.

    Args:
        stream: the reply's stream, or the error that kept it from starting, which counts as a difference.
    """
    difference = stream if isinstance(stream, str) else None
    place = None
    if not isinstance(stream, str):
        try:
            found = _difference(request, stream.result())
        except (InvalidRequest, EngineError) as error:
            difference = str(error)
        else:
            if found is None:
                replayed.num_equal += 1
                replayed.num_tokens += len(request.reply_ids)
                return
            place, difference = found
    assert difference is not None
    replayed.differences.append(Difference(request.id, number, place, difference))


def _difference(request: RecordedRequest, completion: Completion) -> tuple[int, str] | None:
    """Return the index of the first token that differs, and how it does; None if the replies are equal.

    Equal replies have the same ids, bits of logprobs, length and reason to finish.
    """
    was, now = request.reply_ids, completion.token_ids
    digests = digests_of(completion.logprobs or ())
    for place in range(min(len(was), len(now))):
        if was[place] != now[place]:
            return place, f"is {now[place]}, and was {was[place]}"
        if request.logprobs[place] != digests[place]:
            return place, f"is {now[place]} again, and its logprobs have other bits"
    if len(was) != len(now):
        return min(len(was), len(now)), f"is where one reply ends: of {len(now)} tokens, and of {len(was)} before"
    if request.finish_reason != completion.finish_reason:
        return len(now), f"would follow: the reply ended by {completion.finish_reason}, and by {request.finish_reason}"
    return None
