"""Many clients at once in one event loop: each sends a request, reads or disconnects, checks the response, and repeats.

Knows what a response must be by itself; `load_survivors.py` checks whether its tokens are right. As a process it has
one method, `run`, which `bench.load` calls.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ..connection import BrokenReply, Call, Connection, Head
from ..worker import serve
from .replies import Reply, ReplyError, check_usage
from .requests import Ask, Facts, Stream
from .survivors import Survivor

HANG_S = 300.0  # only a forgotten request waits so long
HEALTH_EVERY_S = 0.5
MAX_FAULTS_TOLD = 20
_LEAVE_WITHIN_S = 0.3


@dataclass
class Crowd:
    """`num_streams` clients of the server at `port`, for `seconds`, and the outcomes of their requests."""

    port: int
    facts: Facts
    num_streams: int
    seconds: float
    seed: int
    num_kept: int = 200  # survivors, drawn from all
    hang_s: float = HANG_S
    answered: Counter[str] = field(default_factory=Counter)  # by kind
    refused: Counter[str] = field(default_factory=Counter)  # by status and kind
    left: Counter[str] = field(default_factory=Counter)  # by ending
    faults: list[str] = field(default_factory=list)  # responses that should have been others, and missing ones
    num_faults: int = 0
    num_hung: int = 0
    num_repeatable: int = 0
    survivors: list[Survivor] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    between_tokens_s: list[float] = field(default_factory=list)
    health_s: list[float] = field(default_factory=list)

    async def run(self) -> None:
        """Run all clients; return when the last response was read, or took too long."""
        self._random = random.Random(self.seed)
        self._deadline = time.monotonic() + self.seconds
        watching = asyncio.create_task(self._watch_health())
        await asyncio.gather(*(self._run_client(number) for number in range(self.num_streams)))
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    async def _run_client(self, number: int) -> None:
        """Send one client's requests one after the other until the deadline; record faults and requests that hang."""
        stream = Stream(number, self.seed, self.facts)
        connection = Connection(self.port)
        while time.monotonic() < self._deadline:
            ask = stream.next()
            try:
                reply = await asyncio.wait_for(self._exchange(connection, ask), self.hang_s)
                if reply is not None:
                    stream.add_reply(ask, reply.text, len(reply.prompt_token_ids) + len(reply.token_ids))
            except TimeoutError:
                self.num_hung += 1
                self._record_fault(ask, f"no end of it after {self.hang_s:g} s")
                connection.drop()
            except (BrokenReply, ReplyError, OSError) as error:
                self._record_fault(ask, f"{type(error).__name__}: {error}")
                connection.drop()
            await asyncio.sleep(stream.think_s())
        connection.drop()

    async def _exchange(self, connection: Connection, ask: Ask) -> Reply | None:
        """Send one request; return the reply if it was read to its end."""
        if ask.ending == "leave in mid-request":
            data = ask.call.encoded()
            await connection.send(data[: self._random.randrange(1, len(data))])
            self._leave(connection, ask)
            return None
        if ask.ending == "leave before the first token":
            await connection.send(ask.call.encoded())
            await asyncio.sleep(self._random.random() * _LEAVE_WITHIN_S)
            self._leave(connection, ask)
            return None
        start = time.perf_counter()
        head = await connection.ask(ask.call)
        if head.status == 429 and ask.statuses != {401}:  # a full queue precedes other errors, not that of a key
            await self._wait_to_retry(connection, head)
            return None
        if head.status not in ask.statuses:
            raise ReplyError(f"status {head.status}: {(await connection.body(head))[:300]!r}")
        if not ask.is_good:
            _check_error(await connection.body(head))
            self.refused[f"{head.status} {ask.kind.removeprefix('bad: ')}"] += 1
            return None
        replies = [Reply(index) for index in range(ask.num_choices)]
        if not ask.is_stream:
            body = json.loads(await connection.body(head))
            for reply in replies:
                reply.take(body)
        elif not await self._read_stream(connection, head, ask, replies, start):
            self._leave(connection, ask)
            return None
        for reply in replies:
            reply.check_complete(is_stream=ask.is_stream)
        check_usage(replies)
        if ask.is_json and replies[0].finish_reason == "stop" and not isinstance(json.loads(replies[0].text), dict):
            raise ReplyError(f"no JSON object: {replies[0].text!r:.200}")
        self.answered[ask.kind] += 1
        for reply in replies if ask.is_repeatable else ():
            if reply.prompt_token_ids:  # a response that is no stream has those of its first choice only
                self._sample_survivor(Survivor.of(ask, reply))
        return replies[0]

    async def _read_stream(
        self, connection: Connection, head: Head, ask: Ask, replies: Sequence[Reply], start: float
    ) -> bool:
        """Read the events into `replies`, with their times; return False if the client disconnects before the last."""
        last = None
        num_events = 0
        async for event in connection.events(head):
            now = time.perf_counter()
            num_events += 1
            if ask.ending == "leave in mid-stream" and num_events > ask.num_events:
                return False
            chunk = None if event == b"[DONE]" else json.loads(event)
            if chunk is None:
                for reply in replies:
                    reply.is_done = True
            elif any([reply.take(chunk) for reply in replies]):
                if last is None:
                    self.first_token_s.append(now - start)
                else:
                    self.between_tokens_s.append(now - last)
                last = now
        return True

    def _leave(self, connection: Connection, ask: Ask) -> None:
        connection.drop()
        self.left[ask.ending] += 1

    async def _wait_to_retry(self, connection: Connection, head: Head) -> None:
        """Check the refusal of a full queue (429), which must say when to retry, and wait for a moment."""
        _check_error(await connection.body(head))
        if not head.headers.get("retry-after", "").isdigit():
            raise ReplyError(f"status 429 without a number of seconds in Retry-After: {head.headers}")
        self.refused["429 queue full"] += 1
        await asyncio.sleep(self._random.random())

    def _sample_survivor(self, survivor: Survivor) -> None:
        """Keep a random sample of `num_kept` survivors, in which each one so far is with the same probability."""
        self.num_repeatable += 1
        if len(self.survivors) < self.num_kept:
            self.survivors.append(survivor)
        elif (place := self._random.randrange(self.num_repeatable)) < self.num_kept:
            self.survivors[place] = survivor

    def _record_fault(self, ask: Ask, what: str) -> None:
        """Count a response that is not as it should be, and keep the first messages."""
        self.num_faults += 1
        if len(self.faults) < MAX_FAULTS_TOLD:
            self.faults.append(f"{ask.kind} ({ask.ending}): {what}")

    async def _watch_health(self) -> None:
        """Request `/health` again and again until cancelled; record its times, and failures as faults."""
        connection = Connection(self.port)
        while True:
            start = time.perf_counter()
            try:
                head = await asyncio.wait_for(connection.ask(Call("GET", "/health")), self.hang_s)
                await connection.body(head)
                if head.status != 200:
                    raise ReplyError(f"status {head.status}")
                self.health_s.append(time.perf_counter() - start)
            except (BrokenReply, ReplyError, OSError, TimeoutError) as error:
                connection.drop()
                self.num_faults += 1
                self.faults.append(f"/health: {type(error).__name__}: {error}")
            await asyncio.sleep(HEALTH_EVERY_S)


