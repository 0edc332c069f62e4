"""How far SmolLM2's distributions are from transformers' on 1,196 positions, beside llama.cpp's distance.

    .venv/bin/python bench/quality.py                   # as compiled
    .venv/bin/python bench/quality.py --as-f32 down     # with some matrices in f32, which no rounding enters
    .venv/bin/python bench/quality.py --eight-bits      # with 8-bit activations for sensitive matrices too
    .venv/bin/python bench/quality.py --kv-dtype int8   # keys and values stored so

Needs the development dependencies; the golden file is tests/goldens/smollm2.npz, made by the script beside it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import get_args
from unittest.mock import patch

import numpy as np
from radixlm.compile import compile_model, stored_weights
from radixlm.compile.models import llama
from radixlm.compile.ops.layers import Linear
from radixlm.compile.sources import open_source
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.artifact.manifest import PAGE_SIZE, KVDType
from radixlm.runtime.model.batch import Batch
from radixlm.runtime.model.model_runner import ModelRunner

GOLDENS = Path(__file__).resolve().parent.parent / "tests" / "goldens" / "smollm2_kl.py"
MATRICES = {
    "none": (),
    "head": ("embed_tokens",),
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
CHUNK = 64  # positions with logits in one forward


def main() -> None:
    """Compile, run, compare, print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--as-f32", choices=MATRICES, default="none", help="matrices to store in f32")
    parser.add_argument("--eight-bits", action="store_true", help="give no matrix 16-bit activations")
    parser.add_argument("--kv-dtype", choices=get_args(KVDType), default="f16", help="how to store keys and values")
    options = parser.parse_args()
    chosen = options.as_f32
    golden = _goldens().SmolLM2Golden.load()
    with tempfile.TemporaryDirectory() as directory, open_source("smollm2") as source:
        embedding = source.read("model.embed_tokens.weight").dequantize()
        artifact = Path(directory) / "smollm2.radixlm"
        with (
            patch.object(stored_weights, "_mode", lambda name, *_: _mode(name, MATRICES[chosen])),
            patch.object(llama, "Linear", _eight_bit_linear) if options.eight_bits else nullcontext(),
        ):
            compile_model("smollm2", artifact, kv_dtype=options.kv_dtype)
        longest = max(len(passage.ids) for passage in golden.passages)
        runner = ModelRunner(Artifact.open(artifact), num_pages=-(-longest // PAGE_SIZE))
        parts = [_goldens().compare(passage, _logits(runner, passage.ids), embedding) for passage in golden.passages]
    compared = _goldens().Comparison.joined(parts)
    result = {
        "as_f32": chosen,
        "eight_bits": options.eight_bits,
        "kv_dtype": options.kv_dtype,
        "positions": len(compared.kl),
        "mean_kl_nats": round(float(compared.kl.mean()), 6),
        "top1_agreement": round(float(compared.agrees.mean()), 4),
        "llama_cpp_mean_kl_nats": round(float(compared.llama_cpp_kl.mean()), 6),
        "ratio": [round(x, 3) for x in (compared.bootstrap.low, compared.bootstrap.ratio, compared.bootstrap.high)],
    }
    print(json.dumps(result))


def _goldens() -> ModuleType:
    if "smollm2_kl" not in sys.modules:
        spec = importlib.util.spec_from_file_location("smollm2_kl", GOLDENS)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["smollm2_kl"] = module
        spec.loader.exec_module(module)
    return sys.modules["smollm2_kl"]


def _mode(name: str, as_f32: tuple[str, ...]) -> str | None:
    return "f32" if any(part in name for part in as_f32) else None


def _eight_bit_linear(
    name: str, num_outputs: int, num_inputs: int, has_bias: bool = False, sensitive: bool = False
) -> Linear:
    return Linear(name, num_outputs, num_inputs, has_bias)


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
