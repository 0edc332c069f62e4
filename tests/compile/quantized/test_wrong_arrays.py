"""No array of a quantized checkpoint ends in a traceback: a matrix is read, or refused in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ..wrong_arrays import arrays_of, read_or_refused, shapes, values
from .checkpoints import FORMATS, write_checkpoint

Make = Callable[..., Any]
STEM = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize("format_", list(FORMATS))
def test_a_wrong_array_is_one_line(format_: str, make_tiny: Make, write_huggingface: Make) -> None:
    tiny = make_tiny(num_hidden_layers=1)
    path = write_huggingface(tiny)
    write_checkpoint(path, tiny, format_)
    arrays = arrays_of(path)
    for name, array in arrays.items():
        if name.startswith(STEM):
            for wrong in (None, *shapes(array), *values(array)):
                read_or_refused(path, arrays, name, wrong, (f"{STEM}.weight",))
