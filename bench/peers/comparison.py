"""Run rounds of a plan: every engine in turn; report failures by name, and join the rounds of several runs.

Knows contestants and scenarios by their interfaces; not how engines are started, or what is requested.
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from radixlm.compile.codegen.targets import find_target
from radixlm.runtime.artifact import Artifact
from radixlm.tokenizer_fix import TokenizerProfile

from ..limits import LimitsMeter
from ..model_work import decode_bytes_per_token
from ..prompts import Prompts
from ..report.tables import origins_before
from .contestants import OURS, Contestant, close_all
from .scenarios import DECODE, DECODE_200, PEERS, START, Plan, Scenario, Values

NO_TIME = "there was no time"
_REST_S = 1.0  # between two runs: threads of the one before stop spinning
READ_GB_PER_S = "read_gb_per_s"  # for our decode: what all threads read right before or after it, whichever is more
Rounds = dict[str, dict[str, list[float]]]  # contestant -> figure's name -> a value for each round


class Measured(Protocol):
    """A contestant, or a fake one in tests."""

    name: str

    def start(self, prompts: Prompts) -> Values:
        """Restart it."""
        ...

    def measure(self, scenario: Scenario, prompts: Prompts) -> Values:
        """Run a scenario."""
        ...

    def close(self) -> None:
        """End its processes."""
        ...


def is_of_machine(target: str) -> bool:
    """Return whether a target has all that kernels use of this machine, so that no engine has to be held to it."""
    return find_target(target) == find_target("native")


def missing_of(peers: Sequence[Contestant], only: Sequence[str], target: str = "native") -> dict[str, str]:
    """Return why a peer cannot be measured, by name; a name must have one of the words `only`, if there are any."""
    missing = {peer.name: peer.why_missing for peer in peers if peer.why_missing is not None}
    if not is_of_machine(target):
        missing |= {peer.name: f"it takes what the machine has, not {target}" for peer in peers if not peer.is_held}
    return missing | {peer.name: "not asked for" for peer in peers if only and not any(w in peer.name for w in only)}


def measure_all(
    contestants: Sequence[Contestant],
    artifact: Artifact,
    rounds: int,
    deadline: float,
    *,
    plan: Plan = PEERS,
    target: str = "native",
) -> dict[str, Any]:
    """Measure all contestants, then close them; return values, failures and our decode's share of the bandwidth."""
    try:
        meter = LimitsMeter(find_target(target), artifact)
        values, failed = measure(contestants, meter.around, rounds, _vocab_size(artifact), deadline, plan)
    finally:
        close_all(contestants)
    bytes_per_token = decode_bytes_per_token(artifact)
    return {
        "target": find_target(target).name,
        "decode_bytes_per_token": bytes_per_token,
        "decode_bandwidth_share": decode_share(values, bytes_per_token),
        "missing": failed,
        "values": values,
    }


def measure(
    contestants: Sequence[Measured],
    around: Callable[[Callable[[], Values]], Any],
    rounds: int,
    vocab_size: int,
    deadline: float = math.inf,
    plan: Plan = PEERS,
) -> tuple[Rounds, dict[str, str]]:
    """Measure every figure of every contestant in turn, `rounds` times, after a start; return failures, too, by name.

    Nothing begins after `deadline`, in seconds of `time.monotonic`.
    """
    values: Rounds = {contestant.name: defaultdict(list) for contestant in contestants}
    failed: dict[str, str] = {}
    for number in range(rounds):
        for seed, scenario, contestant in _order_of_round(contestants, number, plan):
            what = START.name if scenario is None else scenario.name
            if time.monotonic() > deadline:
                failed.setdefault(f"{contestant.name}: {what}", NO_TIME)
                continue
            if plan.one_server:
                for other in contestants:
                    if other is not contestant:
                        other.close()
            time.sleep(_REST_S)
            try:
                found = _measure_one(contestant, scenario, Prompts(100 * number + seed, vocab_size), around)
            except Exception as error:
                if contestant.name == OURS:
                    raise
                failed[f"{contestant.name}: {what}"] = f"{type(error).__name__}: {error}"[:300]
                contestant.close()  # so that the next scenario gets a fresh server
                found = {}
            for name, value in found.items():
                values[contestant.name][name].append(value)
            _tell(contestant.name, found)
        print(f"round {number + 1} of {rounds} done", file=sys.stderr)
    return values, failed


def _order_of_round(
    contestants: Sequence[Measured], number: int, plan: Plan
) -> Iterator[tuple[int, Scenario | None, Measured]]:
    """Yield seeds of prompts, scenarios and engines, in order: all engines by scenario, or all scenarios by engine."""
    turn = number % len(contestants)
    turned = (*contestants[turn:], *contestants[:turn])
    steps = [
        (seed, each) for seed, each in enumerate((None, *plan.scenarios)) if not (number and each and each.is_once)
    ]
    if plan.one_server:
        yield from ((*step, contestant) for contestant in turned for step in steps)
    else:
        yield from ((*step, contestant) for step in steps for contestant in turned)


def join_runs(before: dict[str, Any], figures: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a run with the values of the one before prepended, and the origins of both."""
    values: Rounds = {}
    for run in (before, figures):
        for contestant, found in run["values"].items():
            for name, each in found.items():
                values.setdefault(contestant, {}).setdefault(name, []).extend(each)
    missing = {
        name: why for name, why in (before["missing"] | figures["missing"]).items() if not _has_values(values, name)
    }
    share = decode_share(values, figures["decode_bytes_per_token"])
    kept = {"values": values, "missing": missing, "decode_bandwidth_share": share, "earlier": origins_before(before)}
    return figures | kept


def _has_values(values: Rounds, name: str) -> bool:
    """Return whether there are values of a contestant, or of one of its scenarios, `NAME: SCENARIO`."""
    contestant, _, scenario = name.partition(": ")
    found = values.get(contestant, {})
    return bool(found.get(scenario) if scenario else any(found.values()))


def decode_share(values: Rounds, bytes_per_token: int) -> float | None:
    """Return decode's bandwidth as a share of the machine's in the same round, the median; None without decode."""
    ours = values[OURS]
    decoded = ours.get(DECODE.name) or ours.get(DECODE_200.name) or ()
    rounds = list(zip(decoded, ours.get(READ_GB_PER_S, ()), strict=True))
    shares = [tokens_per_s * bytes_per_token / 1e9 / limit for tokens_per_s, limit in rounds]
    return statistics.median(shares) if shares else None


def _measure_one(
    contestant: Measured, scenario: Scenario | None, prompts: Prompts, around: Callable[[Callable[[], Values]], Any]
) -> Values:
    """Return a contestant's figures of a scenario, or of its start if that is None.

    Args:
        around: calls our decode with a measurement of memory bandwidth right around it.
    """
    if scenario is None:
        return contestant.start(prompts)
    if scenario.name not in (DECODE.name, DECODE_200.name) or contestant.name != OURS:
        return contestant.measure(scenario, prompts)
    found, limits = around(lambda: contestant.measure(scenario, prompts))
    return {**found, READ_GB_PER_S: limits.read_gb_per_s}


def _tell(name: str, found: Values) -> None:
    print(f"{name}: {', '.join(f'{key} {value:.4g}' for key, value in found.items())}", file=sys.stderr)


def _vocab_size(artifact: Artifact) -> int:
    """Return how many ids have a token: a model may have more rows than that."""
    profile = TokenizerProfile.from_dict(artifact.manifest.tokenizer.profile)
    return min(artifact.manifest.model.vocab_size, profile.vocab_size)
