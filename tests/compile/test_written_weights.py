"""Faults in a written file of weights are found, whichever tensor they are in, and what is right is passed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from radixlm.compile.sources import open_source
from radixlm.compile.stored_weights import Quantize, StoredWeights
from radixlm.compile.weights.packing import packed_shape
from radixlm.compile.weights.plan import WeightPlan
from radixlm.compile.weights_file import WeightsWriter
from radixlm.compile.written_weights import WrittenWeights
from radixlm.runtime.errors import VerificationFailed

from .conftest import TinyModel
from .random_blocks import QUANTIZED_TYPES
from .test_mixed_gguf import write

MakeTiny = Callable[..., TinyModel]
GATE, UP = "model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight"


def no_progress(done: int, total: int) -> None:
    """Nobody looks."""


@dataclass
class Written:
    """A file in memory, and what it was written from."""

    file: int
    plan: WeightPlan
    weights: StoredWeights

    @property
    def offset(self) -> int:
        return os.fstat(self.file).st_size - self.plan.num_bytes

    def check(self) -> int:
        return WrittenWeights(self.file, self.offset, self.plan, self.weights).check(no_progress)

    def read(self, name: str) -> bytes:
        begin, end = self.plan.tensors()[name]
        return os.pread(self.file, end - begin, self.offset + begin)

    def change(self, name: str, data: bytes, at: int = 0) -> None:
        os.pwrite(self.file, data, self.offset + self.plan.offset(name) + at)


def written(source: Path, quantize: Quantize) -> Iterator[Written]:
    """Of all matrices, gates and `up` of a layer as one, and of the norms."""
    with open_source(source) as opened:
        weights = StoredWeights(opened, quantize)
        plan = WeightPlan(weights.kinds, weights.sorted_inputs)
        for name, info in opened.tensors().items():
            if name in weights.kinds and name != UP:
                kinds_match = name == GATE and weights.kinds[GATE] == weights.kinds[UP]
                parts = ((name, info.shape[0]), *([(UP, info.shape[0])] if kinds_match else []))
                plan.matrix(parts, info.shape[1])
            elif name not in weights.kinds:
                plan.vector(((name, info.shape[0]),))
        if not any(UP in matrix.name for matrix in plan.matrices.values()):
            plan.matrix(((UP, opened.tensors()[UP].shape[0]),), opened.tensors()[UP].shape[1])
        file = os.memfd_create("weights")
        WeightsWriter(weights, plan, ()).write(file, no_progress)
        yield Written(file, plan, weights)
        os.close(file)


@pytest.fixture(scope="module")
def mixed_path(tmp_path_factory: pytest.TempPathFactory, make_tiny: MakeTiny) -> Path:
    tiny = make_tiny(hidden_size=256, intermediate_size=512, head_dim=64, num_hidden_layers=3)
    matrices = [name for name, weight in tiny.weights.items() if weight.ndim == 2]
    types = dict(zip(matrices, QUANTIZED_TYPES, strict=True))
    return write(tmp_path_factory.mktemp("mixed") / "mixed.gguf", tiny, types.__getitem__)


@pytest.fixture(scope="module")
def square_path(tmp_path_factory: pytest.TempPathFactory, make_tiny: MakeTiny) -> Path:
    """A model in Q4_K whose query and output matrices have one shape."""
    tiny = make_tiny(hidden_size=256, intermediate_size=512, head_dim=64, num_attention_heads=4, num_hidden_layers=2)
    return write(tmp_path_factory.mktemp("square") / "square.gguf", tiny, lambda name: "Q4_K")


@pytest.fixture(params=["keep", "q4", "q8", "f16", "f32"])
def mixed(request: pytest.FixtureRequest, mixed_path: Path) -> Iterator[Written]:
    yield from written(mixed_path, request.param)


@pytest.fixture
def square(square_path: Path) -> Iterator[Written]:
    yield from written(square_path, "keep")


@pytest.fixture
def rounded(square_path: Path) -> Iterator[Written]:
    yield from written(square_path, "f16")


def test_every_kind_of_weight_passes(mixed: Written) -> None:
    assert mixed.check() >= len(mixed.weights.kinds)


def test_every_byte_of_codes_and_scales_counts(mixed_path: Path) -> None:
    """Where a format's codes are kept, any wrong byte is found; kinds that are packed from codes have samples alone."""
    for file in written(mixed_path, "keep"):
        for matrix in file.plan.matrices.values():
            if file.weights.read_planes(matrix.parts[0][0], slice(0, 16)) is None:
                continue
            for array, size in matrix.array_bytes().items():
                name = f"{matrix.name}.{array}"
                at = int(np.random.default_rng(len(name)).integers(size))
                before = file.read(name)[at]
                file.change(name, bytes([before ^ 0x10]), at)
                with pytest.raises(VerificationFailed, match="differs from the source in the codes or scales"):
                    file.check()
                file.change(name, bytes([before]), at)
        file.check()


