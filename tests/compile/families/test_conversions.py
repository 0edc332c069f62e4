"""What other tools make of the hub's checkpoints computes what the checkpoints do."""

from __future__ import annotations

from pathlib import Path

import pytest
from radixlm.compile.sources.huggingface import HuggingFaceSource

from .conversions import EXPERTS, MLC, MLX, write_converted, write_mlc
from .harness import TOLERANCE, distance


@pytest.mark.parametrize("name", list(MLC))
def test_a_conversion_of_mlc_computes_what_the_checkpoint_does(name: str, tmp_path: Path) -> None:
    """Gains of norms that the hub stores less one are whole there; settings may be those of a model in another."""
    assert distance(HuggingFaceSource(write_mlc(name, tmp_path)), name) <= TOLERANCE


@pytest.mark.parametrize("name", list(MLX))
def test_a_conversion_of_mlx_computes_what_the_checkpoint_does(name: str, tmp_path: Path) -> None:
    """Where taps of convolutions are turned, gains that the hub stores less one are whole."""
    assert distance(HuggingFaceSource(write_converted(name, MLX[name], tmp_path)), name) <= TOLERANCE


@pytest.mark.parametrize("name", list(EXPERTS))
def test_experts_one_by_one_and_as_two_stacks_are_the_same(name: str, tmp_path: Path) -> None:
    """Tools that quantize write one by one what the hub has as stacks, and some that train write the stacks."""
    assert distance(HuggingFaceSource(write_converted(name, EXPERTS[name], tmp_path)), name) <= TOLERANCE
