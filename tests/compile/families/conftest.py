"""Sources and artifacts of tiny families, each made once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from radixlm.compile.sources.gguf import GGUFSource
from radixlm.compile.sources.huggingface import HuggingFaceSource
from radixlm.compile.sources.source import Source
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.artifact.manifest import KVDType

from ...goldens import tiny_gguf
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
def artifact_of(family_artifact: Callable[..., Path]) -> Callable[[str, KVDType], Artifact]:
    """A tiny family compiled in float32, by how KV is stored."""
    return lambda name, kv_dtype: Artifact.open(family_artifact(name, "f32", kv_dtype))
