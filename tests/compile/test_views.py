"""Views give the rows that plain indexing gives, and gives them lazily."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from radixlm.compile.sources.checkpoint_tensors import CheckpointTensors, of_language_model
from radixlm.compile.sources.quantized.tensors import tensors
from radixlm.compile.sources.tensor_files import SafetensorsFile
from radixlm.compile.weights.view import RotaryPairs, View, pieces
from safetensors.numpy import save_file

STORED = {"a": np.arange(48), "b": 100 + np.arange(32)}
VIEWS = st.builds(
    View,
    name=st.sampled_from(["a", "b"]),
    start=st.sampled_from([0, 8, 3]),
    stop=st.sampled_from([None, 24]),
    step=st.sampled_from([1, 2]),
)


@given(views=st.lists(VIEWS, min_size=1, max_size=3), data=st.data())
def test_pieces_are_the_rows_of_views_one_behind_the_other(views: list[View], data: st.DataObject) -> None:
    whole = np.concatenate([STORED[view.name][view.start : view.stop : view.step] for view in views])
    start = data.draw(st.integers(0, len(whole) - 1))
    stop = data.draw(st.integers(start + 1, len(whole)))
    found = pieces(views, [len(STORED[view.name]) for view in views], slice(start, stop))
    assert (
        np.concatenate([STORED[piece.view.name][piece.rows] for piece in found]).tolist() == whole[start:stop].tolist()
    )


@pytest.mark.parametrize("rotary_dim", [8, 4])
def test_pairs_bring_halves_together(rotary_dim: int) -> None:
    """As transformers' conversion scripts permute: within each head, even rows and then odd ones."""
    heads = STORED["a"].reshape(-1, 8)
    turned, rest = heads[:, :rotary_dim], heads[:, rotary_dim:]
    expected = np.concatenate([turned[:, 0::2], turned[:, 1::2], rest], axis=1).reshape(-1)
    view = View("a", pairs=RotaryPairs(8, rotary_dim))
    for rows in (None, slice(5, 21)):
        found = [STORED["a"][piece.rows] for piece in pieces([view], [48], rows)]
        assert np.concatenate(found).tolist() == expected[rows or slice(None)].tolist()


@pytest.fixture
def stack(tmp_path: Path) -> CheckpointTensors:
    weights = np.arange(3 * 4 * 2, dtype=np.float32).reshape(3, 4, 2)
    save_file({"model.language_model.layers.0.experts.up": weights}, tmp_path / "model.safetensors")
    file = SafetensorsFile(tmp_path / "model.safetensors")
    return CheckpointTensors(of_language_model(tensors("tiny", file.tensors, None)))


def test_a_stack_of_matrices_is_read_by_rows(stack: CheckpointTensors) -> None:
    (name,) = stack.infos()
    assert name == "model.layers.0.experts.up" and stack.infos()[name].shape == (3, 4, 2)
    flat = np.arange(24, dtype=np.float32).reshape(12, 2)
    for rows in (slice(0, 12, 1), slice(3, 9, 1), slice(1, 12, 2), slice(4, 5, 1), np.array([11, 2, 7])):
        assert np.array_equal(stack.read_float32(name, rows), flat[rows])
        assert np.array_equal(stack.read(name, rows).dequantize(), flat[rows])
