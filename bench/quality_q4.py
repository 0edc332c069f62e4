"""What our q4 makes of weights in 16 bits, beside llama.cpp's Q4_0 of the same weights.

    python -m bench.quality_q4 MODEL.F16.gguf --python .cache/goldens-venv/bin/python
    python -m bench.quality_q4 SmolLM2-135M-Instruct.Q4_1.gguf --draw 0  # of values that Q4_1 may come from (f16.py)

For each kind of matrix: the squared error of the weights, and that of the outputs, on the inputs that the text gives
it (plain NumPy, 256 tokens each of tinyshakespeare and BBH); ours over Q4_0's, geometric mean over the layers, and
the worst layer's. Then perplexities: of the source, of our q4, of Q4_0 kept, and of llama.cpp on that Q4_0.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import asdict
from pathlib import Path

from radixlm.compile import compile_model
from radixlm.compile.sources import open_source
from radixlm.compile.stored_weights import Quantize
from radixlm.runtime.artifact import Artifact

from .evaluators import our_log_probs, peer_log_probs
from .f16 import f16_of
from .output_errors import Errors, by_kind, inputs_of
from .perplexity import Row, compare, show, windows_of
from .q4_0 import q4_0_of
from .results import write_results

NUM_TOKENS = 256  # of each text, for the errors of outputs
SOURCE, Q4, Q4_0, LLAMA_CPP = "radixlm, the source", "radixlm, q4", "radixlm, Q4_0 kept", "llama.cpp, Q4_0"


def main() -> None:
    """Compare, print, write `results/quality_q4_*.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a GGUF file of the Llama architecture, 16 bits or Q4_1")
    parser.add_argument("--draw", help="of a Q4_1 file: none for its values as they are, or a seed")
    parser.add_argument("--python", help="the Python that has xllamacpp; without it llama.cpp is left out")
    parser.add_argument("--cache", type=Path, default=Path(".cache/bench"), help="where the files made are kept")
    options = parser.parse_args()
    source = options.model
    if options.draw:
        source = f16_of(options.model, options.cache, None if options.draw == "none" else int(options.draw))
    errors, table = measure(source, options.cache, options.python)
    for row in errors:
        outputs = f"outputs {row.outputs:.3f}, {row.outputs_at_worst:.3f} at worst"
        print(f"{row.matrices:10} of {row.count:3}: weights {row.weights:.3f}, {outputs}")
    show(table)
    figures = {"errors": [asdict(e) for e in errors], "rows": [asdict(row) for row in table]}
    write_results(f"quality_q4_{options.draw or 'given'}", {"model": source.name, **figures})


def measure(source: Path, cache: Path, python: str | None) -> tuple[list[Errors], list[Row]]:
    """Of one GGUF file in 16 bits: errors by kind of matrix, and perplexities."""
    rounded = q4_0_of(source, cache)
    with tempfile.TemporaryDirectory(dir=cache) as directory:

        def compiled(model: Path, quantize: Quantize = "keep") -> Artifact:
            artifact = Path(directory) / f"{model.stem}-{quantize}"
            return Artifact.open(compile_model(model, artifact, quantize=quantize).path)

        artifacts = {SOURCE: compiled(source), Q4: compiled(source, "q4"), Q4_0: compiled(rounded)}
        windows = windows_of(artifacts[SOURCE])
        first = [part[0].token_ids[:NUM_TOKENS] for part in windows.values()]
        with open_source(source) as opened:
            errors = by_kind(opened, inputs_of(opened, first))
        table: list[Row] = []
        for text, part in windows.items():
            results = {name: our_log_probs(artifact, part) for name, artifact in artifacts.items()}
            if python:
                results[LLAMA_CPP] = peer_log_probs(python, "llama.cpp", rounded, part)
            table += compare(text, part, results, against=(Q4_0, LLAMA_CPP, SOURCE))
    return errors, table


if __name__ == "__main__":
    main()
