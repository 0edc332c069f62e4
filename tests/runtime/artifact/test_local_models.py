"""Models are recognized by names and headers: what is whole passes, and what is cut off anywhere does not."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from radixlm.runtime.artifact.gguf_header import check_gguf_header
from radixlm.runtime.artifact.local_models import check_model, models_in
from radixlm.runtime.errors import CorruptArtifact, CorruptSource, SourceNotFound
from radixlm.runtime.system import memory_file

from ...goldens import tiny_gguf
from ...goldens.families import FAMILIES


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf.write(FAMILIES["qwen3"], tmp_path_factory.mktemp("gguf") / "a.gguf")


def test_a_whole_model_of_each_kind_passes(gguf_file: Path, tiny_source: Path, tiny_artifact: Path) -> None:
    for model in (gguf_file, tiny_source, tiny_artifact):
        check_model(model)


@given(share=st.floats(0, 0.9))
def test_a_gguf_file_that_is_cut_off_is_refused(gguf_file: Path, share: float) -> None:
    whole = gguf_file.read_bytes()
    descriptor = memory_file("cut")
    assert descriptor is not None
    try:
        os.write(descriptor, whole[: int(share * len(whole))])
        with pytest.raises(CorruptSource, match=r"is truncated|is empty|its header goes beyond"):
            check_gguf_header(Path(f"/proc/self/fd/{descriptor}"))
    finally:
        os.close(descriptor)


@given(at=st.integers(0, 20_000), byte=st.integers(0, 255))
def test_a_header_with_any_other_byte_is_checked_without_a_crash(gguf_file: Path, at: int, byte: int) -> None:
    damaged = bytearray(gguf_file.read_bytes())
    damaged[at % len(damaged)] = byte
    descriptor = memory_file("damaged")
    assert descriptor is not None
    try:
        os.write(descriptor, damaged)
        try:
            check_gguf_header(Path(f"/proc/self/fd/{descriptor}"))
        except (CorruptSource, SourceNotFound) as error:
            assert "fetch it again" in str(error) or "no valid GGUF" in str(error)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "it is empty"),
        (b"hello", "begins with b'hell'"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises((CorruptSource, SourceNotFound)) as refused:
        check_model(tmp_path / "a.gguf")
    assert says in str(refused.value)


def test_a_missing_part_is_named(tmp_path: Path, gguf_file: Path) -> None:
    shutil.copy(gguf_file, tmp_path / "a-00001-of-00002.gguf")
    with pytest.raises(SourceNotFound, match=r"a-00002-of-00002\.gguf cannot be read: No such file"):
        check_model(tmp_path / "a-00001-of-00002.gguf")


def test_a_checkpoint_that_is_incomplete_is_refused(tmp_path: Path, tiny_source: Path) -> None:
    model = Path(shutil.copytree(tiny_source, tmp_path / "model"))
    weights = model / "model.safetensors"
    for size in (weights.stat().st_size - 1, 9, 0):
        os.truncate(weights, size)
        with pytest.raises(CorruptSource, match="is truncated"):
            check_model(model)
    weights.write_bytes((2).to_bytes(8, "little") + b"[]")
    with pytest.raises(CorruptSource, match="header is damaged"):
        check_model(model)
    weights.unlink()
    with pytest.raises(SourceNotFound, match=r"has no model\.safetensors"):
        check_model(model)
    (model / "config.json").write_text("{")
    with pytest.raises(CorruptSource, match=r"config\.json is no JSON"):
        check_model(model)


def test_only_the_weights_that_are_compiled_are_checked(tmp_path: Path, tiny_source: Path) -> None:
    model = Path(shutil.copytree(tiny_source, tmp_path / "model"))
    (model / "consolidated.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    (model / "model-00001-of-00002.safetensors").symlink_to(model / "nowhere")
    check_model(model)
    shard = model / "model-00002-of-00002.safetensors"
    (model / "model.safetensors").rename(shard)
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": shard.name}}))
    check_model(model)
    index.write_text(json.dumps({"weight_map": {"a": shard.name, "b": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(CorruptSource, match=r"model-00001-of-00002\.safetensors is missing"):
        check_model(model)
    os.truncate(shard, shard.stat().st_size - 1)
    index.write_text(json.dumps({"weight_map": {"a": shard.name}}))
    with pytest.raises(CorruptSource, match="is truncated"):
        check_model(model)


def test_a_damaged_artifact_is_refused(tmp_path: Path, tiny_artifact: Path) -> None:
    model = Path(shutil.copytree(tiny_artifact, tmp_path / "a.radixlm"))
    os.truncate(model / "weights.safetensors", 5000)
    with pytest.raises(CorruptArtifact, match=r"weights\.safetensors"):
        check_model(model)


def test_a_folder_of_models_is_answered_with_their_names(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFound, match="is no model: it has no config"):
        check_model(tmp_path)
    for name in ("mmproj-a.gguf", "notes.txt", *(f"{letter}.gguf" for letter in "gfedcba")):
        (tmp_path / name).touch()
    with pytest.raises(SourceNotFound) as refused:
        check_model(tmp_path)
    said = str(refused.value)
    assert f"such as {tmp_path}/a.gguf" in said and f"radixlm serve --models {tmp_path} " in said
    assert "a.gguf, b.gguf, c.gguf, d.gguf, e.gguf and 2 more" in said
    (tmp_path / "config.json").write_text(json.dumps({}))
    assert len(models_in(tmp_path)) == 7
