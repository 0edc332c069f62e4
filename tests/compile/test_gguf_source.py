"""A GGUF file reads as the Hugging Face checkpoint it was converted from, or says in one line why not."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from click.testing import CliRunner
from gguf import GGMLQuantizationType as Type
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from radixlm.cli.main import cli
from radixlm.compile.sources import GGUFSource, open_source
from radixlm.compile.weights.kinds import Q8
from radixlm.runtime.artifact.manifest import USUAL_SAMPLING
from radixlm.runtime.artifact.model_config import FactorsScaling, LinearScaling, YarnScaling
from radixlm.runtime.errors import (
    CorruptSource,
    SourceError,
    SourceNotFound,
    UnsupportedArchitecture,
    UnsupportedTensor,
)

from ..split_gguf import split_in

Make = Callable[..., Any]
QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True}, {"tie_word_embeddings": True}])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_every_tensor_is_the_checkpoints_own(
    architecture: str, changes: dict[str, Any], make_tiny: Make, write_gguf: Make
) -> None:
    tiny = make_tiny(architecture=architecture, **changes)
    with open_source(write_gguf(tiny)) as source:
        assert source.config == tiny.config
        assert source.tensors().keys() == tiny.weights.keys()
        for name, weight in tiny.weights.items():
            assert source.tensors()[name].shape == weight.shape
            np.testing.assert_array_equal(source.read(name).dequantize(), weight)
            np.testing.assert_array_equal(source.read_float32(name, slice(3, 11)), weight[3:11])


@pytest.mark.parametrize("name", [QUERY, QUERY.replace("q_proj", "k_proj"), QUERY.replace("q_proj", "o_proj")])
def test_rows_of_quantized_tensors_come_in_hugging_faces_order(name: str, make_tiny: Make, write_gguf: Make) -> None:
    tiny = make_tiny()
    expected = gguf.quants.dequantize(gguf.quants.quantize(tiny.weights[name], Type.Q8_0), Type.Q8_0)
    with open_source(write_gguf(tiny, Type.Q8_0)) as source:
        assert source.read(name).kind == Q8
        assert source.tensors()[name].type == "Q8_0"
        np.testing.assert_array_equal(source.read(name).dequantize(), expected)
        np.testing.assert_array_equal(source.read(name, slice(5, 9)).dequantize(), expected[5:9])


def test_names_ids_and_template_come_from_the_metadata(make_tiny: Make, write_gguf: Make) -> None:
    with open_source(write_gguf(make_tiny())) as source:
        assert source.name == source.info.name == "tiny"
        assert source.bos_token_id == 1 and not source.add_bos_token
        assert source.eos_token_ids == (2, 0)  # <|im_end|> as declared, <|endoftext|> as known
        assert source.chat_template == "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("said", "changes"),
    [
        ({}, {}),
        ({"temp": 0.05, "top_k": 1, "top_p": 0.5}, {"temperature": 0.05, "top_k": 1, "top_p": 0.5}),
        ({"min_p": 0.1, "penalty_repeat": 1.1}, {"min_p": 0.1, "repetition_penalty": 1.1}),
        ({"penalty_repeat": 1.1, "penalty_last_n": 0}, {}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"sequence": "top_k;temperature"}, {"top_p": 1.0, "min_p": 0.0}),
        ({"temp": -1.0, "top_p": 7.0}, {}),
    ],
)
def test_the_metadata_says_how_to_sample_and_the_rest_is_as_usual(
    said: dict[str, Any], changes: dict[str, Any], make_tiny: Make, write_gguf: Make
) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        add = {int: writer.add_int32, float: writer.add_float32, str: writer.add_string}
        for key, value in said.items():
            add[type(value)](f"general.sampling.{key}", value)

    with open_source(write_gguf(make_tiny(), edit=edit)) as source:
        assert source.sampling == replace(USUAL_SAMPLING, **changes)


@pytest.mark.parametrize(
    ("name", "stored"), [("model.norm.weight", "output_norm.weight"), (QUERY, "blk.1.attn_q.weight")]
)
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_a_number_that_no_weight_can_have_is_named_as_the_file_names_it(
    name: str, stored: str, number: float, make_tiny: Make, write_gguf: Make
) -> None:
    tiny = make_tiny()
    tiny.weights[name].reshape(-1)[5] = number
    with (
        open_source(write_gguf(tiny)) as source,
        pytest.raises(CorruptSource, match=rf"tiny.gguf: {stored} \(F32\) has"),
    ):
        source.read(name)


def test_llama3s_stored_frequencies_become_factors(make_tiny: Make, write_gguf: Make) -> None:
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    path = write_gguf(make_tiny(), edit=lambda writer: writer.add_tensor("rope_freqs.weight", factors))
    with open_source(path) as source:
        assert source.config.ropes[0].scaling == FactorsScaling(factors=tuple(factors.tolist()))
        assert "rope_freqs.weight" not in source.tensors()


@pytest.mark.parametrize("count", [1, 7, 9])
def test_stored_frequencies_of_another_number_than_pairs_are_refused(
    count: int, make_tiny: Make, write_gguf: Make
) -> None:
    """One factor was taken for all, and others ended in a traceback when the artifact was built."""
    factors = np.ones(count, np.float32)
    path = write_gguf(make_tiny(), edit=lambda writer: writer.add_tensor("rope_freqs.weight", factors))
    with pytest.raises(CorruptSource, match=f"RoPE has {count} factors, 8 pairs of a head rotate"):
        open_source(path)


def test_linear_scaling_and_the_sliding_window_are_kept(make_tiny: Make, write_gguf: Make) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)
        writer.add_sliding_window(64)

    with open_source(write_gguf(make_tiny(), edit=edit)) as source:
        assert source.config.ropes[0].scaling == LinearScaling(factor=4.0)
        assert {attention.window for attention in source.config.attentions} == {64}


def test_yarn_is_read(make_tiny: Make, write_gguf: Make) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(32)

    with open_source(write_gguf(make_tiny(), edit=edit)) as source:
        assert source.config.ropes[0].scaling == YarnScaling(factor=4.0, original_max_position_embeddings=32)


def test_the_fingerprint_is_stable_and_sees_other_weights(make_tiny: Make, write_gguf: Make) -> None:
    tiny = make_tiny()
    first = GGUFSource(write_gguf(tiny)).info.fingerprint
    assert GGUFSource(write_gguf(tiny)).info.fingerprint == first
    tiny.weights[QUERY] = tiny.weights[QUERY] + 1
    assert GGUFSource(write_gguf(tiny)).info.fingerprint != first


# What cannot be used.


@pytest.mark.parametrize("template", ["", " \n", "{# nothing #}\n"])
def test_a_template_that_renders_nothing_is_none(template: str, make_tiny: Make, write_gguf: Make) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        del writer.kv_data[0]["tokenizer.chat_template"]
        writer.add_chat_template(template)

    assert open_source(write_gguf(make_tiny(), edit=edit)).chat_template is None


def test_a_tokenizer_without_merges_is_refused(make_tiny: Make, write_gguf: Make) -> None:
    path = write_gguf(make_tiny(), edit=lambda writer: writer.kv_data[0].pop("tokenizer.ggml.merges"))
    with pytest.raises(CorruptSource, match=r"tiny\.gguf: the tokenizer has no merges"):
        open_source(path)


def test_a_tensor_without_dimensions_is_corrupt(make_tiny: Make, write_gguf: Make) -> None:
    path = write_gguf(make_tiny(), edit=lambda writer: writer.add_tensor("zero", np.float32(1.0).reshape(())))
    with pytest.raises(CorruptSource, match="'zero' has no dimensions"):
        open_source(path)


def test_more_tensors_than_any_model_has_are_not_looked_for(tmp_path: Path) -> None:
    """A file with holes holds as many as a number says."""
    path = tmp_path / "many.gguf"
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0))
        file.truncate(1 << 30)
    with pytest.raises(CorruptSource, match=r"1152921504606846976 tensors; 65536 at most"):
        open_source(path)


@pytest.mark.parametrize(
    ("name", "begin", "said"),
    [
        ("old.gguf", b"GGUF" + struct.pack("<I", 1), "is GGUF version 1, read are 2 and 3; take a newer conversion"),
        ("new.gguf", b"GGUF" + struct.pack("<I", 77), "is GGUF version 77"),
        ("model.safetensors", b"\x80\x01\x00\x00\x00\x00\x00\x00{", "give its directory"),
        ("config.json", b"{}", "give its directory"),
        ("model.onnx", b"\x08\x07\x12\x07", "give a .gguf file, or a model directory"),
    ],
)
def test_a_file_of_another_kind_is_told_apart(name: str, begin: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(begin)
    with pytest.raises(SourceError, match=re.escape(said)) as caught:
        open_source(tmp_path / name)
    assert "fetch it again" not in str(caught.value)


def test_a_scaling_that_is_not_known_is_refused(make_tiny: Make, write_gguf: Make) -> None:
    path = write_gguf(make_tiny(), edit=lambda writer: writer.add_string("llama.rope.scaling.type", "spiral"))
    with pytest.raises(UnsupportedArchitecture, match=r"'spiral'.*yarn"):
        open_source(path)


def test_another_architecture_is_refused_with_those_that_are_supported(make_tiny: Make, tmp_path: Path) -> None:
    path = tmp_path / "gemma.gguf"
    writer = gguf.GGUFWriter(path, "gemma")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedArchitecture, match=r"'gemma'.*the nearest is Gemma"):
        open_source(path)


def test_a_llama_of_experts_lacks_them(make_tiny: Make, write_gguf: Make) -> None:
    """Mixtral is a Llama in GGUF."""

    def says_that_it_has_experts(writer: gguf.GGUFWriter) -> None:
        writer.add_expert_count(8)
        writer.add_expert_used_count(2)

    path = write_gguf(make_tiny(), edit=says_that_it_has_experts)
    with pytest.raises(CorruptSource, match=r"mlp\.gate\.weight is missing"):
        open_source(path)
    path = write_gguf(make_tiny(), edit=lambda writer: writer.add_expert_count(8))
    with pytest.raises(CorruptSource, match="num_active of experts is not given"):
        open_source(path)


@settings(max_examples=6, deadline=None, suppress_health_check=[*HealthCheck])
@given(st.data())
def test_parts_of_a_split_file_are_read_as_the_whole(make_tiny: Make, write_gguf: Make, data: st.DataObject) -> None:
    """Whichever of the parts is given."""
    path = write_gguf(make_tiny(), Type.Q4_0)
    with tempfile.TemporaryDirectory() as folder:
        parts = split_in(path, Path(folder), data.draw(st.integers(1, 20)))
        whole, split = GGUFSource(path), GGUFSource(data.draw(st.sampled_from(parts)))
        assert (split.name, split.config, split.tokenizer_json) == ("tiny", whole.config, whole.tokenizer_json)
        assert split.tensors() == whole.tensors()
        for name in whole.tensors():
            np.testing.assert_array_equal(split.read_float32(name), whole.read_float32(name))
        changed = data.draw(st.sampled_from(parts))
        before = split.info.fingerprint
        tensor = gguf.GGUFReader(changed, "r+").tensors[0]
        tensor.data.reshape(-1).view(np.uint8)[0] ^= 1
        assert GGUFSource(parts[0]).info.fingerprint != before


@pytest.fixture
def parts(make_tiny: Make, write_gguf: Make, tmp_path: Path) -> list[Path]:
    """A model in three parts or more."""
    folder = tmp_path / "parts"
    folder.mkdir()
    found = split_in(write_gguf(make_tiny()), folder, 7)
    assert len(found) >= 3
    return found


def test_a_missing_part_is_named(parts: list[Path]) -> None:
    parts[1].unlink()
    with pytest.raises(SourceNotFound, match=rf"{parts[1].name} cannot be read"):
        open_source(parts[0])


def test_a_part_in_the_place_of_another_is_refused(parts: list[Path]) -> None:
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(CorruptSource, match=rf"{parts[1].name} is not part 2 of"):
        open_source(parts[0])


def test_a_part_that_was_renamed_is_told_its_name(parts: list[Path]) -> None:
    renamed = parts[0].rename(parts[0].with_name("renamed.gguf"))
    with pytest.raises(SourceNotFound, match=rf"one of {len(parts)} parts, and its name says 1"):
        open_source(renamed)


def test_parts_that_say_another_number_of_tensors_are_refused(parts: list[Path]) -> None:
    reader = gguf.GGUFReader(parts[0], "r+")
    reader.fields["split.tensors.count"].parts[-1][0] += 1
    reader.data.flush()
    with pytest.raises(CorruptSource, match="fetch them again"):
        open_source(parts[0])


def test_a_tensor_type_that_no_kernel_runs_is_named(make_tiny: Make, write_gguf: Make) -> None:
    path = write_gguf(make_tiny())
    retype(path, "blk.1.attn_q.weight", Type.I32)  # as large as F32, so only the type is wrong
    with pytest.raises(UnsupportedTensor, match=r"blk.1.attn_q.weight is stored as I32.*Q4_K_M"):
        open_source(path)


@pytest.mark.parametrize(
    ("type_id", "said"),
    [
        (Type.Q1_0, "is stored as Q1_0"),  # known to the package, which cannot read it
        (1042, "is stored as type 1042"),
    ],
)
def test_a_type_that_cannot_be_read_is_refused_with_the_tensor_and_what_to_use(
    type_id: int, said: str, make_tiny: Make, write_gguf: Make, tmp_path: Path
) -> None:
    path, output = write_gguf(make_tiny(hidden_size=128, intermediate_size=128)), tmp_path / "out"
    output.mkdir()
    retype(path, "blk.1.attn_q.weight", type_id)
    result = CliRunner().invoke(cli, ["compile", str(path), "-o", str(output / "tiny.radixlm")])
    assert result.exit_code == 2 and not list(output.iterdir())
    message = result.output.splitlines()[-1]
    assert "blk.1.attn_q.weight" in message and said in message and "take a Q4_K_M, Q8_0 or F16 file" in message


def test_a_quantized_vector_is_refused(make_tiny: Make, write_gguf: Make) -> None:
    path = write_gguf(make_tiny())
    retype(path, "blk.1.attn_norm.weight", Type.Q8_0)
    with pytest.raises(UnsupportedTensor, match=r"blk.1.attn_norm.weight is a vector stored as Q8_0.*F16"):
        open_source(path)


def retype(path: Path, name: str, type_id: int) -> None:
    """Say in a file's header that a tensor in F32 has another type."""
    data = bytearray(path.read_bytes())
    end = data.index(name.encode()) + len(name)
    (num_dimensions,) = struct.unpack_from("<I", data, end)
    at = end + 4 + num_dimensions * 8
    assert struct.unpack_from("<I", data, at) == (Type.F32,)
    struct.pack_into("<I", data, at, type_id)
    path.write_bytes(data)


