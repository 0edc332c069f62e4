"""Checkpoints that `save_pretrained` of transformers writes are the models that they were saved from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from radixlm.compile.sources.huggingface import HuggingFaceSource
from radixlm.compile.sources.source import Source

from ...goldens.saved import saved_families


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
