"""How far SmolLM2's distributions are from transformers' on 1,196 positions, beside llama.cpp's distance.

    python -m bench.quality [--kv-dtypes f16 int8]

SmolLM2 is compiled with each of these dtypes of keys and values. Needs the development dependencies; the golden file is
tests/goldens/smollm2.npz, made by the script beside it.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import numpy as np
from radixlm.compile import compile_model
from radixlm.compile.sources import open_source
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.artifact.manifest import PAGE_SIZE, KVDType
from radixlm.runtime.model.batch import Batch
from radixlm.runtime.model.model_runner import ModelRunner

from .options import read_options
from .report.page import publish

GOLDENS = Path(__file__).resolve().parent.parent / "tests" / "goldens" / "smollm2_kl.py"
CHUNK = 64  # positions with logits in one forward


def main() -> None:
    """Compile, run, compare, print, write `results/quality.json`."""
    options = read_options(__doc__, kv_dtypes=("f16", "int8"))
    publish("quality", {"rows": [measure(dtype) for dtype in options.kv_dtypes]})


def measure(kv_dtype: KVDType) -> dict[str, object]:
    """Means over all positions, and the bounds of 95 % of paired bootstraps of the ratio to llama.cpp's distance."""
    golden = _goldens().SmolLM2Golden.load()
    with tempfile.TemporaryDirectory() as directory, open_source("smollm2") as source:
        embedding = source.read("model.embed_tokens.weight").dequantize()
        path = compile_model("smollm2", Path(directory) / "smollm2.radixlm", kv_dtype=kv_dtype).path
        longest = max(len(passage.ids) for passage in golden.passages)
        runner = ModelRunner(Artifact.open(path), num_pages=-(-longest // PAGE_SIZE))
        parts = [_goldens().compare(passage, _logits(runner, passage.ids), embedding) for passage in golden.passages]
    compared = _goldens().Comparison.joined(parts)
    return {
        "kv_dtype": kv_dtype,
        "positions": len(compared.kl),
        "mean_kl_nats": float(compared.kl.mean()),
        "top1_agreement": float(compared.agrees.mean()),
        "llama_cpp_mean_kl_nats": float(compared.llama_cpp_kl.mean()),
        "ratio": [float(x) for x in (compared.bootstrap.low, compared.bootstrap.ratio, compared.bootstrap.high)],
    }


def _goldens() -> ModuleType:
    if "smollm2_kl" not in sys.modules:
        spec = importlib.util.spec_from_file_location("smollm2_kl", GOLDENS)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["smollm2_kl"] = module
        spec.loader.exec_module(module)
    return sys.modules["smollm2_kl"]


def _logits(runner: ModelRunner, token_ids: list[int]) -> np.ndarray:
    pages = np.arange(-(-len(token_ids) // PAGE_SIZE), dtype=np.int32)[None]
    logits = []
    for start in range(0, len(token_ids), CHUNK):
        positions = np.arange(start, min(start + CHUNK, len(token_ids)), dtype=np.int32)
        rows = positions - np.int32(start)
        ids = np.array(token_ids[start : start + CHUNK], np.int32)
        batch = Batch(ids, positions, positions, np.zeros_like(rows), pages, positions + np.int32(1), rows)
        logits.append(runner.forward(batch).copy())
    return np.concatenate(logits)


if __name__ == "__main__":
    main()
