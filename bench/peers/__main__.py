"""radixlm beside other engines: the same weights, prompts and client, one after the other on all processors.

    python -m bench.peers [MODEL.gguf ...] [--rounds 3] [--add] [--peer ik_llama.cpp=DIR ...] [--only NAME ...]
                          [--target x86-64-v3]

Without a model: SmolLM2-135M in Q4_1, and Qwen2.5-Coder-0.5B in Q4_K_M. radixlm compiles the file, its numbers kept.
`make bench-peers` builds llama.cpp; `make peers` makes ik_llama.cpp, OpenVINO GenAI and vLLM. A peer that is not there,
or fails, is named as not measured. All decode greedily and ignore the end of a reply; what each is asked says
`scenarios.py`, and with which settings it runs `contestants.py`. With a target all are held to its instructions, as on
machines that have no others; peers that cannot be are left out by name.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from radixlm.compile import compile_model
from radixlm.compile.codegen.targets import find_target
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.artifact.cpu import default_num_threads
from radixlm.tokenizer_fix import TokenizerProfile

from ..limits import LimitsMeter
from ..model_work import decode_bytes_per_token
from ..prompts import Prompts
from ..report.page import publish
from ..results import read_results
from .contestants import OURS, PLACES, RadixLM, closed, peers_of, places_for
from .models import default_models, q4_0_of
from .scenarios import DECODE, SCENARIOS, START, Scenario, Values

NO_TIME = "there was no time"
_REST_S = 1.0  # between two runs: threads of the one before stop spinning
READ_GB_PER_S = "read_gb_per_s"  # beside ours: what all threads read right before or after decode, whichever is more
Rounds = dict[str, dict[str, list[float]]]  # contestant -> figure's name -> a value for each round


class Measured(Protocol):
    """A contestant, or what tests have in its place."""

    name: str

    def start(self, prompts: Prompts) -> Values:
        """Start it anew."""
        ...

    def measure(self, scenario: Scenario, prompts: Prompts) -> Values:
        """Ask it."""
        ...

    def close(self) -> None:
        """End its processes."""
        ...


def main() -> None:
    """Measure, print, write `results/peers.json`, which keeps the last run of each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="*", help="GGUF files")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--add", action="store_true", help="add the rounds to those of the model's last run")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing later: rows stay without values")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=DIR", help=f"one of {', '.join(PLACES)}")
    parser.add_argument("--only", action="append", default=[], metavar="WORD", help="peers whose names have the word")
    parser.add_argument("--target", default="native", help="as of `radixlm compile`; peers are in .cache/NAME-TARGET")
    parser.add_argument("--cache", type=Path, default=Path(".cache"), help="what peers read is kept there")
    options = parser.parse_args()
    places = places_for(options.target)
    places |= {name: Path(path).resolve() for name, _, path in (peer.partition("=") for peer in options.peer)}
    if unknown := places.keys() - PLACES.keys():
        parser.error(f"there is no peer {', '.join(unknown)}; use {', '.join(PLACES)}")
    deadline = time.monotonic() + options.seconds
    for gguf in [path.resolve() for path in options.models] or default_models():
        figures = compare(
            gguf, places, options.cache.resolve(), options.rounds, options.only, deadline, target=options.target
        )
        run = gguf.name if options.target == "native" else f"{gguf.name}, {options.target}"
        before = (read_results("peers") or {"runs": {}})["runs"].get(run)
        publish("peers", added(before, figures) if options.add and before else figures, run=run)


def compare(
    gguf: Path,
    places: dict[str, Path],
    cache: Path,
    rounds: int,
    only: Sequence[str],
    deadline: float,
    *,
    target: str = "native",
) -> dict[str, Any]:
    """All engines on one file; the artifact that ours is compiled to is thrown away."""
    threads = default_num_threads()
    quantize = places["llama.cpp"] / "llama-quantize"
    q4_0 = q4_0_of(gguf, quantize, cache / "bench") if quantize.exists() else cache / "bench" / "nothing"
    peers = peers_of(gguf, q4_0, places, cache, threads)
    missing = {peer.name: peer.why_missing for peer in peers if peer.why_missing is not None}
    if target != "native":
        missing |= {peer.name: f"it takes what the machine has, not {target}" for peer in peers if not peer.is_held}
    missing |= {peer.name: "not asked for" for peer in peers if only and not any(word in peer.name for word in only)}
    (cache / "bench").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache / "bench") as scratch:
        artifact = Artifact.open(compile_model(gguf, Path(scratch) / f"{gguf.stem}.radixlm", target=target).path)
        contestants = [RadixLM(artifact.path), *(peer for peer in peers if peer.name not in missing)]
        try:
            meter = LimitsMeter(find_target(target), artifact)
            values, failed = measure(contestants, meter.around, rounds, _vocab_size(artifact), deadline)
        finally:
            closed(contestants)
        bytes_per_token = decode_bytes_per_token(artifact)
    return {
        "model": gguf.name,
        "threads": threads,
        "target": find_target(target).name,
        "decode_bytes_per_token": bytes_per_token,
        "decode_bandwidth_share": decode_share(values, bytes_per_token),
        "missing": missing | failed,
        "values": values,
    }


