"""What a machine lacks is found before the compiler is loaded, and said with what to do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from radixlm.compile import preflight
from radixlm.compile.preflight import check_ready, check_space, least_bytes
from radixlm.runtime.errors import CompileError

MB = 1_000_000


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A file of 1 GB, all holes."""
    path = tmp_path / "model.gguf"
    path.touch()
    os.truncate(path, 1000 * MB)
    return path


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A disk with 400 MB free; tests change that."""
    usage = SimpleNamespace(free=400 * MB)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda directory: usage)
    return usage


def test_a_disk_that_is_too_full_is_known_from_the_size_of_the_source(
    source: Path, disk: SimpleNamespace, tmp_path: Path
) -> None:
    with pytest.raises(CompileError, match=r"400 MB free, the artifact needs at least 517 MB; make room, or choose"):
        check_ready(source, tmp_path / "model.radixlm", "keep")
    check_ready(source, tmp_path / "model.radixlm", "q4")  # a seventh of float32
    disk.free = 520 * MB
    check_ready(source, tmp_path / "model.radixlm", "keep")


def test_the_exact_size_is_compared_once_it_is_known(disk: SimpleNamespace, tmp_path: Path) -> None:
    check_space(tmp_path, 380 * MB)
    with pytest.raises(CompileError, match=r"400 MB free, the artifact needs 407 MB;"):
        check_space(tmp_path, 390 * MB)


def test_the_largest_file_of_a_directory_is_its_size(tmp_path: Path) -> None:
    """Shards and the whole, or two formats of the same weights, may be in one directory."""
    for name, size in (("model.safetensors", 8), ("pytorch_model.bin", 10), ("README.md", 90)):
        (tmp_path / name).write_bytes(b" " * size)
    assert least_bytes(tmp_path, "keep") == 5
    assert least_bytes(Path("hf:org/name"), "keep") == least_bytes(Path("smollm2"), "keep") == 0


def test_a_folder_that_cannot_be_written_is_said(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mkdtemp(**options: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.mkdtemp", mkdtemp)
    with pytest.raises(CompileError, match=r"cannot be written \(Permission denied\); choose another folder with -o"):
        check_ready(source, tmp_path / "model.radixlm", "keep")


def test_checks_leave_nothing(source: Path, tmp_path: Path) -> None:
    check_ready(source, tmp_path / "model.radixlm", "keep")
    assert list(tmp_path.iterdir()) == [source]


def test_the_beginning_of_a_model_is_read_ahead_in_the_format_that_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[tuple[str, int, int]] = []

    def advise(file: int, start: int, size: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        read.append((Path(os.readlink(f"/proc/self/fd/{file}")).name, start, size))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    monkeypatch.setattr(preflight, "_READ_AHEAD_BYTES", 25)
    for name in ("model.bin", "a.safetensors", "b.safetensors", "c.safetensors", "d.safetensors"):
        (tmp_path / name).write_bytes(bytes(10))
    (tmp_path / "b.safetensors").write_bytes(b"")
    for source in (tmp_path, tmp_path / "model.bin", tmp_path / "nowhere"):
        preflight.read_ahead(source).join()
    assert read == [("a.safetensors", 0, 10), ("c.safetensors", 0, 10), ("d.safetensors", 0, 5), ("model.bin", 0, 10)]


def test_the_command_says_it_before_it_loads_the_compiler(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "nowhere/model.radixlm"
    code = (
        "import sys\nfrom radixlm.cli.main import cli\n"
        f"try: cli({['compile', str(source), '-o', str(output)]!r})\nexcept SystemExit as end: print(end.code)\n"
        "print([name for name in ('tvm', 'radixlm.compile.compiler') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["2", "[]"]
    [line] = done.stderr.splitlines()
    assert line.startswith("Error: ") and "is no directory" in line


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root mounts a file system")
def test_a_small_disk_is_full(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mount = shutil.which("mount")
    if mount is None or subprocess.run([mount, "-t", "tmpfs", "-o", "size=1m", "tmpfs", small]).returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        with pytest.raises(CompileError, match=r"has 1 MB free, the artifact needs at least 17 MB"):
            check_ready("smollm2", small / "model.radixlm", "keep")
    finally:
        subprocess.run(["umount", small], check=True)
