"""Sources and artifacts of tiny families, each made once in a run of the tests."""

from __future__ import annotations

import fcntl
import functools
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from radixlm.compile import compile_model
from radixlm.compile.sources.gguf import GGUFSource
from radixlm.compile.sources.huggingface import HuggingFaceSource
from radixlm.compile.sources.source import Source
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.artifact.manifest import KVDType

from ...goldens import tiny_gguf
from ...goldens.families import FAMILIES
from .harness import tiny_of


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny family as a directory under the hub's names."""

    @functools.cache
    def written(name: str) -> Path:
        return tiny_of(name).write(tmp_path_factory.mktemp(name) / "source")

    return written


@pytest.fixture(scope="session")
def source_of(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Source]:
    """A tiny family, read from a directory or from a GGUF file."""

    @functools.cache
    def opened(name: str, format_: str = "huggingface") -> Source:
        if format_ == "huggingface":
            return HuggingFaceSource(checkpoint(name))
        return GGUFSource(tiny_gguf.write(tiny_of(name), tmp_path_factory.mktemp(name) / "tiny.gguf"))

    return opened


@pytest.fixture(scope="session")
def artifact_of(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, KVDType], Artifact]:
    """A tiny family compiled in float32, by how KV is stored; the processes of a run share what one has compiled."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "families"
    folder.mkdir(exist_ok=True)

    @functools.cache
    def compiled(name: str, kv_dtype: KVDType) -> Artifact:
        path = folder / f"{name}-{kv_dtype}.radixlm"
        with (folder / f"{path.stem}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.is_dir():
                compile_model(
                    checkpoint(name),
                    path,
                    quantize="f32",
                    target="native",
                    kv_dtype=kv_dtype,
                    context_length=FAMILIES[name].context_length,
                )
        return Artifact.open(path)

    return compiled