def percentiles(values: list[float]) -> dict[str, float]:
    """Return the median, the 99th percentile and the maximum; zeros for an empty list."""
    ordered = sorted(values) or [0.0]
    return {name: ordered[int(share * (len(ordered) - 1))] for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1))}


def run(facts: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    """Run a `Crowd` of `options`; return its results, JSON-compatible."""
    crowd = Crowd(facts=Facts(**facts), **options)
    start = time.monotonic()
    asyncio.run(crowd.run())
    return {
        "seconds": time.monotonic() - start,
        "answered": dict(sorted(crowd.answered.items())),
        "refused": dict(sorted(crowd.refused.items())),
        "left": dict(sorted(crowd.left.items())),
        "num_faults": crowd.num_faults,
        "faults": crowd.faults,
        "num_hung": crowd.num_hung,
        "num_repeatable": crowd.num_repeatable,
        "first_token_s": percentiles(crowd.first_token_s),
        "between_tokens_s": percentiles(crowd.between_tokens_s),
        "health_s": percentiles(crowd.health_s) | {"num": len(crowd.health_s)},
        "survivors": [asdict(survivor) for survivor in crowd.survivors],
    }


def _check_error(body: bytes) -> None:
    """Raise ReplyError unless the body of a refusal has OpenAI's shape of an error."""
    error = json.loads(body)["error"]
    if not (isinstance(error["message"], str) and error["message"] and isinstance(error["type"], str)):
        raise ReplyError(f"an error of another shape: {body[:300]!r}")


if __name__ == "__main__":
    serve({"run": run})