def test_a_missing_tensor_is_named(make_tiny: Make, write_gguf: Make) -> None:
    tiny = make_tiny()
    del tiny.weights[QUERY]
    with pytest.raises(CorruptSource, match=f"{QUERY} is missing"):
        open_source(write_gguf(tiny))


def test_a_shape_that_contradicts_the_metadata_is_named(make_tiny: Make, write_gguf: Make) -> None:
    tiny = make_tiny()
    tiny.weights[QUERY] = tiny.weights[QUERY][:32]
    with pytest.raises(CorruptSource, match=rf"{QUERY} has shape \[32, 64\].*\[64, 64\]"):
        open_source(write_gguf(tiny))


def test_scales_that_are_no_numbers_are_corrupt(make_tiny: Make, write_gguf: Make) -> None:
    path = write_gguf(make_tiny(), Type.Q8_0)
    reader = gguf.GGUFReader(path, "r+")
    tensor = next(tensor for tensor in reader.tensors if tensor.name == "blk.1.attn_q.weight")
    tensor.data[0, :2] = np.frombuffer(np.float16("inf").tobytes(), np.uint8)
    reader.data.flush()
    with open_source(path) as source, pytest.raises(CorruptSource, match="scales"):
        source.read(QUERY)


# Damaged files.


def test_a_file_cut_anywhere_is_corrupt(make_tiny: Make, write_gguf: Make) -> None:
    path = write_gguf(make_tiny())
    whole = path.read_bytes()
    lengths = {0, 1, 4, 8, 23, 24, *range(25, len(whole), 997), len(whole) - 40}
    for length in lengths:
        path.write_bytes(whole[:length])
        with pytest.raises(CorruptSource) as caught:
            open_source(path)
        assert "\n" not in str(caught.value)


