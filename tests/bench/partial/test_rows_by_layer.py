"""In plain NumPy a model says the same over rows of its prefix as the compiled forward, where that can tell."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.extras.approximate.calibration.calibration import Calibration

from bench.partial.prefix import Prefix, PrefixModel
from bench.partial.rows_by_layer import RowsByLayer

from ...conftest import CompileOnce


@pytest.fixture(scope="module")
def artifact(tiny_source: Path, compile_once: CompileOnce, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    path = tmp_path_factory.mktemp("artifacts") / "floats.radixlm"
    shutil.copytree(compile_once(tiny_source, "f32", quantize="keep"), path)
    artifact = Artifact.open(path)
    Calibration.of(artifact.manifest, probe_head=0, max_dropped_attention=1.0).write(path)
    return artifact


def test_rows_of_all_layers_are_those_of_the_forward_and_each_layer_counts(
    artifact: Artifact, tiny_source: Path
) -> None:
    model, by_layer = PrefixModel(artifact), RowsByLayer(artifact, tiny_source)
    ids = np.random.default_rng(3).integers(0, 320, 120).tolist()
    prefix, query = Prefix(model, ids[:90]), ids[90:]
    layers, heads = model.layout.num_layers, model.layout.num_kv_heads
    some = np.sort(np.argsort(np.random.default_rng(0).random((layers, heads, 90)), axis=-1)[..., :30], axis=-1)
    whole = np.broadcast_to(np.arange(90), (heads, 90))
    exact, partial = prefix.exact(query, 5).logits, prefix.partial(some, query, 5)
    model.close()
    np.testing.assert_allclose(by_layer.logits(prefix.rows, None, query, 5)[:, : exact.shape[1]], exact, 0, 2e-3)
    found = by_layer.logits(prefix.rows, list(some), query, 5)[:, : exact.shape[1]]
    np.testing.assert_allclose(found, partial, 0, 2e-3)
    for layer in range(layers):
        mixed = by_layer.logits(prefix.rows, [whole if i == layer else some[i] for i in range(layers)], query, 5)
        assert np.abs(mixed[:, : exact.shape[1]] - partial).max() > 0.01, "the rows of one layer are other ones"
