"""Measure our engine with and without drafts, in turns.

Two engines of one process serve the same requests one after the other; every reply must have the same tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from radixlm.runtime import Completion, Engine, SamplingParams
from radixlm.runtime.artifact import Artifact

from .tasks import OPEN, Task, ask, editing

NUM_LINES, STREAM_TOKENS = 40, 450  # of each of eight files
Figures = dict[str, list[dict[str, object]]]
"""By task, a row for each round."""


@dataclass(frozen=True)
class Pair:
    """An engine without drafts, and one with drafts."""

    plain: Engine
    drafting: Engine

    def measure(self, reply: Callable[[Engine], list[Completion]], *, is_drafting_first: bool) -> dict[str, object]:
        """Return one row: speeds and draft tokens of the same replies with and without speculative decoding."""
        engines = (self.drafting, self.plain) if is_drafting_first else (self.plain, self.drafting)
        replies = {engine is self.drafting: reply(engine) for engine in engines}
        before, after = replies[False], replies[True]
        assert [each.token_ids for each in after] == [each.token_ids for each in before], "draft tokens changed a reply"
        return {
            "plain_per_s": speed_of(before),
            "drafting_per_s": speed_of(after),
            "num_tokens": sum(len(each.token_ids) for each in after),
            "drafted": sum(each.usage.drafted_tokens for each in after),
            "accepted": sum(each.usage.accepted_tokens for each in after),
        }


@contextmanager
def pair(artifact: Path, draft: Path | None = None) -> Iterator[Pair]:
    """Yield both engines over an artifact."""
    opened = Artifact.open(artifact)
    with (
        Engine(opened, speculate="off", idle_work=False) as plain,
        Engine(opened, draft=draft, idle_work=False) as drafting,
    ):
        yield Pair(plain, drafting)


def speed_of(replies: Sequence[Completion]) -> float:
    """Return tokens per second of concurrent replies, from the first token of all to the last."""
    if len(replies) == 1:
        return replies[0].timings.decode_tokens_per_s or 0.0
    begins = [each.timings.time_to_first_token_s or 0.0 for each in replies]
    return sum(len(each.token_ids) - 1 for each in replies) / (
        max(each.timings.total_s for each in replies) - min(begins)
    )


def by_task(engines: Pair, tasks: Sequence[Task], rounds: int) -> Figures:
    """Measure each task in each round, after one round that is not counted."""
    figures: Figures = defaultdict(list)
    for number in range(-1, rounds):
        for task in tasks:
            row = engines.measure(lambda engine: [ask(engine, task, number)], is_drafting_first=number % 2 == 0)  # noqa: B023
            if number >= 0:
                figures[task.name].append(row)
    return figures


def open_text(engines: Pair, num_pairs: int) -> Figures:
    """Measure open text, greedily and sampled in turns, each reply once without and once with drafts."""
    rows: list[dict[str, object]] = []
    for number in range(-2, num_pairs):
        task = OPEN[number % 2]
        row = engines.measure(lambda engine: [ask(engine, task, 100 + number)], is_drafting_first=number % 4 < 2)  # noqa: B023
        if number >= 0:
            rows.append(row)
    return {"open text": rows}


def streams(engines: Pair, rounds: int) -> Figures:
    """Measure eight concurrent replies that repeat a file each, with and without drafts; their prompts are cached."""
    rows: list[dict[str, object]] = []
    conversations = editing(NUM_LINES)
    for number in range(rounds):
        namespace = f"streams {number}".encode()

        def reply(engine: Engine, namespace: bytes = namespace) -> list[Completion]:
            engine.chat(conversations, SamplingParams(max_tokens=1, temperature=0.0), namespace=namespace)
            params = SamplingParams(max_tokens=STREAM_TOKENS, temperature=0.0)
            return engine.chat(conversations, params, namespace=namespace)

        rows.append(engines.measure(reply, is_drafting_first=number % 2 == 0))
    return {f"eight files of {NUM_LINES} lines at once": rows}
