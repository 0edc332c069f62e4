"""An error of the disk while weights are written is raised before the artifact is published."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from radixlm.compile import publish


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
