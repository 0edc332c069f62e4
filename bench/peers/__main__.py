"""radixlm beside llama.cpp: the same weights, the same prompts, alternating runs, all processors for each in turn.

    python -m bench.peers [MODEL.gguf ...] [--rounds 5] [--llama-cpp .cache/llama.cpp]

Without a model: SmolLM2-135M in Q4_1, and Qwen2.5-Coder-0.5B in Q4_K_M. radixlm compiles the file, its numbers kept.
llama.cpp is built for this machine by `.ci/llama_cpp.sh`, and runs that file and the same weights requantized to
Q4_0, for which it has its fastest kernels; so does the wheel that pip gives, `xllamacpp`. All decode greedily and
ignore the end of a reply. A ratio is of two runs of the same round; a bar is held against the median.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from radixlm.compile import compile_model
from radixlm.compile.codegen.targets import find_target
from radixlm.compile.sources import default_model
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.artifact.cpu import default_num_threads
from radixlm.tokenizer_fix import TokenizerProfile

from ..engine.figures import DECODE, MEASURES, MEMORY, SERVED, START
from ..limits import LimitsMeter
from ..model_work import decode_bytes_per_token
from ..prompts import Prompts
from ..report.page import publish
from .bars import OURS, Q4_0, SAME, WHEEL, Values, verdicts
from .contestants import Contestant, LlamaCppBuild, LlamaCppContestant, RadixLMContestant
from .models import default_models, q4_0_of

FIGURES = (*MEASURES, START, MEMORY)
_REST_S = 0.3  # between two runs: threads of the one before stop spinning
_MEMORY_ROUNDS = 2
READ_GB_PER_S = "read_gb_per_s"  # beside ours: what all threads read right before or after decode, whichever is more


def main() -> None:
    """Measure, print, write `results/peers.json`, which keeps the last run of each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="*", help="GGUF files")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--llama-cpp", type=Path, default=Path(".cache/llama.cpp"), help="where its programs are")
    parser.add_argument("--cache", type=Path, default=Path(".cache/bench"), help="where the Q4_0 files are kept")
    options = parser.parse_args()
    for gguf in [path.resolve() for path in options.models] or default_models():
        publish("peers", compare(gguf, options.llama_cpp, options.cache, options.rounds), run=gguf.name)


def compare(gguf: Path, llama_cpp: Path, cache: Path, rounds: int) -> dict[str, Any]:
    """All engines on one file; the artifact that ours is compiled to is thrown away."""
    threads = default_num_threads()
    small = q4_0_of(gguf, llama_cpp / "llama-quantize", cache)
    native, wheel = LlamaCppBuild.native(llama_cpp), LlamaCppBuild.wheel()
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=cache)))
        artifact = Artifact.open(compile_model(gguf, scratch / f"{gguf.stem}.radixlm").path)
        peers = [
            stack.enter_context(closing(LlamaCppContestant(name, build, file, num_threads=threads)))
            for name, build, file in ((SAME, native, gguf), (Q4_0, native, small), (WHEEL, wheel, small))
        ]
        ours = stack.enter_context(closing(RadixLMContestant(OURS, artifact.path, over_http=SERVED)))
        system_info = {"native": peers[0].system_info(), "wheel": peers[-1].system_info()}
        bytes_per_token = decode_bytes_per_token(artifact)
        values = measure([ours, *peers], LimitsMeter(find_target("native")), rounds, _vocab_size(artifact))
    share = statistics.median(decode_shares(values, bytes_per_token))
    is_held = gguf.name == default_model.FILE_NAME
    return {
        "model": gguf.name,
        "threads": threads,
        "llama_cpp_system_info": system_info,
        "decode_bytes_per_token": bytes_per_token,
        "decode_bandwidth_share": share,
        "values": values,
        "verdicts": [asdict(verdict) for verdict in verdicts(values, share)] if is_held else [],
    }


def measure(contestants: list[Contestant], meter: LimitsMeter, rounds: int, vocab_size: int) -> Values:
    """Every figure of every contestant in turn, `rounds` times; each begins in its turn."""
    values: dict[str, dict[str, list[float]]] = {c.name: defaultdict(list) for c in contestants}
    for number in range(-1, rounds):  # the first round warms up and is not counted
        for seed, figure in enumerate(FIGURES, start=100 * (number + 1)):
            if (figure is MEMORY and number >= _MEMORY_ROUNDS) or (number < 0 and figure in (MEMORY, START)):
                continue
            turn = number % len(contestants)
            for contestant in contestants[turn:] + contestants[:turn]:
                time.sleep(_REST_S)
                prompts = Prompts(seed, vocab_size)
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


def _vocab_size(artifact: Artifact) -> int:
    """How many ids have a token: a model may have more rows than that."""
    profile = TokenizerProfile.from_dict(artifact.manifest.tokenizer.profile)
    return min(artifact.manifest.model.vocab_size, profile.vocab_size)


if __name__ == "__main__":
    main()
