"""Errors of the output and of its disk are told before an artifact is published."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest
from radixlm.compile import publish
from radixlm.runtime.artifact import MANIFEST
from radixlm.runtime.errors import InvalidParameter


def test_an_error_that_the_system_tells_once_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "_WRITE_BACK_S", 0.001)
    failed = list[int]()

    def fdatasync(file: int) -> None:
        failed.append(file)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    with (tmp_path / "weights").open("wb") as file, publish.written_back(file.fileno()) as wait_for_disk:
        file.write(b"weights")
        while not failed:
            time.sleep(0.001)
        with pytest.raises(OSError, match="Input/output error"):
            wait_for_disk()


@pytest.mark.parametrize("name", ["", ".", "/"])
def test_an_output_without_a_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidParameter, match="is no name of an artifact; give one such as"):
        publish.check_output(Path(name))


def test_a_name_that_no_file_system_takes_is_refused(tmp_path: Path) -> None:
    publish.check_output(tmp_path / ("x" * 241))
    with pytest.raises(InvalidParameter, match=r"has more than 241 bytes; give a shorter -o"):
        publish.check_output(tmp_path / ("x" * 242))
    with publish.unpublished(tmp_path / ("x" * 241)) as directory:
        assert directory.is_dir()


def artifact_at(path: Path, text: str) -> Path:
    path.mkdir()
    for name in (MANIFEST, "weights"):
        (path / name).write_text(text)
    return path


def texts_of(path: Path) -> set[str]:
    return {file.read_text() for file in path.iterdir()}


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()])
def test_an_artifact_stays_if_the_new_one_cannot_take_its_place(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = artifact_at(tmp_path / "model.radixlm", "old")
    new = artifact_at(tmp_path / "new", "new")
    calls, rename = list[Path](), os.rename

    def failing(before: Path, after: Path) -> None:
        calls.append(after)
        if len(calls) == 2:
            raise error
        rename(before, after)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(type(error)):
        publish.publish(new, output)
    assert texts_of(output) == {"old"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.radixlm", "new"]


@pytest.mark.parametrize("exists", [True, False])
def test_the_last_of_two_compiles_with_one_output_stays(
    exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "model.radixlm"
    if exists:
        artifact_at(output, "old")
    first, last = (artifact_at(tmp_path / name, name) for name in ("first", "last"))
    calls, rename = list[Path](), os.rename

    def overtaken(before: Path, after: Path) -> None:
        calls.append(after)
        if before == last and len(calls) <= 2:
            publish.publish(first, output)
        rename(before, after)

    monkeypatch.setattr(os, "rename", overtaken)
    publish.publish(last, output)
    assert texts_of(output) == {"last"}
    assert [path.name for path in tmp_path.iterdir()] == ["model.radixlm"]


def test_an_artifact_that_another_compile_has_just_moved_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = artifact_at(tmp_path / "model.radixlm", "old")
    new = artifact_at(tmp_path / "new", "new")
    calls, rename = list[Path](), os.rename

    def without_output(before: Path, after: Path) -> None:
        calls.append(after)
        if len(calls) == 1:
            rename(output, tmp_path / "moved")
        rename(before, after)

    monkeypatch.setattr(os, "rename", without_output)
    publish.publish(new, output)
    assert texts_of(output) == {"new"}


def test_an_error_that_lasts_is_raised(tmp_path: Path) -> None:
    output = artifact_at(tmp_path / "model.radixlm", "old")
    with pytest.raises(FileNotFoundError):
        publish.publish(tmp_path / "missing", output)
    assert texts_of(output) == {"old"}