@pytest.mark.parametrize("name", ["square", "rounded"])
def test_two_tensors_that_changed_places_are_found(name: str, request: pytest.FixtureRequest) -> None:
    file: Written = request.getfixturevalue(name)
    first, second = (f"model.layers.{layer}.self_attn.o_proj.weight" for layer in (0, 1))
    for array in file.plan.matrices[first].array_bytes():
        ours, theirs = file.read(f"{first}.{array}"), file.read(f"{second}.{array}")
        file.change(f"{first}.{array}", theirs)
        file.change(f"{second}.{array}", ours)
    with pytest.raises(VerificationFailed, match=r"o_proj\.weight \(.*\) differs from the source"):
        file.check()


def test_two_halves_of_a_joined_matrix_that_changed_places_are_found(square: Written) -> None:
    joined = f"{GATE}+{UP}"
    for array in square.plan.matrices[joined].array_bytes():
        data = square.read(f"{joined}.{array}")
        half = len(data) // 2
        square.change(f"{joined}.{array}", data[half:] + data[:half])
    with pytest.raises(VerificationFailed, match=r"gate_proj\.weight \(.*\) differs"):
        square.check()


def test_a_matrix_that_is_turned_is_found(rounded: Written) -> None:
    """A square one in float16, whose rows are columns in the file."""
    name = "model.layers.0.self_attn.o_proj.weight"
    shape = rounded.weights.source.tensors()[name].shape
    assert shape[0] == shape[1]
    turned = rounded.weights.read(name).codes.T.reshape(shape[0] // 16, 16, shape[1]).swapaxes(1, 2)
    rounded.change(f"{name}.codes", np.ascontiguousarray(turned).tobytes())
    with pytest.raises(VerificationFailed, match=r"o_proj\.weight \(f16\) differs from the source in the numbers"):
        rounded.check()


@pytest.mark.parametrize("array", ["codes", "scales", "offsets"])
def test_blocks_one_row_block_off_are_found(square: Written, array: str) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    kind = square.weights.kinds[name]
    size = getattr(packed_shape(kind, 16, 512), array)
    data = square.read(f"{name}.{array}")
    square.change(f"{name}.{array}", data[size:] + data[:size])
    with pytest.raises(VerificationFailed, match=r"down_proj\.weight"):
        square.check()


def test_one_wrong_block_of_scales_is_found(square: Written) -> None:
    name = "model.layers.1.mlp.down_proj.weight.scales"
    square.change(name, bytes(16), 32)  # the first group of 16 rows
    with pytest.raises(
        VerificationFailed, match=r"down_proj\.weight \(.*\) differs from the source in the codes or sc"
    ):
        square.check()


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.input_layernorm.weight"])
def test_one_wrong_number_of_a_norm_is_found(square: Written, name: str) -> None:
    square.change(name, np.float32(0.5).tobytes(), 4 * 77)
    with pytest.raises(VerificationFailed, match=f"{name} differs"):
        square.check()


def test_a_file_that_ends_early_is_found(square: Written) -> None:
    os.ftruncate(square.file, square.offset + square.plan.num_bytes - 64)
    with pytest.raises(VerificationFailed, match="end after"):
        offset = square.offset + 64
        WrittenWeights(square.file, offset, square.plan, square.weights).check(no_progress)
