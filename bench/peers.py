"""radixlm beside llama.cpp: the same model, the same prompts, alternating runs, all processors for each in turn.

    python -m bench.peers ARTIFACT [--rounds 5]

llama.cpp is the PyPI wheel `xllamacpp`, on the GGUF file that the artifact was compiled from (Q4_1) and on the same
weights rounded to Q4_0, for which it has its fastest kernels. Both decode greedily and ignore the end of a reply. A
ratio is of two runs of the same round; a bar is held against the median.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path

from radixlm.compile.sources import default_model
from radixlm.compile.targets import find_target
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.cpu import default_num_threads

from .bars import OURS, PEERS, Q4_0, Q4_1, Values, ratios, verdicts
from .contestants import Contestant, LlamaCppContestant, RadixLMContestant
from .figures import DECODE, MEASURES, MEMORY, RESIDENT, START, Figure
from .limits import LimitsMeter
from .model_work import decode_bytes_per_token
from .prompts import Prompts
from .q4_0 import q4_0_of
from .results import write_results
from .timing import Spread

FIGURES = (*MEASURES, START, MEMORY)
_REST_S = 0.3  # between two runs: threads of the one before stop spinning
_MEMORY_ROUNDS = 2
READ_GB_PER_S = "read_gb_per_s"  # beside ours: what all threads read right before or after decode, whichever is more


def main() -> None:
    """Measure, print, write `results/peers.json`."""
    options = _options()
    artifact = Artifact.open(options.artifact)
    gguf = options.gguf or default_model.download()
    started = time.monotonic()
    with ExitStack() as stack:
        threads = default_num_threads()
        files = {Q4_1: gguf, Q4_0: q4_0_of(gguf, options.cache)}
        peers = [
            stack.enter_context(closing(LlamaCppContestant(name, file, python=options.python, num_threads=threads)))
            for name, file in files.items()
        ]
        ours = stack.enter_context(closing(RadixLMContestant(OURS, artifact.path)))
        meter = LimitsMeter(find_target("native"))
        system_info = peers[0].system_info()
        values = measure([ours, *peers], meter, options.rounds)
    share = statistics.median(decode_shares(values, decode_bytes_per_token(artifact)))
    _print(values)
    reads = Spread.of(values[OURS][READ_GB_PER_S])
    print(f"\nread bandwidth {reads.median:.1f} ({reads.minimum:.1f}-{reads.maximum:.1f}) GB/s around decode, ", end="")
    print(f"{decode_bytes_per_token(artifact) / 1e6:.1f} MB a token")
    print(f"llama.cpp: xllamacpp, built for {system_info}")
    for verdict in verdicts(values, share):
        print(f"{'met   ' if verdict.is_met else 'MISSED'} {verdict.value:10,.2f} of {verdict.wanted:g}  {verdict.bar}")
    print(f"{time.monotonic() - started:.0f} s")
    write_results(
        "peers",
        {
            "model": gguf.name,
            "threads": threads,
            "llama_cpp_system_info": system_info,
            "decode_bytes_per_token": decode_bytes_per_token(artifact),
            "decode_bandwidth_share": share,
            "values": values,
            "verdicts": [asdict(verdict) for verdict in verdicts(values, share)],
        },
    )


def measure(contestants: list[Contestant], meter: LimitsMeter, rounds: int) -> Values:
    """Every figure of every contestant in turn, `rounds` times; who begins rotates."""
    values: dict[str, dict[str, list[float]]] = {c.name: defaultdict(list) for c in contestants}
    for number in range(-1, rounds):  # the first round warms up and is not counted
        for seed, figure in enumerate(FIGURES, start=100 * (number + 1)):
            if (figure is MEMORY and number >= _MEMORY_ROUNDS) or (number < 0 and figure in (MEMORY, START)):
                continue
            turn = number % len(contestants)
            for contestant in contestants[turn:] + contestants[:turn]:
                time.sleep(_REST_S)
                prompts = Prompts(seed)
                if (figure, contestant.name) == (DECODE, OURS):
                    measured, limits = meter.around(lambda: contestant.measure(figure, prompts))  # noqa: B023
                    measured[READ_GB_PER_S] = limits.read_gb_per_s
                else:
                    measured = contestant.measure(figure, prompts)
                if number >= 0:
                    for name, value in measured.items():
                        values[contestant.name][name].append(value)
        print(f"round {number + 1} of {rounds} done", file=sys.stderr)
    return values


def decode_shares(values: Values, bytes_per_token: int) -> list[float]:
    """Of each round, what decode read of what the machine could read then, for it varies with the neighbours."""
    rounds = zip(values[OURS][DECODE.name], values[OURS][READ_GB_PER_S], strict=True)
    return [tokens_per_s * bytes_per_token / 1e9 / limit for tokens_per_s, limit in rounds]


def _print(values: Values) -> None:
    names = (OURS, *PEERS)
    print(
        f"{'median (min-max)':62s}"
        + "".join(f"{name:>26s}" for name in names)
        + "    times Q4_1, Q4_0: median (min-max)"
    )
    for figure in (*FIGURES, RESIDENT):
        spreads = (Spread.of(values[name][figure.name]) for name in names)
        print(
            f"{figure.title + ', ' + figure.unit:62s}"
            + "".join(
                f"{spread.median:10,.2f} ({spread.minimum:,.1f}-{spread.maximum:,.1f})".rjust(26) for spread in spreads
            )
            + "  "
            + "".join(_ratio(values, figure, peer) for peer in PEERS)
        )


def _ratio(values: Values, figure: Figure, peer: str) -> str:
    ratio = ratios(values, figure, (peer,))
    return f"{ratio.median:8.2f} ({ratio.minimum:.2f}-{ratio.maximum:.2f})"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path, help="compiled from the GGUF file, its numbers kept")
    parser.add_argument("--gguf", type=Path, help="by default the file behind the alias smollm2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--python", default=sys.executable, help="the Python that has xllamacpp")
    parser.add_argument("--cache", type=Path, default=Path(".cache/bench"), help="where the Q4_0 file is kept")
    return parser.parse_args()


if __name__ == "__main__":
    main()
