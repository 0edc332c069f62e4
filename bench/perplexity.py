"""Perplexity of an artifact, and of llama.cpp and transformers on the file that it was compiled from.

    python -m bench.perplexity --kv-dtype f16 --kv-dtype int8 --ours-only --text tinyshakespeare
    python -m bench.perplexity MODEL.gguf --peer llama.cpp --peer transformers --python .cache/goldens-venv/bin/python

All see the same token ids, cut into the same windows (`windows.py`), without BOS where the model's tokenizer adds
none, and count the same tokens. llama.cpp keeps its defaults, f16 KV among them. Perplexity is exp(-mean log p).
Two are compared token by token: the logarithm of their ratio is the mean difference of log p, and its standard error
takes windows as the independent units, because the errors of neighbours go together.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

import numpy as np
from radixlm.compile import compile_model
from radixlm.compile.sources import default_model
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.artifact.manifest import KVDType
from tokenizers import Tokenizer

from .evaluators import our_log_probs, peer_log_probs
from .results import write_results
from .texts import texts
from .windows import Float64, Window, cut

WINDOW = 512  # tokens; half of them are counted
PEERS = ("llama.cpp", "transformers")


@dataclass(frozen=True)
class Difference:
    """By how much one evaluator is worse than another, over the same tokens."""

    ratio: float  # of the perplexities
    nats: float  # a token, the logarithm of the ratio
    standard_error: float  # of nats


@dataclass(frozen=True)
class Row:
    """What one evaluator made of one text."""

    text: str
    evaluator: str
    tokens: int
    perplexity: float
    against: dict[str, Difference]  # by the other's name


def difference(ours: Float64, theirs: Float64, windows: Sequence[Window]) -> Difference:
    """Compare log-probabilities `[N]` of the counted tokens of `windows`.

    The standard error is that of a ratio of sums over windows (Cochran, Sampling Techniques, section 2.11).
    """
    counts = np.array([len(window.targets) for window in windows])
    sums = np.add.reduceat(theirs - ours, np.cumsum(counts) - counts)
    mean = sums.sum() / counts.sum()
    variance = np.square(sums - mean * counts).sum() * len(counts) / (len(counts) - 1)
    return Difference(float(np.exp(mean)), float(mean), float(np.sqrt(variance) / counts.sum()))


def windows_of(artifact: Artifact, size: int = WINDOW) -> dict[str, list[Window]]:
    """By text, the windows of all its documents."""
    info = artifact.manifest.tokenizer
    bos = info.bos_token_id if info.add_bos_token else None
    documents = texts(Tokenizer.from_str(artifact.tokenizer_json))
    return {name: [window for ids in parts for window in cut(ids, size, bos)] for name, parts in documents.items()}


def compare(
    text: str, windows: Sequence[Window], results: Mapping[str, Float64], against: Sequence[str]
) -> Iterator[Row]:
    """A row for each evaluator of `results`, compared with those named in `against`."""
    for name, result in results.items():
        others = [other for other in against if other != name and other in results]
        differences = {other: difference(result, results[other], windows) for other in others}
        yield Row(text, name, len(result), float(np.exp(-result.mean())), differences)


def show(table: Sequence[Row]) -> None:
    """Print rows; a ratio with twice its standard error."""
    for row in table:
        print(f"{row.text}, {row.tokens} tokens: {row.evaluator:24} {row.perplexity:8.4f}", end="")
        for other, found in row.against.items():
            print(f"   {found.ratio:.4f} ± {2 * found.ratio * found.standard_error:.4f} times {other}", end="")
        print()


def main() -> None:
    """Compile with each KV dtype, run, compare; print, and write `results/perplexity.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", help="a GGUF file; by default the one behind the alias smollm2")
    parser.add_argument("--kv-dtype", action="append", choices=get_args(KVDType), help="of ours; may be repeated")
    parser.add_argument("--text", action="append", help="may be repeated; by default all of texts.py")
    parser.add_argument("--ours-only", action="store_true", help="no peer")
    parser.add_argument("--peer", action="append", choices=PEERS, help="may be repeated; by default llama.cpp")
    parser.add_argument("--python", default=sys.executable, help="the Python that has the peers")
    options = parser.parse_args()
    model = options.model or default_model.download()
    dtypes: list[KVDType] = options.kv_dtype or ["f16"]
    peers = [] if options.ours_only else options.peer or PEERS[:1]
    results: dict[str, dict[str, Float64]] = defaultdict(dict)
    windows: dict[str, list[Window]] = {}
    with tempfile.TemporaryDirectory() as directory:
        for dtype in dtypes:
            artifact = Artifact.open(compile_model(model, Path(directory) / dtype, kv_dtype=dtype).path)
            windows = {name: found for name, found in windows_of(artifact).items() if name in (options.text or [name])}
            for text in windows:
                results[text][_ours(dtype)] = our_log_probs(artifact, windows[text])
    table: list[Row] = []
    for text in windows:
        for peer in peers:
            results[text][peer] = peer_log_probs(options.python, peer, model, windows[text])
        table += compare(text, windows[text], results[text], against=(_ours(dtypes[0]), *PEERS))
    show(table)
    write_results("perplexity", {"model": model.name, "window": WINDOW, "rows": [asdict(row) for row in table]})


def _ours(dtype: KVDType) -> str:
    return f"radixlm, {dtype} KV"


if __name__ == "__main__":
    main()