def measure(
    contestants: Sequence[Measured],
    around: Callable[[Callable[[], Values]], Any],
    rounds: int,
    vocab_size: int,
    deadline: float = math.inf,
) -> tuple[Rounds, dict[str, str]]:
    """Every figure of every contestant in turn, `rounds` times, after a start; and what failed, by name.

    Nothing begins after `deadline`, in seconds of `time.monotonic`.
    """
    values: Rounds = {contestant.name: defaultdict(list) for contestant in contestants}
    failed: dict[str, str] = {}
    for number in range(rounds):
        for seed, scenario in enumerate((None, *SCENARIOS), start=100 * number):
            turn = number % len(contestants)
            for contestant in (*contestants[turn:], *contestants[:turn]):
                what = START.name if scenario is None else scenario.name
                if time.monotonic() > deadline:
                    failed.setdefault(f"{contestant.name}: {what}", NO_TIME)
                    continue
                time.sleep(_REST_S)
                try:
                    found = _measure(contestant, scenario, Prompts(seed, vocab_size), around)
                except Exception as error:
                    if contestant.name == OURS:
                        raise
                    failed[f"{contestant.name}: {what}"] = f"{type(error).__name__}: {error}"[:300]
                    contestant.close()  # what comes next gets a fresh server
                    found = {}
                for name, value in found.items():
                    values[contestant.name][name].append(value)
                _tell(contestant.name, found)
        print(f"round {number + 1} of {rounds} done", file=sys.stderr)
    return values, failed


def added(before: dict[str, Any], figures: dict[str, Any]) -> dict[str, Any]:
    """The figures of a run with the values of the one before in front of its own, and the origins of both."""
    values: Rounds = {}
    for run in (before, figures):
        for contestant, found in run["values"].items():
            for name, each in found.items():
                values.setdefault(contestant, {}).setdefault(name, []).extend(each)
    missing = {name: why for name, why in (before["missing"] | figures["missing"]).items() if not _found(values, name)}
    share = decode_share(values, figures["decode_bytes_per_token"])
    earlier = [*before.get("earlier", ()), *([before["origin"]] if "origin" in before else ())]
    kept = {"values": values, "missing": missing, "decode_bandwidth_share": share, "earlier": earlier}
    return figures | kept


def _found(values: Rounds, name: str) -> bool:
    """Whether there are values of a contestant, or of one of its scenarios, `NAME: SCENARIO`."""
    contestant, _, scenario = name.partition(": ")
    found = values.get(contestant, {})
    return bool(found.get(scenario) if scenario else any(found.values()))


def decode_share(values: Rounds, bytes_per_token: int) -> float | None:
    """What decode read of what the machine could read in the same round, the median; None if there was none."""
    ours = values[OURS]
    rounds = list(zip(ours.get(DECODE.name, ()), ours.get(READ_GB_PER_S, ()), strict=True))
    shares = [tokens_per_s * bytes_per_token / 1e9 / limit for tokens_per_s, limit in rounds]
    return statistics.median(shares) if shares else None


def _measure(
    contestant: Measured, scenario: Scenario | None, prompts: Prompts, around: Callable[[Callable[[], Values]], Any]
) -> Values:
    if scenario is None:
        return contestant.start(prompts)
    if (scenario.name, contestant.name) != (DECODE.name, OURS):
        return contestant.measure(scenario, prompts)
    found, limits = around(lambda: contestant.measure(scenario, prompts))
    return {**found, READ_GB_PER_S: limits.read_gb_per_s}


def _tell(name: str, found: Values) -> None:
    print(f"{name}: {', '.join(f'{key} {value:.4g}' for key, value in found.items())}", file=sys.stderr)


def _vocab_size(artifact: Artifact) -> int:
    """How many ids have a token: a model may have more rows than that."""
    profile = TokenizerProfile.from_dict(artifact.manifest.tokenizer.profile)
    return min(artifact.manifest.model.vocab_size, profile.vocab_size)


if __name__ == "__main__":
    main()
