"""What an artifact, or a peer, makes of the counted tokens of windows.

Knows how to run both; each answers with natural logarithms of probabilities, float64 `[N]`, N the counted tokens of
all windows in their order.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.artifact.manifest import PAGE_SIZE
from radixlm.runtime.model.batch import Batch
from radixlm.runtime.model.model_runner import ModelRunner

from .windows import Float64, Window, log_probs, save

ROOT = Path(__file__).resolve().parents[1]


def our_log_probs(artifact: Artifact, windows: Sequence[Window]) -> Float64:
    """Through the compiled module; how a window is chunked does not matter to it (the law of the row)."""
    size = max(len(window.token_ids) for window in windows)
    limits = artifact.manifest.module
    runner = ModelRunner(artifact, num_pages=-(-size // PAGE_SIZE))
    parts = []
    for window in windows:
        for start, stop in _steps(0, window.first - 1, limits.max_num_tokens):
            runner.forward(_batch(window, start, stop, wants_logits=False))
        for start, stop in _steps(window.first - 1, len(window.token_ids) - 1, limits.max_num_logits):
            logits = runner.forward(_batch(window, start, stop, wants_logits=True))
            parts.append(log_probs(logits, window.token_ids[start + 1 : stop + 1]))
    runner.close()
    return np.concatenate(parts)


def peer_log_probs(python: str, peer: str, model: Path, windows: Sequence[Window]) -> Float64:
    """Of "llama.cpp" or "transformers" on a GGUF file, run by the interpreter `python` that has the peer.

    Raises RuntimeError with what it printed, if it fails.
    """
    with tempfile.TemporaryDirectory() as directory:
        given, answer = Path(directory) / "windows.npz", Path(directory) / "log_probs.npy"
        save(given, windows)
        command = [python, "-m", "bench.peer_log_probs", peer, str(model), str(given), str(answer)]
        threads = str(len(os.sched_getaffinity(0)))
        done = subprocess.run([*command, threads], cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{peer} failed:\n{done.stderr[-2000:]}")
        return np.asarray(np.load(answer), np.float64)


def _steps(start: int, stop: int, most: int) -> Iterator[tuple[int, int]]:
    for begin in range(start, stop, most):
        yield begin, min(begin + most, stop)


def _batch(window: Window, start: int, stop: int, *, wants_logits: bool) -> Batch:
    positions = np.arange(start, stop, dtype=np.int32)
    rows = positions - np.int32(start)
    pages = np.arange(-(-stop // PAGE_SIZE), dtype=np.int32)[None]
    token_ids = np.ascontiguousarray(window.token_ids[start:stop])
    wanted = rows if wants_logits else rows[:0]
    return Batch(token_ids, positions, positions, np.zeros_like(rows), pages, positions + np.int32(1), wanted)
