"""What another implementation gives the counted tokens of windows: natural logarithms of their probabilities.

    python -m bench.peer_log_probs llama.cpp MODEL.gguf WINDOWS.npz OUT.npy [THREADS]

Run by `evaluators.py`, in an environment that has numpy and gguf and the peer: `xllamacpp` for llama.cpp; that,
torch and transformers for transformers, which gets the file's dequantized weights in float32 (Llama architecture with
a tied output matrix). Knows windows and logits, nothing of radixlm.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from numpy.typing import NDArray

from .llama_cpp_logits import LlamaCpp
from .windows import load, log_probs

Logits = Callable[[NDArray[np.int32]], NDArray[np.float32]]

GOLDENS = Path(__file__).resolve().parent.parent / "tests" / "goldens" / "smollm2.py"


def main(peer: str, model: str, windows_file: str, out: str, num_threads: str = "2") -> None:
    windows = list(load(Path(windows_file)))
    size = max(len(window.token_ids) for window in windows)
    logits = PEERS[peer](Path(model), size, int(num_threads))
    parts = [log_probs(logits(w.token_ids)[w.first - 1 : -1], w.targets) for w in windows]
    np.save(out, np.concatenate(parts))


def _llama_cpp(model: Path, size: int, num_threads: int) -> Logits:
    return LlamaCpp(model, num_tokens=size, num_threads=num_threads).logits


def _transformers(path: Path, _: int, num_threads: int) -> Logits:
    torch: Any = importlib.import_module("torch")
    spec = importlib.util.spec_from_file_location("goldens_smollm2", GOLDENS)
    assert spec is not None and spec.loader is not None
    goldens = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(goldens)
    torch.set_num_threads(num_threads)
    model = goldens.load(GGUFReader(path))

    def logits(token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
        with torch.inference_mode():
            values: NDArray[np.float32] = model(torch.from_numpy(token_ids.astype(np.int64))[None]).logits[0].numpy()
        return values

    return logits


PEERS: dict[str, Callable[[Path, int, int], Logits]] = {"llama.cpp": _llama_cpp, "transformers": _transformers}

if __name__ == "__main__":
    main(*sys.argv[1:])
