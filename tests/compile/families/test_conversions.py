"""What other tools make of the hub's checkpoints computes what the checkpoints do."""

from __future__ import annotations

from pathlib import Path

import pytest
from radixlm.compile.sources.huggingface import HuggingFaceSource

from .conversions import MLC, MLX, write_mlc, write_mlx
from .harness import TOLERANCE, distance


@pytest.mark.parametrize("name", list(MLC))
def test_a_conversion_of_mlc_computes_what_the_checkpoint_does(name: str, tmp_path: Path) -> None:
    """Gains of norms that the hub stores less one are whole there; settings may be those of a model in another."""
    assert distance(HuggingFaceSource(write_mlc(name, tmp_path)), name) <= TOLERANCE


@pytest.mark.parametrize("name", list(MLX))
def test_a_conversion_of_mlx_computes_what_the_checkpoint_does(name: str, tmp_path: Path) -> None:
    """Where taps of convolutions are turned, gains that the hub stores less one are whole."""
    assert distance(HuggingFaceSource(write_mlx(name, tmp_path)), name) <= TOLERANCE
