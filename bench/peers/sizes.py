"""Compare models of popular sizes with other engines: real shapes with random weights, as each engine serves them.

    python -m bench.peers.sizes [SHAPE[:LAYERS] ...] [--rounds 3] [--long] [--rows NAME ...] [--only NAME ...] [--add]
                                [--target x86-64-v3]

Without a shape: Qwen3-4B, Qwen3-30B-A3B and gpt-oss-20b, whole if memory holds that twice, else as many layers as fit;
figures of the whole model are then scaled, and marked. Each engine has the machine to itself for a turn: it is started,
runs all scenarios, and is ended. `--long` adds prompts of 32,000 tokens, and `--rows` selects scenarios. Peers are
those of `make peers` that read the file; `make bench-sizes` builds llama.cpp. Files are written to `.cache/sizes` and
kept. With `--target` ours is compiled for it, and peers are those that were built for it, or those of `make peers` if
it is the target of this machine.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from radixlm.runtime.artifact import Artifact
from radixlm.runtime.artifact.cpu import default_num_threads

from ..prompts import Prompts
from ..report.page import publish
from ..results import read_results
from .comparison import join_runs, measure_all, missing_of
from .contestants import Contestant, FreshRadixLM, TargetRadixLM, close_all
from .other_engines import peers_of, places_for
from .scenarios import PREFILL_32000, SIZES, Plan
from .shapes import SHAPES, Shape, write_shape

DEFAULT_SHAPES = ("qwen3-4b", "qwen3-30b-a3b", "gpt-oss-20b")
_COPIES = 2.5  # of the weights that exist at once: a file's pages, an engine's copy, and room for KV
_ANY_VOCABULARY = 150_000


def main() -> None:
    """Measure engines on models with random weights; print, and write `results/sizes.json`.

    The figures are those of `SIZES`: starts, throughput, latency and memory. The file keeps the last run of each shape.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=DEFAULT_SHAPES, metavar="SHAPE[:LAYERS]", help=", ".join(SHAPES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--add", action="store_true", help="add the rounds to those of the shape's last run")
    parser.add_argument("--long", action="store_true", help="prompts of 32,000 tokens, too")
    parser.add_argument("--rows", nargs="+", default=[], choices=[each.name for each in SIZES.scenarios])
    parser.add_argument("--only", action="append", default=[], metavar="WORD", help="peers whose names have the word")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing later: rows stay without values")
    parser.add_argument("--target", default="native", help="as of `radixlm compile`; peers are in .cache/NAME-TARGET")
    parser.add_argument("--cache", type=Path, default=Path(".cache"), help="files are kept there")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    for word in options.shapes:
        name, _, layers = word.partition(":")
        whole = SHAPES[name]
        shape = whole.with_layers(int(layers) if layers else fitting_layers(whole, _memory_bytes()))
        plan = select_scenarios(options.rows, is_long=options.long)
        figures = compare(
            shape, whole, options.cache.resolve(), options.rounds, options.only, deadline, plan, options.target
        )
        run = f"{name}, {shape.num_layers} of {whole.num_layers} layers" + (
            "" if options.target == "native" else f", {options.target}"
        )
        before = (read_results("sizes") or {"runs": {}})["runs"].get(run)
        publish("sizes", join_runs(before, figures) if options.add and before else figures, run=run)


def fitting_layers(whole: Shape, memory_bytes: int) -> int:
    """Return as many layers as fit into memory, including the copies that engines make of them.

    >>> fitting_layers(SHAPES["qwen3-4b"], 24 << 30), fitting_layers(SHAPES["qwen3-4b"], 3 << 30)
    (36, 14)
    """
    outer = whole.with_layers(0).num_bytes
    of_layer = (whole.num_bytes - outer) / whole.num_layers
    return max(1, min(whole.num_layers, int((memory_bytes / _COPIES - outer) / of_layer)))


def select_scenarios(rows: Sequence[str], *, is_long: bool) -> Plan:
    """Return the plan with the scenarios of these names, or with all but the longest."""
    names = set(rows) or {each.name for each in SIZES.scenarios if is_long or each.name != PREFILL_32000.name}
    return replace(SIZES, scenarios=[each for each in SIZES.scenarios if each.name in names])


def compare(
    shape: Shape,
    whole: Shape,
    cache: Path,
    rounds: int,
    only: Sequence[str],
    deadline: float,
    plan: Plan = SIZES,
    target: str = "native",
) -> dict[str, Any]:
    """Measure all engines on one shape, first starts first; return their values and what could not be measured.

    Returns:
        What `measure_all` returns, with first starts, and why peers are `missing`, by name. `decode_scale` is the ratio
        of the bytes per token of the `whole` model to those of the `shape`, which may have fewer layers.
    """
    gguf = shape_file(shape, cache)
    threads = default_num_threads()
    peers = [
        each for each in peers_of(gguf, gguf, places_for(target), cache, threads) if each.name.endswith("same file")
    ]
    missing = missing_of(peers, only, target)
    with tempfile.TemporaryDirectory(dir=gguf.parent) as scratch:
        is_native = target == "native"
        ours = FreshRadixLM(gguf, Path(scratch)) if is_native else TargetRadixLM(gguf, Path(scratch), target)
        contestants = [ours, *(peer for peer in peers if peer.name not in missing)]
        first, failed = _first_starts(contestants, gguf)
        measured = [each for each in contestants if each.name not in failed]
        found = measure_all(measured, Artifact.open(ours.artifact), rounds, deadline, plan=plan, target=target)
    for name, values in first.items():
        found["values"][name].update({figure: [value] for figure, value in values.items()})
    return {
        "model": gguf.name,
        "threads": threads,
        **found,
        "missing": missing | failed | found["missing"],
        "layers": [shape.num_layers, whole.num_layers],
        "decode_scale": whole.bytes_per_token / shape.bytes_per_token,
    }


def shape_file(shape: Shape, cache: Path) -> Path:
    """Return the shape's file, which is written once."""
    path = cache / "sizes" / f"{shape.name}-{shape.num_layers}l.gguf"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished")
        write_shape(shape, unfinished)
        os.replace(unfinished, path)
    return path


def _first_starts(contestants: Sequence[Contestant], gguf: Path) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """Return the first start of each, and why one could not start; from then on no two are alive at a time."""
    first: dict[str, dict[str, float]] = {}
    failed: dict[str, str] = {}
    for contestant in contestants:
        contestant.one_server = True
        try:
            first[contestant.name] = contestant.first_start(gguf, Prompts(0, _ANY_VOCABULARY))
        except Exception as error:
            if contestant is contestants[0]:
                raise
            failed[contestant.name] = f"{type(error).__name__}: {error}"[:300]
        finally:
            close_all([contestant])
        print(f"first start of {contestant.name}: {first.get(contestant.name)}", flush=True)
    return first, failed


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


if __name__ == "__main__":
    main()
