"""Measure decode and prefill of a recurrent model: Qwen3.5-0.8B's shape with random weights in 4 bits.

    python -m bench.hybrid [--rounds 5] [--llama-cpp .cache/llama.cpp]

The share is the bytes that a token reads and writes, weights and state, divided by what memory delivers in that time;
bandwidth is measured around each figure. llama.cpp runs the same file, in turns, with its own bench, or is reported as
not measured. Needs the folder of real inputs for a tokenizer (`RADIXLM_DATA`).
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from pathlib import Path
from statistics import median

from radixlm.compile import compile_model
from radixlm.compile.codegen.targets import find_target
from radixlm.runtime import Engine, SamplingParams
from radixlm.runtime.artifact import Artifact

from ..data import data_dir
from ..limits import LimitsMeter
from ..native import num_threads
from ..options import read_options
from ..replay.models import MODELS, read_tokenizer
from ..report.page import publish
from .shape import Qwen35Shape, write_gguf

PROMPT, REPLY = 512, 65


def main() -> None:
    """Compile a recurrent model, measure its decode and prefill, and write `results/hybrid.json`."""
    options, model = read_options(__doc__, rounds=5, llama_cpp=Path(".cache/llama.cpp")), MODELS["qwen2"]
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "hybrid.gguf"
        write_gguf(Qwen35Shape(), file, read_tokenizer(model, data_dir()), model)
        artifact = Artifact.open(compile_model(file, Path(scratch) / "hybrid.radixlm").path)
        publish("hybrid", measured(artifact, file, options.llama_cpp / "llama-bench", options.rounds))


def measured(artifact: Artifact, file: Path, peer: Path, num_rounds: int) -> dict[str, object]:
    """Return medians of the rounds, after one that is not counted; `peer` is llama.cpp's bench."""
    meter, manifest = LimitsMeter(find_target("native"), artifact), artifact.manifest
    state_bytes, weights = manifest.model.state_bytes, manifest.quantization.token_bytes
    assert weights is not None, "the compiler counts what a token reads"
    decodes, prefills, shares = list[float](), list[float](), list[float]()
    peers: dict[str, list[float]] = {"prefill": [], "decode": []}
    with Engine(artifact, idle_work=False, match="off") as engine:
        for number in range(num_rounds + 1):
            prompt = [(7 * number + 13 * place) % 1000 for place in range(PROMPT)]
            prefill_s = _seconds(engine, prompt, 1)
            seconds, limits = meter.around(lambda: _seconds(engine, prompt, REPLY))  # noqa: B023
            each_s = (seconds - prefill_s) / (REPLY - 1)
            if number:
                prefills.append(PROMPT / prefill_s)
                decodes.append(1 / each_s)
                shares.append((weights + 2 * state_bytes) / each_s / 1e9 / limits.read_gb_per_s)
            if number and peer.exists():
                for name, per_s in _run_llama_bench(peer, file).items():
                    peers[name].append(per_s)
    return {
        "model": Qwen35Shape().name,
        "decode": median(decodes),
        "prefill": median(prefills),
        "share": median(shares),
        "weights_bytes": weights,
        "state_bytes": state_bytes,
        "num_rounds": num_rounds,
        "peer": {name: median(values) for name, values in peers.items()} if peer.exists() else None,
    }


def _seconds(engine: Engine, prompt: list[int], num_tokens: int) -> float:
    """Return the seconds in which the engine generates this many tokens after a prompt."""
    begun = time.perf_counter()
    engine.generate(prompt, SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True))
    return time.perf_counter() - begun


def _run_llama_bench(peer: Path, file: Path) -> dict[str, float]:
    """Run llama.cpp's bench on the file; return the tokens per second of `prefill` and `decode`.

    The prompt and the reply have the lengths of ours. The bench warms up by itself.
    """
    lengths = ("-p", str(PROMPT), "-n", str(REPLY - 1), "-r", "1")
    command = (str(peer.resolve()), "-m", str(file), *lengths, "-t", str(num_threads()), "-fa", "1", "-o", "json")
    rows = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {"prefill" if row["n_prompt"] else "decode": float(row["avg_ts"]) for row in rows}


if __name__ == "__main__":
    main()
