"""Make `encoders.npz`: what tiny encoders give of texts, and how `save_pretrained` writes them.

    python -m tests.goldens.make_encoders

Run from the repository, in the environment of `requirements.txt`. A golden is stored only if every feature of
`tiny.offs` moves a vector by ten times the tolerance, when it is off.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import xllamacpp
from safetensors.numpy import load_file

from . import gguf_encoders
from .encoders import ENCODERS, FILE, LENGTHS, POOLINGS, TinyEncoder
from .families.family import Off
from .oracle import quiet

_SEEN = 1e-3
_FUNCTIONS = {"swiglu": "silu", "geglu": "gelu"}  # of Nomic's class and of transformers


def main() -> None:
    quiet()
    arrays: dict[str, Any] = {}
    for name, tiny in ENCODERS.items():
        with tempfile.TemporaryDirectory() as directory:
            found, about = encoded(tiny, Path(directory))
        if name in gguf_encoders.ARCHITECTURES:
            about["llama_cpp"] = witness(tiny, [states[list(POOLINGS).index(tiny.pooling)] for states in found])
        arrays[name] = np.array(json.dumps(about))
        arrays |= {f"{name}_{length}": states for length, states in zip(LENGTHS, found, strict=True)}
        for off in tiny.offs:
            with tempfile.TemporaryDirectory() as directory:
                others, _ = encoded(tiny, Path(directory), off)
            moved = max(distance(*pair) for pair in zip(found, others, strict=True))
            if moved < _SEEN:
                raise SystemExit(f"{name}: without {off.feature} vectors move by {moved:.1e} only")
    np.savez_compressed(FILE, **arrays)
    print(f"{len(ENCODERS)} encoders, {FILE.stat().st_size:,} bytes")


@torch.inference_mode()
def encoded(tiny: TinyEncoder, path: Path, off: Off | None = None) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Pooled hidden states of the texts, `[poolings, hidden_size]` each; and what is saved."""
    tiny.write(path, off)
    config = json.loads((path / "config.json").read_text())
    config = {tiny.keys.get(key, key): _FUNCTIONS.get(str(value), value) for key, value in config.items()}
    (path / "config.json").write_text(json.dumps(config))
    model, loading = transformers.AutoModel.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    wrong = {key: names for key, names in loading.items() if names and key in ("missing_keys", "unexpected_keys")}
    wrong |= {key: names for key, names in loading.items() if names and key == "mismatched_keys"}
    if any("pooler" not in name for names in wrong.values() for name in map(str, names)):
        raise SystemExit(f"{tiny.name}: transformers has other tensors: {wrong}")
    states = []
    for ids in tiny.texts():
        rows = model(input_ids=torch.tensor([ids])).last_hidden_state[0].double()
        by_pooling = {"mean": rows.mean(0), "cls": rows[0]}
        states.append(torch.stack([by_pooling[pooling] for pooling in POOLINGS]).float().numpy())
    model.save_pretrained(path / "out")
    config = json.loads((path / "out" / "config.json").read_text())
    config.pop("transformers_version")
    saved = {} if off is not None else places(tiny, load_file(path / "out" / "model.safetensors"))
    return states, {"config": config, "names": saved}


def places(tiny: TinyEncoder, saved: dict[str, np.ndarray]) -> dict[str, tuple[str, int, int]]:
    """The tensor of the checkpoint that each saved one is, or some rows of it: its name, and the rows."""
    found = {}
    for name, array in saved.items():
        for ours, tensor in tiny.tensors.items():
            starts = range(0, len(tensor), len(array)) if tensor.shape[1:] == array.shape[1:] else ()
            for start in starts:
                if np.array_equal(tensor[start : start + len(array)], array):
                    found[name] = (ours, start, start + len(array))
        if name not in found:
            raise SystemExit(f"{tiny.name}: {name} is saved, and of no tensor")
    return found


def witness(tiny: TinyEncoder, vectors: list[np.ndarray]) -> float:
    """How far llama.cpp is from the golden: the largest difference over the deviation of a vector's numbers."""
    params = xllamacpp.CommonParams()
    with tempfile.TemporaryDirectory() as directory:
        params.model.path = str(gguf_encoders.write(tiny, Path(directory) / "tiny.gguf"))
        params.n_ctx = params.n_batch = params.n_ubatch = 512
        params.n_parallel, params.n_gpu_layers, params.verbosity, params.port = 1, 0, -1, 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        params.embedding, params.warmup, params.fit_params = True, False, False
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        server, worst = xllamacpp.Server(params), 0.0
        for ids, golden in zip(tiny.texts(), vectors, strict=True):
            [found] = server.handle_embeddings({"input": ids})["data"]
            expected = golden.astype(np.float64) / np.linalg.norm(golden.astype(np.float64))
            worst = max(worst, float(np.abs(np.array(found["embedding"]) - expected).max() / expected.std()))
    return worst


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """The largest difference of normalized vectors."""
    one, other = (each.astype(np.float64) for each in (one, other))
    lengths = (np.linalg.norm(each, axis=-1, keepdims=True) for each in (one, other))
    one_length, other_length = lengths
    return float(np.abs(one / one_length - other / other_length).max())


if __name__ == "__main__":
    main()
