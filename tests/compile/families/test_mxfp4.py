"""gpt-oss as the hub has it: experts in MXFP4, whose codes reach the artifact as they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from radixlm.compile.sources import open_source
from radixlm.compile.stored_weights import StoredWeights
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.model.model_runner import ModelRunner
from safetensors.numpy import load_file

from ...goldens import tiny_gguf
from ...goldens.families import FAMILIES
from ...goldens.tiny_outputs import TinyOutputs
from ..ragged import Rows
from .test_compiled import NUM_PAGES, SMALL, chunked, whole

NAME = "gpt_oss-mxfp4"
ROUNDED = 0.03  # of the standard deviation of logits: inputs are rounded to 8 bits, which moves them by 0.018


def test_the_checkpoint_has_the_hubs_layout(checkpoint: Callable[[str], Path]) -> None:
    arrays = load_file(checkpoint(NAME) / "model.safetensors")
    at = "model.layers.0.mlp.experts"
    assert {name.removeprefix(at): (str(array.dtype), array.shape) for name, array in arrays.items() if at in name} == {
        ".gate_up_proj_blocks": ("uint8", (8, 128, 2, 16)),
        ".gate_up_proj_scales": ("uint8", (8, 128, 2)),
        ".gate_up_proj_bias": ("float32", (8, 128)),
        ".down_proj_blocks": ("uint8", (8, 64, 2, 16)),
        ".down_proj_scales": ("uint8", (8, 64, 2)),
        ".down_proj_bias": ("float32", (8, 64)),
    }


def test_the_artifact_holds_the_numbers_of_the_codes(checkpoint: Callable[[str], Path]) -> None:
    tensors = FAMILIES[NAME].tensors
    with open_source(checkpoint(NAME)) as source:
        stored = StoredWeights(source, "keep")
        for layer in range(2):
            at = f"model.layers.{layer}.mlp.experts."
            both, down = (tensors[f"{at}{name}_proj"].swapaxes(1, 2) for name in ("gate_up", "down"))
            for name, expected in (("gate", both[:, ::2]), ("up", both[:, 1::2]), ("down", down)):
                assert stored.kinds[f"{at}{name}_proj.weight"].label == "fp4_g32_e8m0"
                np.testing.assert_array_equal(stored.float32(f"{at}{name}_proj.weight"), expected)


def test_a_gguf_file_of_the_same_codes_holds_the_same_numbers(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """In which gates and `up` are two stacks, and the halves of bytes are in another order."""
    experts = {f"ffn_{part}_exps.weight": gguf.GGMLQuantizationType.MXFP4 for part in ("gate", "up", "down")}
    path = tiny_gguf.write(FAMILIES[NAME], tmp_path / "tiny.gguf", experts)
    with open_source(path) as file, open_source(checkpoint(NAME)) as directory:
        names = [name for name, info in file.tensors().items() if info.type == "MXFP4"]
        assert len(names) == 6
        for name in names:
            found, expected = (StoredWeights(source, "keep") for source in (file, directory))
            assert found.kinds[name] == expected.kinds[name]
            np.testing.assert_array_equal(found.float32(name), expected.float32(name))


@pytest.fixture(scope="module")
def artifact(family_artifact: Callable[..., Path]) -> Artifact:
    return Artifact.open(family_artifact(NAME, "keep", "auto"))


def test_codes_are_kept_and_take_four_bits_and_a_quarter(artifact: Artifact) -> None:
    kind = artifact.manifest.quantization.kinds["fp4_g32_e8m0"]
    assert (kind.source, kind.relative_error) == (("MXFP4",), 0)
    experts = [array for name, array in FAMILIES[NAME].tensors.items() if name.endswith(("gate_up_proj", "down_proj"))]
    assert kind.bytes == sum(array.size for array in experts) * 4.25 / 8


def test_kept_codes_compute_what_transformers_computes_of_their_numbers(artifact: Artifact) -> None:
    runner = ModelRunner(artifact, num_pages=NUM_PAGES)
    rows = Rows(runner, NUM_PAGES, artifact.manifest.module.max_num_logits)
    prompts = TinyOutputs.load(NAME).prompts
    alone = [whole(rows, prompt) for prompt in prompts]
    for prompt, logits in zip(prompts, alone, strict=True):
        assert prompt.distance(logits[prompt.rows]) < ROUNDED
    for expected, found in zip(alone, chunked(rows, prompts, SMALL), strict=True):
        assert np.array_equal(found, expected)
    runner.close()
