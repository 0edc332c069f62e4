"""The file of weights: written once and in order into whatever a descriptor is of, and hashed on the way."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from radixlm.compile.sources import open_source
from radixlm.compile.stored_weights import Quantize, StoredWeights
from radixlm.compile.weights.packing import pack
from radixlm.compile.weights.plan import WeightPlan
from radixlm.compile.weights_file import WeightsWriter

from .conftest import TinyModel
from .random_blocks import QUANTIZED_TYPES
from .test_mixed_gguf import write

MakeTiny = Callable[..., TinyModel]


def no_progress(done: int, total: int) -> None:
    """Nobody looks."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, make_tiny: MakeTiny) -> Path:
    """A model in which every type of block has a matrix."""
    tiny = make_tiny(hidden_size=256, intermediate_size=512, head_dim=64, num_hidden_layers=3)
    matrices = [name for name, weight in tiny.weights.items() if weight.ndim == 2]
    types = dict(zip(matrices, QUANTIZED_TYPES, strict=True))
    return write(tmp_path_factory.mktemp("weights") / "mixed.gguf", tiny, types.__getitem__)


def writer_of(weights: StoredWeights) -> tuple[WeightsWriter, WeightPlan]:
    """One that writes every matrix by itself, and the last norm between two of them."""
    plan = WeightPlan(weights.kinds, weights.sorted_inputs)
    shapes = {name: info.shape for name, info in weights.source.tensors().items()}
    for name in sorted(weights.kinds):
        plan.matrix(((name, shapes[name][0]),), shapes[name][1])
        plan.vector((("model.norm.weight", 256),))
    return WeightsWriter(weights, plan, ()), plan


@pytest.mark.parametrize("quantize", ["keep", "q4", "q8", "f16"])
def test_every_matrix_is_what_the_obvious_packing_makes_of_it(source: Path, quantize: Quantize) -> None:
    with open_source(source) as opened:
        weights = StoredWeights(opened, quantize)
        writer, plan = writer_of(weights)
        memory = os.memfd_create("weights")
        digest = writer.write(memory, no_progress)
        data = os.pread(memory, os.fstat(memory).st_size, 0)
        os.close(memory)
        assert hashlib.sha256(data).hexdigest() == digest
        data = data[len(data) - plan.num_bytes :]
        expected = bytearray(plan.num_bytes)
        for name in weights.kinds:
            packed = pack(weights.read(name))
            for array in ("codes", "scales", "offsets"):
                numbers = getattr(packed, array)
                if numbers is not None:
                    at = plan.offset(f"{name}.{array}")
                    expected[at : at + numbers.nbytes] = numbers.tobytes()
        norm = opened.read_float32("model.norm.weight")
        at = plan.offset("model.norm.weight")
        expected[at : at + norm.nbytes] = norm.tobytes()
        assert data == bytes(expected)


def test_a_pipe_gets_the_same_bytes(source: Path, tmp_path: Path) -> None:
    with open_source(source) as opened:
        with (tmp_path / "weights").open("wb", buffering=0) as file:
            digest = writer_of(StoredWeights(opened, "keep"))[0].write(file.fileno(), no_progress)
        reading, writing = os.pipe()
        read = bytearray()

        def reader() -> None:
            while piece := os.read(reading, 1 << 16):
                read.extend(piece)

        thread = threading.Thread(target=reader)
        thread.start()
        assert writer_of(StoredWeights(opened, "keep"))[0].write(writing, no_progress) == digest
        os.close(writing)
        thread.join()
        os.close(reading)
        assert bytes(read) == (tmp_path / "weights").read_bytes()


def test_whole_huge_pages_are_written_at_once(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one call writes is one folio of the page cache, as far as file systems have large ones."""
    sizes: list[int] = []

    def write(file: int, data: bytes) -> int:
        sizes.append(len(data))
        return len(data)

    monkeypatch.setattr("radixlm.compile.weights_file._HUGE_PAGE", 4096)
    monkeypatch.setattr(os, "write", write)
    with open_source(source) as opened:
        writer, plan = writer_of(StoredWeights(opened, "keep"))
        writer.write(-1, no_progress)
    assert sum(sizes) > plan.num_bytes > 100 * 4096
    assert set(sizes[:-1]) == {4096} and 0 < sizes[-1] <= 4096


def test_rounding_is_measured_over_all_tensors_of_a_kind(source: Path) -> None:
    """Some of the kind q4_g32 are the file's own, whose error is nothing; their squares count all the same."""
    with open_source(source) as opened:
        weights = StoredWeights(opened, "q4")
        writer, _ = writer_of(weights)
        memory = os.memfd_create("weights")
        writer.write(memory, no_progress)
        os.close(memory)
        names = [name for name, kind in weights.kinds.items() if kind.label == "q4_g32"]
        values = {name: opened.read_float32(name).astype(np.float64) for name in names}
        error = sum(np.square(values[name] - weights.float32(name)).sum() for name in names)
        energy = sum(np.square(each).sum() for each in values.values())
        assert writer.kind_infos()["q4_g32"].relative_error == pytest.approx((error / energy) ** 0.5, rel=1e-12)
        assert {rounded.name for rounded in writer.rounded()} < set(names)


def test_pages_that_are_let_go_are_read_again(source: Path) -> None:
    with open_source(source) as opened:
        name = "model.layers.0.mlp.up_proj.weight"
        before = opened.read(name).codes
        opened.release()
        np.testing.assert_array_equal(opened.read(name).codes, before)


def test_an_interrupt_ends_the_writing(source: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with open_source(source) as opened, pytest.raises(KeyboardInterrupt):
        memory = os.memfd_create("weights")
        try:
            writer_of(StoredWeights(opened, "keep"))[0].write(memory, interrupt)
        finally:
            os.close(memory)
