"""Make `adapters.npz`: what transformers computes for the tiny adapters of `tiny_adapters.py`.

    python -m tests.goldens.make_adapters

Run from the repository, in the environment of `requirements.txt`. An adapter is added to the weights, `scale * B A`
in float32: that is what it means, whatever computes it. For each adapter NAME the file holds
    NAME/digest     of the model's weights
    NAME/prompt     token ids
    NAME/rows       positions of which logits are kept
    NAME/logits     float32 [len(rows), vocab]
    NAME/llama_cpp  largest difference from llama.cpp's logits with the same adapter as GGUF, or NaN

A golden is made only if the logits without the adapter are far from it, and llama.cpp's near.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

from .llama_cpp import LlamaCpp, Unknown
from .make_families import LARGEST_LLAMA_CPP, SMALLEST_OFF
from .oracle import quiet
from .tiny_adapters import ADAPTERS, TinyAdapter

FILE = Path(__file__).with_name("adapters.npz")
LENGTH = 70


def main() -> None:
    quiet()
    torch.set_num_threads(1)
    arrays: dict[str, np.ndarray] = {}
    for name, adapter in ADAPTERS.items():
        found = golden(name, adapter)
        arrays |= {f"{name}/{key}": np.asarray(value) for key, value in found.items()}
    np.savez_compressed(FILE, **arrays)
    print(f"{FILE}: {FILE.stat().st_size:,} bytes")


def golden(name: str, adapter: TinyAdapter) -> dict[str, object]:
    """The arrays of one adapter."""
    tiny = adapter.tiny
    family = getattr(transformers, tiny.config["architectures"][0])  # type: ignore[index]
    with tempfile.TemporaryDirectory() as directory:
        tiny.write(Path(directory))
        model = family.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    ids = tiny.prompts()[-1][:LENGTH]
    rows = np.linspace(0, LENGTH - 1, 9, dtype=np.int32)
    plain = logits(model, ids)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for matrix, change in adapter.changes().items():
            parameters[matrix] += torch.from_numpy(change)
    adapted = logits(model, ids)
    moved = float(np.abs(plain - adapted).max() / adapted.std())
    if not moved > SMALLEST_OFF:
        raise SystemExit(f"{name}: the adapter moves logits by {moved:.1e} only")
    second = witness(name, adapter, ids, rows, adapted)
    print(f"{name}: {len(adapter.matrices)} matrices move logits by {moved:.1e}; llama.cpp {second:.1e}", flush=True)
    if second > LARGEST_LLAMA_CPP:
        raise SystemExit(f"{name}: llama.cpp is {second:.1e} off")
    return {"digest": tiny.digest(), "prompt": ids, "rows": rows, "logits": adapted[rows], "llama_cpp": second}


def witness(name: str, adapter: TinyAdapter, ids: list[int], rows: np.ndarray, golden: np.ndarray) -> float:
    """How far llama.cpp is, given the model and the adapter as GGUF files; NaN if it cannot be asked."""
    if adapter.ranks or adapter.rslora:  # a file has one alpha, and no square root
        return float("nan")
    with tempfile.TemporaryDirectory() as directory:
        try:
            with LlamaCpp(adapter.tiny, adapter.write_gguf(Path(directory) / "adapter.gguf")) as other:
                return other.distance(ids, rows, golden)
        except Unknown as why:
            print(f"  {name}: no second witness, {why}")
            return float("nan")


@torch.inference_mode()
def logits(model: torch.nn.Module, ids: list[int]) -> np.ndarray:
    """The logits of all positions."""
    found: np.ndarray = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float().numpy()
    return found


if __name__ == "__main__":
    main()
