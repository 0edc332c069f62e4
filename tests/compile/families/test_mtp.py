"""Heads that draft, read from checkpoints and GGUF files, compute what transformers' own parts compute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from radixlm.compile.families.registry import decoder_of
from radixlm.compile.kv_layout import resolved
from radixlm.compile.ops.layers import Norm
from radixlm.compile.ops.reference_ops import GetWeight, ReferenceOps
from radixlm.compile.sources.huggingface import HuggingFaceSource
from radixlm.compile.sources.source import Source
from radixlm.runtime.artifact.model_config import ModelConfig
from safetensors.numpy import save_file

from ...goldens.families import FAMILIES, MTP_FAMILIES
from ...goldens.families.mtp import NAMES
from ...goldens.tiny_outputs import TinyOutputs
from .harness import SEEN, TOLERANCE, distance

# llama.cpp's converter leaves the heads of DeepSeek-V3's kind out.
IN_GGUF = [name for name in NAMES if name != "deepseek_v3-mtp"]


def drafted(config: ModelConfig, ops: ReferenceOps) -> np.ndarray:
    """Logits of a head's drafts for one sequence, in NumPy."""
    decoder = decoder_of(config)
    decoder.forward(ops)
    logits: np.ndarray = decoder.draft(ops)[0]
    return logits


def far(name: str, config: ModelConfig, weight: GetWeight, make: Callable[..., ReferenceOps] = ReferenceOps) -> float:
    """How far drafts are from the golden's; the first row has none."""
    largest, config = 0.0, resolved(config, MTP_FAMILIES[name].context_length)
    for prompt in TinyOutputs.load(name).prompts:
        logits = drafted(config, make(weight, prompt.ids))[prompt.rows]
        largest = max(largest, prompt.distance(np.concatenate([np.zeros_like(logits[:1]), logits[1:]])))
    return largest


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_drafts_what_transformers_parts_do(name: str, source_of: Callable[..., Source]) -> None:
    source = source_of(name)
    assert TinyOutputs.load(name).digest == MTP_FAMILIES[name].digest()
    assert far(name, source.config, source.read_float32) <= TOLERANCE


@pytest.mark.parametrize("name", IN_GGUF)
def test_a_gguf_file_of_the_same_numbers_drafts_the_same(name: str, source_of: Callable[..., Source]) -> None:
    source = source_of(name, "gguf")
    assert far(name, source.config, source.read_float32) <= TOLERANCE


class LastNormLeftOut(ReferenceOps):
    """The head reads what leaves the last layer, without the model's last norm."""

    def normalize(self, x: tuple[np.ndarray, ...], norm: Norm) -> tuple[np.ndarray, ...]:
        return x if norm.name == "model.norm.weight" else super().normalize(x, norm)


class OwnRow(ReferenceOps):
    """The head reads what the model made of the token itself, not of the one before."""

    def concat_previous(self, x: tuple[np.ndarray, ...], width: int, kv_layer: int) -> np.ndarray:
        return np.concatenate([x[0], self._hidden], axis=-1)


class HiddenFirst(ReferenceOps):
    """What the model made comes before the embedding."""

    def concat_previous(self, x: tuple[np.ndarray, ...], width: int, kv_layer: int) -> np.ndarray:
        return np.roll(super().concat_previous(x, width, kv_layer), width, axis=-1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wrong", [LastNormLeftOut, OwnRow, HiddenFirst])
def test_another_definition_of_what_enters_drafts_otherwise(
    name: str, wrong: type[ReferenceOps], source_of: Callable[..., Source]
) -> None:
    source = source_of(name)
    assert far(name, source.config, source.read_float32, wrong) > SEEN


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("one", ["embedding_norm", "hidden_norm", "norm"])
def test_each_norm_has_gains_of_its_own(name: str, one: str, source_of: Callable[..., Source]) -> None:
    source = source_of(name)
    head = decoder_of(source.config).mtp
    assert head is not None
    wrong = {
        "embedding_norm": head.hidden_norm,
        "hidden_norm": head.embedding_norm,
        "norm": decoder_of(source.config).norm,
    }
    taken = {getattr(head, one).name: wrong[one].name}
    assert far(name, source.config, lambda tensor: source.read_float32(taken.get(tensor, tensor))) > SEEN


@pytest.mark.parametrize("name", NAMES)
def test_the_row_of_a_first_token_is_not_seen(name: str, source_of: Callable[..., Source]) -> None:
    """It is made of no token before: published heads have no such row."""
    source = source_of(name)
    mtp = source.config.mtp
    assert mtp is not None and mtp.mixer.skips_first  # type: ignore[union-attr]
    seen = replace(source.config, mtp=replace(mtp, mixer=replace(mtp.mixer, skips_first=False)))
    assert far(name, seen, source.read_float32) > SEEN


@pytest.mark.parametrize("name", NAMES)
def test_a_head_changes_nothing_else(name: str, source_of: Callable[..., Source]) -> None:
    plain = name.removesuffix("-mtp")
    assert MTP_FAMILIES[name].tensors.keys() > FAMILIES[plain].tensors.keys()
    source, without = source_of(name), source_of(plain)
    assert replace(source.config, mtp=None) == without.config
    prompt = TinyOutputs.load(plain).prompts[1]
    ops = ReferenceOps(source.read_float32, prompt.ids)
    assert prompt.distance(decoder_of(source.config).forward(ops)[0][prompt.rows]) <= TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_with_a_part_of_a_head_has_none(name: str, tmp_path: Path) -> None:
    """Tools that quantize leave parts out."""
    tiny, names = MTP_FAMILIES[name], NAMES[name]
    tiny.write(tmp_path)
    left_out = names["projection"].format(tiny.config["num_hidden_layers"])
    kept = {key: weight for key, weight in tiny.tensors.items() if not key.startswith(left_out)}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    source = HuggingFaceSource(tmp_path)
    assert source.config.mtp is None
    assert distance(source, name.removesuffix("-mtp")) <= TOLERANCE


def test_a_head_of_a_model_that_sees_is_read(tmp_path: Path) -> None:
    import json

    name = "qwen3_5-mtp"
    tiny = MTP_FAMILIES[name]
    tiny.write(tmp_path)
    tensors = {
        key.replace("model.", "model.language_model.", 1) if key.startswith("model.") else key: weight
        for key, weight in tiny.tensors.items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    nested = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": {key: value for key, value in tiny.config.items() if key != "architectures"},
    }
    (tmp_path / "config.json").write_text(json.dumps(nested))
    source = HuggingFaceSource(tmp_path)
    assert far(name, source.config, source.read_float32) <= TOLERANCE
