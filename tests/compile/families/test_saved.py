"""Checkpoints that `save_pretrained` of transformers writes are the models that they were saved from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from radixlm.compile.sources.huggingface import HuggingFaceSource
from radixlm.compile.sources.source import Source
from safetensors.numpy import load_file, save_file

from ...goldens.saved import saved_families
from .harness import NAMES, OLDEST, tiny_of


@pytest.mark.parametrize("name", saved_families())
def test_what_transformers_saves_is_the_model_that_was_saved(
    name: str, source_of: Callable[..., Source], tmp_path: Path
) -> None:
    """The same layers and the same weights, so that logits are those of the family's golden."""
    saved = saved_families()[name]
    expected = source_of(saved.family)
    with HuggingFaceSource(saved.write(tmp_path)) as source:
        assert replace(source.config, architecture=expected.config.architecture) == expected.config
        assert source.tensors() == expected.tensors()
        for tensor in source.tensors():
            np.testing.assert_array_equal(source.read_float32(tensor), expected.read_float32(tensor))


@pytest.mark.parametrize("name", [*OLDEST, *NAMES])
def test_tensors_that_were_saved_without_the_prefix_of_their_model_are_read(
    name: str, source_of: Callable[..., Source], tmp_path: Path
) -> None:
    """So are those of a class without an output matrix saved, as those of embedding models are."""
    expected, tiny = source_of(name), tiny_of(name)
    path = tiny.write(tmp_path)
    arrays = load_file(path / "model.safetensors")
    prefix = next(each for each in ("model.language_model.", "backbone.", "model.") if _begins(arrays, each))
    bare = {each.removeprefix(prefix): array for each, array in arrays.items()}
    assert bare.keys() != arrays.keys()
    save_file(bare, path / "model.safetensors", metadata={"format": "pt"})
    with HuggingFaceSource(path) as source:
        assert source.config == expected.config
        assert source.tensors() == expected.tensors()
        last = list(source.tensors())[-1]
        np.testing.assert_array_equal(source.read_float32(last), expected.read_float32(last))


def test_a_class_without_an_output_matrix_is_its_model(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    path = tmp_path / "source"
    shutil.copytree(checkpoint("qwen3"), path)
    config = json.loads((path / "config.json").read_text())
    with HuggingFaceSource(path) as source:
        expected = source.config
    (path / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen3Model"]}))
    with HuggingFaceSource(path) as source:
        assert source.config == expected


def _begins(arrays: Mapping[str, np.ndarray], prefix: str) -> bool:
    return any(name.startswith(prefix) for name in arrays)
