"""Whole steps of an artifact are timed, and two checkouts are compared by the rounds' own ratios."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from radixlm.runtime.artifact import Artifact

from bench.kernels.forward import pages_of
from bench.kernels.steps_in_turns import row
from bench.kernels.steps_worker import Steps
from bench.worker import Worker


class Scripted:
    """A worker that says what it is told to, and notes what it is asked."""

    def __init__(self, seconds: list[float]) -> None:
        self.seconds, self.asked = seconds, list[dict[str, Any]]()

    def call(self, method: str, **arguments: Any) -> float:
        self.asked.append(arguments)
        return self.seconds.pop(0)


def test_every_kind_of_step_runs(tiny_artifact: Path) -> None:
    kinds = (("decode", 3, 20), ("prefill", 20, 16))
    steps = Steps(Artifact.open(tiny_artifact), max(pages_of(*each) for each in kinds))
    assert all(steps.seconds(*each, calls=2) > 0 for each in kinds)


def test_a_ratio_is_the_median_of_rounds_after_a_first_one_that_warms_up() -> None:
    before = Scripted([0.01, 9.0, 4.0, 2.0, 6.0])  # the first says how many calls a turn has
    now = Scripted([9.0, 2.0, 2.0, 2.0])
    found = row(("decode", 1, 200), cast(Worker, before), cast(Worker, now), rounds=3)
    assert (found["step"], found["ratio"], found["before"], found["least_before"]) == ("decode:1:200", 2.0, 4.0, 2.0)
    assert [each["calls"] for each in before.asked] == [1, 5, 5, 5, 5] and now.asked == before.asked[1:]
