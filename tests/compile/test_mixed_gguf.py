"""Files whose tensors are of many types, as Q4_K_M and unsloth's UD files are, compile and compute the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import gguf
import numpy as np
import pytest
from click.testing import CliRunner
from gguf import GGMLQuantizationType as Type
from radixlm.cli.main import cli
from radixlm.compile import compile_model
from radixlm.compile.compiler import CompileReport
from radixlm.compile.reference import reference_logits
from radixlm.compile.sources import open_source
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.errors import UnsupportedArchitecture
from radixlm.runtime.model.model_runner import ModelRunner

from .conftest import TinyModel, add_metadata, gguf_name
from .ragged import Rows
from .random_blocks import QUANTIZED_TYPES, random_tensor

MakeTiny = Callable[..., TinyModel]
NUM_PAGES = 61
PROMPT = [int(token) for token in np.random.default_rng(5).integers(3, 31, 70)]


def write(
    path: Path, tiny: TinyModel, type_of: Callable[[str], str], scales: Mapping[str, float] = MappingProxyType({})
) -> Path:
    """A model of random numbers whose matrices have the types that `type_of` gives their names.

    `scales` are tensors of one number.
    """
    writer = gguf.GGUFWriter(path, "llama")
    add_metadata(writer, tiny.config)
    for name, scale in scales.items():
        writer.add_tensor(name, np.array([scale], np.float32))
    rng = np.random.default_rng(3)
    for name, weight in tiny.weights.items():
        if weight.ndim == 1:
            writer.add_tensor(gguf_name(name), weight)
        else:
            type_name = type_of(name)
            blocks = random_tensor(type_name, rng, (weight.shape[0], weight.shape[1]), 0.06)
            writer.add_tensor(gguf_name(name), blocks, raw_dtype=Type[type_name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@dataclass(frozen=True)
class Mixed:
    """A compiled model of three layers in which every quantized type has one matrix."""

    path: Path
    report: CompileReport


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory, make_tiny: MakeTiny) -> Mixed:
    folder = tmp_path_factory.mktemp("mixed")
    tiny = make_tiny(hidden_size=256, intermediate_size=512, head_dim=64, num_hidden_layers=3)
    matrices = [name for name, weight in tiny.weights.items() if weight.ndim == 2]
    types = dict(zip(matrices, QUANTIZED_TYPES, strict=True))
    path = write(folder / "mixed.gguf", tiny, types.__getitem__)
    return Mixed(path, compile_model(path, folder / "mixed.radixlm", kv_dtype="f32"))


@pytest.fixture
def rows(mixed: Mixed) -> Iterator[Rows]:
    runner = ModelRunner(Artifact.open(mixed.report.path), num_pages=NUM_PAGES)
    yield Rows(runner, NUM_PAGES)
    runner.close()


def test_every_type_is_kept_without_rounding(mixed: Mixed) -> None:
    kinds = mixed.report.manifest.quantization.kinds
    assert sorted(type_ for kind in kinds.values() for type_ in kind.source) == QUANTIZED_TYPES
    assert all(kind.relative_error == 0 for kind in kinds.values())
    assert mixed.report.rounded == ()


def test_logits_are_those_of_numpy_on_the_references_numbers(mixed: Mixed, rows: Rows) -> None:
    number = rows.add(PROMPT)
    logits = rows.step({number: len(PROMPT)})[number]
    with open_source(mixed.path) as source:
        expected = reference_logits(
            source.config, source.read_float32, PROMPT, quantized=lambda name: "embed" not in name
        )
    off = np.sqrt(np.square(logits - expected).mean(axis=-1)) / expected.std(axis=-1)
    assert np.median(off) < 0.05


def test_logits_are_the_same_bits_whatever_is_beside_a_token(rows: Rows) -> None:
    whole = rows.add(PROMPT)
    expected = rows.step({whole: len(PROMPT)})[whole]
    alone, chunked, beside = (rows.add(PROMPT) for _ in range(3))
    one_by_one = np.concatenate([rows.step({alone: 1})[alone] for _ in PROMPT])
    in_chunks = [rows.step({chunked: size, beside: size + 1}) for size in (1, 5, 37)]
    assert np.array_equal(one_by_one, expected)
    for number in (chunked, beside):
        logits = np.concatenate([step[number] for step in in_chunks])
        assert np.array_equal(logits, expected[: len(logits)])


def test_kinds_that_differ_inside_a_layer_run_side_by_side(make_tiny: MakeTiny, tmp_path: Path) -> None:
    """Q4_K_M stores most matrices in Q4_K and, in some layers, v and down in Q6_K."""

    def type_of(name: str) -> str:
        wide = ".1." in name and (".v_proj." in name or ".down_proj." in name)
        return "Q6_K" if wide or "lm_head" in name else "Q4_K"

    path = write(tmp_path / "mixed.gguf", make_tiny(hidden_size=256, intermediate_size=512, head_dim=64), type_of)
    kinds = compile_model(path, tmp_path / "mixed.radixlm").manifest.quantization.kinds
    assert {name: kind.source for name, kind in kinds.items()} == {
        "q4_g32_min_nested": ("Q4_K",),
        "q6_g16_nested": ("Q6_K",),
    }
    assert all(kind.relative_error == 0 for kind in kinds.values())


def test_the_scale_of_a_whole_nvfp4_matrix_multiplies_it(make_tiny: MakeTiny, tmp_path: Path) -> None:
    tiny, name = make_tiny(), "model.layers.1.self_attn.v_proj.weight"
    scales = {"blk.1.attn_v.scale": 0.3, "blk.1.attn_v.input_scale": 7.0}
    without, with_scale = (
        write(tmp_path / f"{len(extra)}.gguf", tiny, lambda matrix: "NVFP4" if matrix == name else "Q8_0", extra)
        for extra in ({}, scales)
    )
    with open_source(without) as source, open_source(with_scale) as scaled:
        plain = source.read_float32(name)
        assert scaled.tensors().keys() == source.tensors().keys()
        np.testing.assert_array_equal(scaled.read_float32(name), plain * np.float32(0.3))
        np.testing.assert_allclose(scaled.read(name).dequantize(), plain * np.float32(0.3), rtol=2**-11)
        np.testing.assert_array_equal(scaled.read_float32(name, slice(3, 5)), plain[3:5] * np.float32(0.3))


def test_compile_names_the_matrices_that_it_rounds(make_tiny: MakeTiny, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.v_proj.weight"
    tiny, types = make_tiny(num_hidden_layers=1), {name: "NVFP4"}
    path = write(tmp_path / "a.gguf", tiny, lambda matrix: types.get(matrix, "Q8_0"), {"blk.0.attn_v.scale": 0.3})
    result = CliRunner().invoke(cli, ["compile", str(path), "-o", str(tmp_path / "a.radixlm")])
    assert result.exit_code == 0, result.output
    [line] = [line for line in result.stderr.splitlines() if "is rounded" in line]
    assert line.startswith(f"{name} (NVFP4) is rounded to fp4_g16: relative error 0.0001")


def test_a_scale_beside_another_type_is_refused(make_tiny: MakeTiny, tmp_path: Path) -> None:
    path = write(tmp_path / "scale.gguf", make_tiny(), lambda matrix: "Q8_0", {"blk.1.attn_v.scale": 0.3})
    with pytest.raises(UnsupportedArchitecture, match="scale has no place"):
        open_source(path)
