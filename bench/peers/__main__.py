"""Compare radixlm with other engines: the same weights, prompts and client, one after the other on all processors.

    python -m bench.peers [MODEL.gguf ...] [--rounds 3] [--add] [--peer ik_llama.cpp=DIR ...] [--only NAME ...]
                          [--target x86-64-v3]

Without a model: SmolLM2-135M in Q4_1, and Qwen2.5-Coder-0.5B in Q4_K_M. radixlm compiles the file, and keeps its
codes. `make bench-peers` builds llama.cpp; `make peers` makes ik_llama.cpp, OpenVINO GenAI and vLLM. A peer that is
missing or fails is reported as not measured. All decode greedily and ignore the end of a reply; the requests are in
`scenarios.py`, the settings in `contestants.py`. With a target all are restricted to its instructions, as on machines
that have no others; peers that cannot be are reported as not measured.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from radixlm.compile import compile_model
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.artifact.cpu import default_num_threads

from ..report.page import publish
from ..results import read_results
from .comparison import join_runs, measure_all, missing_of
from .contestants import RadixLM
from .models import default_models, q4_0_of
from .other_engines import PLACES, peers_of, places_for


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
        publish("peers", join_runs(before, figures) if options.add and before else figures, run=run)


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
    """Measure all engines on one file; delete the artifact that ours is compiled to."""
    threads = default_num_threads()
    quantize = places["llama.cpp"] / "llama-quantize"
    q4_0 = q4_0_of(gguf, quantize, cache / "bench") if quantize.exists() else cache / "bench" / "nothing"
    peers = peers_of(gguf, q4_0, places, cache, threads)
    missing = missing_of(peers, only, target)
    (cache / "bench").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache / "bench") as scratch:
        artifact = Artifact.open(compile_model(gguf, Path(scratch) / f"{gguf.stem}.radixlm", target=target).path)
        contestants = [RadixLM(artifact.path), *(peer for peer in peers if peer.name not in missing)]
        found = measure_all(contestants, artifact, rounds, deadline, target=target)
    return {"model": gguf.name, "threads": threads, **found, "missing": missing | found["missing"]}


if __name__ == "__main__":
    main()
