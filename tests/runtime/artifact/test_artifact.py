"""Every way in which an artifact can be wrong is one typed line, and nothing worse."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from radixlm.runtime.artifact import Artifact, write_manifest
from radixlm.runtime.artifact import directory as artifact_module
from radixlm.runtime.artifact.manifest import FileInfo, Manifest
from radixlm.runtime.errors import (
    ArtifactError,
    ArtifactNotFound,
    CorruptArtifact,
    UnsupportedArtifact,
    UnsupportedCPU,
)

FILES = ("model.so", "weights.safetensors", "tokenizer.json", "chat_template.jinja")


@pytest.fixture
def copy(tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An artifact to break, and a memory of checked weights that is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Path(shutil.copytree(tiny_artifact, tmp_path / "copy.radixlm"))


def test_what_was_compiled_opens_and_verifies(copy: Path) -> None:
    artifact = Artifact.open(copy)
    artifact.verify()
    assert json.loads(artifact.tokenizer_json)["model"]["type"] == "BPE"
    assert artifact.chat_template is not None
    assert artifact.data_offset() % 64 == 0


def test_an_artifact_may_lack_a_chat_template(copy: Path) -> None:
    (copy / "chat_template.jinja").unlink()
    _reseal(copy)
    assert Artifact.open(copy).chat_template is None


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: None, "none.radixlm does not exist"),
        (lambda path: path.mkdir(), "is not an artifact"),
        (lambda path: path.touch(), "is not an artifact"),
    ],
)
def test_no_artifact_is_said_so(tmp_path: Path, make: Callable[[Path], None], says: str) -> None:
    path = tmp_path / "none.radixlm"
    make(path)
    assert says in _refusal(path, ArtifactNotFound)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(copy: Path, name: str) -> None:
    (copy / name).unlink()
    assert name in _refusal(copy, CorruptArtifact)


@pytest.mark.parametrize("name", FILES)
def test_a_directory_in_place_of_a_file_is_named(copy: Path, name: str) -> None:
    (copy / name).unlink()
    (copy / name).mkdir()
    assert f"{name} is no file" in _refusal(copy, CorruptArtifact)


def test_a_pipe_in_place_of_a_file_is_not_waited_for(copy: Path) -> None:
    (copy / "tokenizer.json").unlink()
    os.mkfifo(copy / "tokenizer.json")
    assert "tokenizer.json is no file" in _refusal(copy, CorruptArtifact)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("change", [-1, 1])
def test_a_truncated_or_longer_file_is_named_with_both_sizes(copy: Path, name: str, change: int) -> None:
    size = (copy / name).stat().st_size
    os.truncate(copy / name, size + change)
    message = _refusal(copy, CorruptArtifact)
    assert f"{name} has {size + change} bytes, the manifest says {size}" in message


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("where", [0.0, 0.5, 1.0])
def test_one_flipped_bit_is_found(copy: Path, name: str, where: float) -> None:
    _flip(copy / name, where)
    assert f"{name} has sha256" in _refusal(copy, CorruptArtifact)


def test_no_byte_of_the_manifest_may_change(copy: Path) -> None:
    """A digit of max_num_tokens or context_length would else write beyond the workspace."""
    file = copy / "manifest.json"
    original = file.read_bytes()
    for at in [*range(0, len(original), 97), original.index(b'"context_length": ') + 19, len(original) - 1]:
        changed = bytearray(original)
        changed[at] ^= 1
        file.write_bytes(changed)
        _refusal(copy, ArtifactError)
    file.write_bytes(original)
    Artifact.open(copy)


def test_a_changed_limit_is_a_wrong_digest(copy: Path) -> None:
    file = copy / "manifest.json"
    file.write_text(file.read_text().replace('"max_num_tokens": 512', '"max_num_tokens": 513'))
    assert "of itself" in _refusal(copy, CorruptArtifact)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"null",
        b"[]",
        b"{",
        b"{}",
        b"\xff\xfe",
        b"\0" * 100,
        b'{"format_version": 5}',
        b'{"format_version": 5, "name": NaN}',
        b'{"format_version": 5, "name": "\xff"}',
        b'{"format_version": 5, "model": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"format_version": 5, "model": ' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"format_version": 5, "x": ' * 50_000,
        '{"format_version": 5}'.encode("utf-16"),
    ],
)
def test_what_is_no_manifest_is_corrupt(copy: Path, text: bytes) -> None:
    (copy / "manifest.json").write_bytes(text)
    assert "manifest.json is not" in _refusal(copy, CorruptArtifact)


def test_a_tokenizer_profile_nested_beyond_reason_is_corrupt(copy: Path) -> None:
    fields = json.loads((copy / "manifest.json").read_text())
    fields["tokenizer"]["profile"] = {"x": "DEEP"}
    for depth in (500, 900, 5_000, 100_000):
        deep = "[" * depth + "]" * depth
        (copy / "manifest.json").write_text(json.dumps(fields).replace('"DEEP"', deep))
        _refusal(copy, CorruptArtifact)


def test_a_manifest_too_large_to_be_one_is_not_read(copy: Path) -> None:
    os.truncate(copy / "manifest.json", 1 << 40)
    assert "are allowed" in _refusal(copy, CorruptArtifact)


@pytest.mark.parametrize("version", [0, 1, 4, 6, -1, 1.5, "5", True, None, [], "9" * 100_000])
def test_another_format_version_is_unsupported(copy: Path, version: object) -> None:
    _edit(copy, lambda fields: fields | {"format_version": version})
    message = _refusal(copy, UnsupportedArtifact)
    assert "this radixlm reads 5" in message
    assert len(message) < 400


@pytest.mark.parametrize("change", [{"context_length": 8}, {"extra": 1}, {"kv": None}])
def test_a_manifest_with_a_wrong_field_is_corrupt(copy: Path, change: dict[str, object]) -> None:
    _edit(copy, lambda fields: fields | change)
    assert "manifest.json is not valid" in _refusal(copy, CorruptArtifact)


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "x/../model.so", "extra.bin", "", ".", "manifest.json", "a\nb"]
)
def test_no_other_file_may_be_listed(copy: Path, name: str) -> None:
    info = FileInfo(size=0, sha256=hashlib.sha256(b"").hexdigest())
    _rewrite(copy, lambda manifest: manifest.files | {name: info})
    assert "an artifact has model.so" in _refusal(copy, CorruptArtifact)


@pytest.mark.parametrize("name", FILES[:3])
def test_every_file_that_runs_must_be_listed(copy: Path, name: str) -> None:
    _rewrite(copy, lambda manifest: {key: info for key, info in manifest.files.items() if key != name})
    assert "an artifact has model.so" in _refusal(copy, CorruptArtifact)


def test_a_file_that_the_manifest_does_not_list_is_never_read(copy: Path) -> None:
    (copy / "chat_template.jinja").write_text("mine")
    _rewrite(copy, lambda manifest: {key: info for key, info in manifest.files.items() if key != "chat_template.jinja"})
    (copy / "notes.txt").write_text("mine too")
    assert Artifact.open(copy).chat_template is None


@pytest.mark.parametrize("length", [0, 1, 56, 1 << 20, 1 << 40, (1 << 64) - 1])
def test_weights_that_lie_about_their_header_are_corrupt(copy: Path, length: int) -> None:
    with (copy / "weights.safetensors").open("r+b") as file:
        file.write(struct.pack("<Q", length))
    _reseal(copy)
    assert f"a header of {length} bytes" in _refusal(copy, CorruptArtifact)


@pytest.mark.parametrize("size", [0, 7, 64])
def test_weights_too_short_for_what_the_module_needs_are_corrupt(copy: Path, size: int) -> None:
    os.truncate(copy / "weights.safetensors", size)
    _reseal(copy)
    assert "bytes of weights" in _refusal(copy, CorruptArtifact)


def test_text_that_is_no_utf8_is_corrupt(copy: Path) -> None:
    (copy / "chat_template.jinja").write_bytes(b"\xff")
    _reseal(copy)
    with pytest.raises(CorruptArtifact, match="cannot be read"):
        _ = Artifact.open(copy).chat_template


def test_verify_reads_the_weights_although_they_are_remembered(copy: Path) -> None:
    artifact = Artifact.open(copy)
    status = artifact.weights_path.stat()
    _flip(artifact.weights_path, 0.5)
    os.utime(artifact.weights_path, ns=(status.st_atime_ns, status.st_mtime_ns))
    Artifact.open(copy)  # same inode, size and time: not read again
    with pytest.raises(CorruptArtifact, match=r"weights\.safetensors has sha256"):
        artifact.verify()


def test_weights_are_read_once_until_they_change(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    sha256_of = artifact_module.sha256_of

    def counting(path: Path) -> str:
        read.append(path.name)
        return sha256_of(path)

    monkeypatch.setattr(artifact_module, "sha256_of", counting)
    weights = copy / "weights.safetensors"

    def reads() -> int:
        read.clear()
        Artifact.open(copy)
        return read.count(weights.name)

    assert [reads(), reads()] == [1, 0]
    os.utime(weights)  # another time
    assert [reads(), reads()] == [1, 0]
    shutil.copy2(weights, copy / "new")
    os.replace(copy / "new", weights)  # the same bytes and time, another inode
    assert [reads(), reads()] == [1, 0]


def test_weights_are_read_each_time_where_nothing_can_be_remembered(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    Artifact.open(copy)
    _flip(copy / "weights.safetensors", 0.5)
    _refusal(copy, CorruptArtifact)


def test_a_damaged_memory_of_checked_weights_is_no_trouble(copy: Path, tmp_path: Path) -> None:
    Artifact.open(copy)
    for memory in (tmp_path / "cache").rglob("*"):
        if memory.is_file():
            memory.write_bytes(b"\xff\xfe")
    Artifact.open(copy)


def test_a_feature_that_no_cpu_has_is_refused_with_what_to_do(copy: Path) -> None:
    manifest = Artifact.open(copy).manifest
    target = msgspec.structs.replace(manifest.target, name="x86-64-v9", features=("sse3", "avx9000"))
    write_manifest(copy, msgspec.structs.replace(manifest, target=target))
    with pytest.raises(UnsupportedCPU, match=r"compiled for x86-64-v9, .* lacks (sse3, )?avx9000; .*--target x86-64"):
        Artifact.open(copy).check_cpu()


def _refusal(path: Path, kind: type[ArtifactError]) -> str:
    """The one line that opening says."""
    with pytest.raises(kind) as caught:
        Artifact.open(path)
    message = str(caught.value)
    assert message
    assert "\n" not in message
    return message


def _flip(path: Path, where: float) -> None:
    """Flip one bit at a fraction of the file's length."""
    data = bytearray(path.read_bytes())
    data[int(where * (len(data) - 1))] ^= 1
    path.write_bytes(data)


def _edit(path: Path, change: Callable[[dict[str, object]], dict[str, object]]) -> None:
    """Change the manifest as JSON, and nothing else."""
    file = path / "manifest.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))


def _rewrite(path: Path, files: Callable[[Manifest], dict[str, FileInfo]]) -> None:
    """Write a manifest with other `files` and the right digest of itself."""
    manifest = msgspec.json.decode((path / "manifest.json").read_bytes(), type=Manifest)
    write_manifest(path, msgspec.structs.replace(manifest, files=files(manifest)))


def _reseal(path: Path) -> None:
    """Describe the files that are there now."""
    found = {name: (path / name).read_bytes() for name in FILES if (path / name).exists()}
    infos = {name: FileInfo(size=len(data), sha256=hashlib.sha256(data).hexdigest()) for name, data in found.items()}
    _rewrite(path, lambda manifest: infos)
