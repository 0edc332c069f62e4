"""Errors of the output and of its disk are told before an artifact is published."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from radixlm.compile import publish
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
