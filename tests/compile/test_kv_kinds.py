"""Which kinds of keys and values a model can have, and which it gets, is said when it is compiled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from radixlm.compile import compile_model
from radixlm.compile.codegen.targets import TARGETS, find_target
from radixlm.compile.kv_layout import kv_layout
from radixlm.runtime.artifact.model_config import ModelConfig
from radixlm.runtime.errors import InvalidParameter

from tests.goldens.families import FAMILIES

VNNI = find_target("x86-64-v4-vnni")


@pytest.fixture
def config(make_tiny: Callable[..., Any]) -> ModelConfig:
    tiny: ModelConfig = make_tiny().config
    return tiny


def of_width(config: ModelConfig, head_dim: int) -> ModelConfig:
    """The model with heads of so many numbers."""
    layers = tuple(replace(layer, mixer=replace(layer.mixer, head_dim=head_dim)) for layer in config.layers)
    return replace(config, layers=layers)


def test_auto_is_codes_where_one_instruction_multiplies_and_adds_them(config: ModelConfig) -> None:
    kinds = {name: kv_layout(of_width(config, 64), "auto", target).dtype for name, target in TARGETS.items()}
    assert kinds.pop(VNNI.name) == "k12v8"
    assert set(kinds.values()) == {"f16"}


@pytest.mark.parametrize("head_dim", [2, 4, 6, 8, 10, 16, 24, 64, 80, 128, 256])
def test_auto_takes_no_more_memory_than_f16(config: ModelConfig, head_dim: int) -> None:
    model = of_width(config, head_dim)
    chosen, exact, codes = (kv_layout(model, choice, VNNI) for choice in ("auto", "f16", "k12v8"))
    assert chosen.page_bytes == min(exact.page_bytes, codes.page_bytes)
    assert chosen.dtype == ("k12v8" if codes.page_bytes <= exact.page_bytes else "f16")
    if head_dim >= 64:
        assert chosen.page_bytes < 0.8 * exact.page_bytes


def test_heads_that_make_no_pairs_are_kept_in_f16(config: ModelConfig) -> None:
    odd = of_width(config, 65)
    assert kv_layout(odd, "auto", VNNI).dtype == "f16"
    with pytest.raises(InvalidParameter, match="has heads of 65 numbers, which make no pairs; use f16"):
        kv_layout(odd, "k12v8", VNNI)


def test_latent_vectors_have_no_codes_of_their_own(tmp_path: Path) -> None:
    source = FAMILIES["deepseek_v2"].write(tmp_path / "source")
    with pytest.raises(InvalidParameter, match=r"keeps latent vectors, which are keys and values at once; use f16"):
        compile_model(source, tmp_path / "tiny.radixlm", kv_dtype="k12v8")
    assert not (tmp_path / "tiny.radixlm").exists()


def test_the_kind_that_went_is_refused_with_those_there_are(tiny_source: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match="kv_dtype is 'int8'; use one of auto, f16, f32, k12v8"):
        compile_model(tiny_source, tmp_path / "tiny.radixlm", kv_dtype="int8")  # type: ignore[arg-type]
