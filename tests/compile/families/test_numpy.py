"""Each tiny family, read under the hub's names and as GGUF, computes in NumPy what transformers computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from radixlm.compile.families import registry
from radixlm.compile.ops import functions
from radixlm.compile.sources.huggingface import HuggingFaceSource
from radixlm.compile.sources.source import Source

from ...goldens.families import FAMILIES
from .harness import GGUF_NAMES, NAMES, OFFS, OLDEST, SEEN, TOLERANCE, distance, off_of


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_computes_what_transformers_computes(name: str, source_of: Callable[..., Source]) -> None:
    assert distance(source_of(name), name) <= TOLERANCE


@pytest.mark.parametrize("name", [*GGUF_NAMES, *OLDEST])
def test_a_gguf_file_of_the_same_numbers_computes_the_same(name: str, source_of: Callable[..., Source]) -> None:
    assert distance(source_of(name, "gguf"), name) <= TOLERANCE


@pytest.mark.parametrize(("name", "feature"), OFFS, ids=lambda part: part)
def test_without_a_feature_logits_are_others(
    name: str,
    feature: str,
    source_of: Callable[..., Source],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    off = off_of(name, feature)
    if off.functions:  # neighbours do not rotate
        monkeypatch.setattr(registry.FAMILIES[source_of(name).config.architecture], "neighbouring_pairs", ())
    if feature == "swiglu_limit":  # another one in a checkpoint is refused
        monkeypatch.setattr(functions, "_CLAMP", 1e4)
    if off.modules or feature == "swiglu_limit":
        source = source_of(name)
    else:
        source = HuggingFaceSource(FAMILIES[name].write(tmp_path, off if off.in_checkpoint else None))
    assert distance(source, name, off=off, enough=SEEN) > SEEN