def test_a_cut_file_says_what_it_has_and_needs(make_tiny: Make, write_gguf: Make) -> None:
    path = write_gguf(make_tiny())
    whole = path.read_bytes()
    path.write_bytes(whole[:-200])
    with pytest.raises(CorruptSource, match=rf"truncated: it has {len(whole) - 200} bytes and needs \d+"):
        open_source(path)


@pytest.mark.parametrize(
    "counts_and_array",
    [
        struct.pack("<QQ", 1 << 60, 0),
        struct.pack("<QQ", 0, 1 << 60),
        struct.pack("<QQQ1sIIQ", 0, 1, 1, b"k", 9, 4, 1 << 60),  # an array of 2^60 numbers
        struct.pack("<QQQ1sIIQ", 0, 1, 1, b"k", 9, 8, 1 << 60),  # of strings
        struct.pack("<QQQ1sIQ", 0, 1, 1, b"k", 8, (1 << 64) - 8),  # a string of almost 2^64 bytes
        struct.pack("<QQQ1sIIQ", 0, 1, 1, b"k", 9, 9, 1 << 60),  # of arrays
    ],
)
def test_absurd_counts_are_corrupt_and_allocate_nothing(counts_and_array: bytes, tmp_path: Path) -> None:
    path = tmp_path / "absurd.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<I", 3) + counts_and_array)
    with pytest.raises(CorruptSource):
        open_source(path)


