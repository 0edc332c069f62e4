"""The largest logits of a row are computed once more, from activations in 16 bits; all others come from 8."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from radixlm.compile import compile_model
from radixlm.compile.ops.linear import LinearOps
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.artifact.manifest import TOP_LOGITS
from radixlm.runtime.model.model_runner import ModelRunner

from ..conftest import CompileOnce
from ..goldens.tiny_models import TINY_MODELS
from .ragged import Rows

TINY = TINY_MODELS["qwen2"]
PROMPT = TINY.prompts()[1]
NUM_PAGES = 61


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TINY.write(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def artifact(source: Path, compile_once: CompileOnce) -> Path:
    return compile_once(source, "f32", quantize="q8")


def compiled(source: Path, folder: Path) -> Path:
    return compile_model(source, folder / "tiny.radixlm", quantize="q8", kv_dtype="f32").path


def logits_of(artifact: Path, sizes: tuple[int, ...] = (len(PROMPT),)) -> np.ndarray:
    runner = ModelRunner(Artifact.open(artifact), num_pages=NUM_PAGES)
    rows = Rows(runner, NUM_PAGES)
    number = rows.add(PROMPT)
    logits = np.concatenate([rows.step({number: size})[number] for size in sizes])
    runner.close()
    return logits


def test_only_the_largest_logits_of_8_bits_are_computed_again(source: Path, artifact: Path, tmp_path: Path) -> None:
    with patch.object(LinearOps, "refine"):
        plain = logits_of(compiled(source, tmp_path))
    refined = logits_of(artifact)
    largest = np.argsort(-plain, axis=-1, kind="stable")[:, :TOP_LOGITS]
    kept = plain.copy()
    np.put_along_axis(kept, largest, np.take_along_axis(refined, largest, axis=-1), axis=-1)
    assert np.array_equal(kept, refined)
    assert (np.take_along_axis(plain, largest, axis=-1) != np.take_along_axis(refined, largest, axis=-1)).mean() > 0.9


def test_a_row_is_the_same_bits_alone_and_among_others(artifact: Path) -> None:
    whole = logits_of(artifact)
    for sizes in ((1,) * len(PROMPT), (5, len(PROMPT) - 5)):
        assert np.array_equal(logits_of(artifact, sizes), whole)
