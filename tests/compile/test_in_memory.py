"""An artifact in memory is the artifact on disk: same files, same digests, and a writer that copies it there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest
from radixlm.compile import compile_model, in_memory
from radixlm.compile.in_memory import InMemory, write_to_disk
from radixlm.compile.publish import unpublished_directory
from radixlm.runtime.artifact import MANIFEST, WEIGHTS, Artifact
from radixlm.runtime.errors import CompileError
from radixlm.runtime.model.memory import map_weights


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "tiny.radixlm"


@pytest.fixture
def place(output: Path) -> Iterator[InMemory]:
    descriptor = os.memfd_create("weights")
    yield InMemory(unpublished_directory(output), descriptor, limit_bytes=1 << 30)
    os.close(descriptor)


def test_it_is_the_artifact_that_a_compile_to_disk_writes(
    tiny_source: Path, output: Path, place: InMemory, tmp_path: Path
) -> None:
    report = compile_model(tiny_source, output, quantize="q4", name="tiny", in_memory=place)
    assert report.path == place.directory and place.is_used and not output.exists()
    on_disk = compile_model(tiny_source, tmp_path / "disk.radixlm", quantize="q4", name="tiny").path
    assert (place.directory / MANIFEST).read_bytes() == (on_disk / MANIFEST).read_bytes()
    artifact = Artifact.open(place.directory)
    artifact.verify()
    assert artifact.is_in_memory and not Artifact.open(on_disk).is_in_memory
    np.testing.assert_array_equal(map_weights(artifact), map_weights(Artifact.open(on_disk)))

    write_to_disk(place.directory, output)
    assert {path.name: path.read_bytes() for path in output.iterdir()} == {
        path.name: path.read_bytes() for path in on_disk.iterdir()
    }
    assert not (output / WEIGHTS).is_symlink()
    np.testing.assert_array_equal(map_weights(artifact), map_weights(Artifact.open(output)))  # still there


def test_weights_beyond_the_limit_are_published(tiny_source: Path, output: Path) -> None:
    descriptor = os.memfd_create("weights")
    place = InMemory(unpublished_directory(output), descriptor, limit_bytes=1000)
    assert compile_model(tiny_source, output, quantize="q4", in_memory=place).path == output
    assert not place.is_used and list(place.directory.iterdir()) == []
    assert os.fstat(descriptor).st_size == 0
    assert not Artifact.open(output).is_in_memory
    os.close(descriptor)


def test_a_full_disk_is_told_and_left_as_it_was(
    tiny_source: Path,
    output: Path,
    place: InMemory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    full = shutil.disk_usage("/")._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    compile_model(tiny_source, output, quantize="q4", in_memory=place)
    with pytest.raises(CompileError, match="MB free"):
        write_to_disk(place.directory, output)
    assert [path for path in output.parent.iterdir() if path != place.directory] == []

    lock = output.with_suffix(".lock")
    lock.touch()
    monkeypatch.setattr(in_memory, "be_idle", lambda: None)
    _, writer = os.pipe()
    in_memory.main(str(place.directory), str(output), str(lock), str(writer))
    assert "not kept, so that the next start compiles again" in capsys.readouterr().err
    assert not lock.exists()


def test_a_copy_that_differs_is_not_published(
    tiny_source: Path, output: Path, place: InMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_model(tiny_source, output, quantize="q4", in_memory=place)

    def broken(weights: BinaryIO, destination: Path) -> None:
        data = bytearray(weights.read())
        data[-1000] ^= 1
        destination.write_bytes(data)

    monkeypatch.setattr(in_memory, "_copy_slowly", broken)
    with pytest.raises(Exception, match="sha256"):
        write_to_disk(place.directory, output)
    assert not output.exists()