@pytest.fixture
def whole_gguf(make_tiny: Make, write_gguf: Make) -> tuple[Path, bytes, int]:
    """A file, its content, and how much of that is header."""
    path = write_gguf(make_tiny(num_hidden_layers=1))
    return path, path.read_bytes(), int(gguf.GGUFReader(path).data_offset)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damage=st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), min_size=1, max_size=4))
def test_damaged_bytes_are_a_source_error_or_harmless(
    whole_gguf: tuple[Path, bytes, int], damage: list[tuple[int, int]]
) -> None:
    path, whole, header_bytes = whole_gguf
    content = bytearray(whole)
    for at, value in damage:
        content[at % header_bytes] = value
    path.write_bytes(content)
    try:
        with open_source(path) as source:
            for name in source.tensors():
                source.read(name)
    except SourceError as error:
        assert "\n" not in str(error)


def test_a_file_that_is_not_there_says_what_to_give() -> None:
    with pytest.raises(SourceNotFound, match=r"\.gguf file, a model directory, hf:ORG/NAME"):
        open_source("no/such/model.gguf")


# Memory.

READ_ALL = """
import sys
from radixlm.compile.sources import open_source

def anonymous_mib():
    line = next(line for line in open("/proc/self/status") if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1024

before = anonymous_mib()
with open_source(sys.argv[1]) as source:
    for name in source.tensors():
        source.read(name)
print(anonymous_mib() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="RssAnon is Linux's")
def test_reading_a_model_keeps_no_weights_in_memory(smollm2_gguf: Path) -> None:
    """The tokenizer takes 40 MiB; the codes of all weights together would be 128 MiB more."""
    command = [sys.executable, "-c", READ_ALL, str(smollm2_gguf)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert float(result.stdout) < 90
