"""An artifact in memory is the artifact on disk: same files, same digests; and it is written there meanwhile."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
from radixlm.compile import compile_model, compiler, in_memory
from radixlm.compile.compiler import CompileOptions, FreshArtifact, fresh_artifact
from radixlm.compile.in_memory import KEPT, NOT_KEPT, READY, WRONG, InMemory, keep
from radixlm.compile.publish import unpublished_directory
from radixlm.compile.verification import Verification
from radixlm.runtime.artifact import MANIFEST, WEIGHTS, Artifact
from radixlm.runtime.errors import VerificationFailed
from radixlm.runtime.model.memory import map_weights

Statuses = Callable[[Callable[[], object]], list[str]]
OPTIONS = CompileOptions(quantize="q4", name="tiny")


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "tiny.radixlm"


@pytest.fixture
def place(output: Path) -> Iterator[InMemory]:
    descriptor = os.memfd_create("weights")
    yield InMemory(unpublished_directory(output), descriptor, limit_bytes=1 << 30)
    os.close(descriptor)


@pytest.fixture
def fresh(tiny_source: Path, output: Path, place: InMemory) -> Iterator[FreshArtifact]:
    with fresh_artifact(tiny_source, output, OPTIONS, in_memory=place) as fresh:
        yield fresh


@pytest.fixture
def statuses(place: InMemory, output: Path, monkeypatch: pytest.MonkeyPatch) -> Statuses:
    """Keep the artifact, and return what the parent is told; the lock is gone then."""
    monkeypatch.setattr(in_memory, "be_idle", lambda: None)
    monkeypatch.setattr(in_memory, "_close_stderr", lambda: None)

    def statuses(check_weights: Callable[[], object]) -> list[str]:
        lock = output.with_suffix(".lock")
        lock.touch()
        reader, writer = os.pipe()
        keep(place, output, check_weights, status_fd=writer, lock=lock)
        os.close(writer)
        assert not lock.exists()
        with os.fdopen(reader) as lines:
            return lines.read().splitlines()

    return statuses


def test_it_is_the_artifact_that_a_compile_to_disk_writes(
    tiny_source: Path,
    output: Path,
    place: InMemory,
    fresh: FreshArtifact,
    statuses: Statuses,
    tmp_path: Path,
) -> None:
    assert fresh.is_in_memory and place.is_used and not output.exists()
    on_disk = compile_model(tiny_source, tmp_path / "disk.radixlm", quantize="q4", name="tiny").path
    assert (place.directory / MANIFEST).read_bytes() == (on_disk / MANIFEST).read_bytes()
    artifact = Artifact.open(place.directory)
    artifact.verify()
    assert artifact.is_in_memory and not Artifact.open(on_disk).is_in_memory
    np.testing.assert_array_equal(map_weights(artifact), map_weights(Artifact.open(on_disk)))

    assert statuses(fresh.check_weights) == [READY, f"{KEPT} in {output}; the next start takes it from there"]
    assert {path.name: path.read_bytes() for path in output.iterdir()} == {
        path.name: path.read_bytes() for path in on_disk.iterdir()
    }
    assert not (output / WEIGHTS).is_symlink()
    np.testing.assert_array_equal(map_weights(artifact), map_weights(Artifact.open(output)))  # still there


def test_it_can_be_opened_while_its_logits_are_compared(
    tiny_source: Path, output: Path, place: InMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = list[str]()
    real = compiler.check_logits

    def check(*arguments: Any) -> Verification:
        said.append("check")
        return real(*arguments)

    def written() -> None:
        said.append(Artifact.open(place.directory).manifest.name)

    monkeypatch.setattr(compiler, "check_logits", check)
    with fresh_artifact(tiny_source, output, OPTIONS, in_memory=replace(place, written=written)) as fresh:
        assert fresh.is_in_memory and said == ["tiny", "check"]


def test_weights_beyond_the_limit_are_published(tiny_source: Path, output: Path) -> None:
    descriptor = os.memfd_create("weights")
    place = InMemory(unpublished_directory(output), descriptor, limit_bytes=1000)
    with fresh_artifact(tiny_source, output, OPTIONS, in_memory=place) as fresh:
        assert not fresh.is_in_memory
        assert fresh.publish().path == output
    assert not place.is_used and list(place.directory.iterdir()) == []
    assert os.fstat(descriptor).st_size == 0
    assert not Artifact.open(output).is_in_memory
    os.close(descriptor)


def test_a_wrong_weight_is_found_once_the_artifact_is_used(
    output: Path, place: InMemory, fresh: FreshArtifact, statuses: Statuses
) -> None:
    half = fresh.artifact.manifest.module.weights_bytes // 2
    os.pwrite(place.weights_fd, bytes([37]) * half, fresh.artifact.data_offset())
    ready, wrong = statuses(fresh.check_weights)
    assert ready == READY
    assert wrong.startswith(f"{WRONG} model.") and "differs from the source" in wrong
    _only_in_memory(output, place)


def test_a_full_disk_is_told_and_left_as_it_was(
    output: Path,
    place: InMemory,
    fresh: FreshArtifact,
    statuses: Statuses,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    full = shutil.disk_usage("/")._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    ready, kept = statuses(fresh.check_weights)
    assert ready == READY
    assert kept.startswith(f"{NOT_KEPT} so that the next start compiles again: ") and "MB free" in kept
    _only_in_memory(output, place)


def test_weights_are_compared_even_if_the_disk_is_full(
    fresh: FreshArtifact,
    statuses: Statuses,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    full = shutil.disk_usage("/")._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)

    def differ() -> None:
        raise VerificationFailed("a row differs")

    assert statuses(differ) == [READY, f"{WRONG} a row differs"]


def test_a_copy_that_differs_is_not_published(
    output: Path,
    place: InMemory,
    fresh: FreshArtifact,
    statuses: Statuses,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(weights: BinaryIO, destination: Path) -> None:
        data = bytearray(weights.read())
        data[-1000] ^= 1
        destination.write_bytes(data)

    monkeypatch.setattr(in_memory, "_copy_slowly", broken)
    kept = statuses(fresh.check_weights)[-1]
    assert kept.startswith(NOT_KEPT) and "sha256" in kept
    _only_in_memory(output, place)


def _only_in_memory(output: Path, place: InMemory) -> None:
    assert [path for path in output.parent.iterdir() if path != place.directory] == []
