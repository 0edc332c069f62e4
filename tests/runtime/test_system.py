"""What the operating system offers, here and where calls of Linux's are missing."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from radixlm.runtime import system

SIZES = st.lists(st.integers(0, 40), max_size=5)
IS_IMITATION = sys.platform == "linux" and hasattr(sys.modules.get("sitecustomize"), "imitate")  # in `make test-macos`
IS_MACOS = IS_IMITATION or sys.platform == "darwin"


@pytest.fixture(params=[True, False], ids=["vectors", "one by one"])
def calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        for name in ("preadv", "pwritev"):
            monkeypatch.delattr(os, name, raising=False)


@pytest.fixture
def like_macos(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, object]]]:
    """Without Linux's calls on files; gives the commands that `fcntl` gets."""
    asked: list[tuple[int, object]] = []

    def control(fd: int, command: int, argument: object = 0) -> int:
        asked.append((command, argument))
        return 0

    for name in ("posix_fadvise", "fdatasync", "memfd_create"):
        monkeypatch.delattr(os, name, raising=False)
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", control)
    yield asked


@pytest.mark.usefixtures("calls")
@given(data=st.binary(max_size=120), sizes=SIZES, offset=st.integers(0, 140))
def test_reads_fill_buffers_as_slices_do(data: bytes, sizes: list[int], offset: int) -> None:
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        buffers = [bytearray(size) for size in sizes]
        count = system.read_at(file.fileno(), buffers, offset)
        assert count == min(sum(sizes), max(0, len(data) - offset))
        assert b"".join(buffers)[:count] == data[offset : offset + count]


@pytest.mark.usefixtures("calls")
@given(before=st.binary(max_size=120), pieces=st.lists(st.binary(max_size=40), max_size=5), offset=st.integers(0, 140))
def test_writes_change_files_as_slices_do(before: bytes, pieces: list[bytes], offset: int) -> None:
    written = b"".join(pieces)
    expected = bytearray(before.ljust(offset, b"\0")) if written else bytearray(before)
    expected[offset : offset + len(written)] = written
    with tempfile.TemporaryFile() as file:
        file.write(before)
        file.flush()
        assert system.write_at(file.fileno(), pieces, offset) == len(written)
        file.seek(0)
        assert file.read() == expected


def test_a_disk_that_fills_between_two_buffers_has_taken_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def pwrite(fd: int, data: bytes, offset: int) -> int:
        if offset >= 4:
            raise OSError("the disk is full")
        return len(data)

    monkeypatch.delattr(os, "pwritev", raising=False)
    monkeypatch.setattr(os, "pwrite", pwrite)
    assert system.write_at(0, [b"1234", b"5678"], 0) == 4
    with pytest.raises(OSError, match="full"):
        system.write_at(0, [b"5678"], 4)


def test_macos_is_asked_to_empty_the_disks_own_cache(like_macos: list[tuple[int, object]]) -> None:
    with tempfile.TemporaryFile() as file:
        system.sync_file(file.fileno())
        system.sync_data(file.fileno())
        system.write_back(file.fileno())
    assert like_macos == [(51, 0), (51, 0)]


def test_a_file_system_that_cannot_do_so_is_synced_as_usual(
    like_macos: list[tuple[int, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, command: int) -> int:
        raise OSError("not supported")

    synced: list[int] = []
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    monkeypatch.setattr(os, "fsync", synced.append)
    system.sync_data(7)
    assert synced == [7]


def test_macos_reads_ahead_what_is_expected(like_macos: list[tuple[int, object]]) -> None:
    system.expect_reads(0, 4096, 100)
    system.expect_reads(0, 1 << 33, 1 << 33)
    system.expect_scattered_reads(0)
    system.drop_cached(0, 0, 100)
    assert system.memory_file("weights") is None
    advice = [struct.pack("@qii", 4096, 100, 0), struct.pack("@qii", 1 << 33, (1 << 31) - 1, 0)]
    assert like_macos == [(44, advice[0]), (44, advice[1]), (45, 0)]


def test_processors_are_counted_without_an_affinity_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert system.num_processors() == 8
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert system.num_processors() == 1


@pytest.mark.parametrize(
    ("files", "available"),
    [
        ({}, 400 << 20),
        ({"memory.max": "max\n", "memory.current": "5\n"}, 400 << 20),
        ({"memory.max": f"{300 << 20}\n", "memory.current": f"{100 << 20}\n"}, 200 << 20),
        (
            {
                "memory.max": f"{300 << 20}\n",
                "memory.current": f"{100 << 20}\n",
                "memory.stat": f"anon 1\nactive_file {10 << 20}\ninactive_file {20 << 20}\n",
            },
            230 << 20,
        ),
        ({"memory.max": "100\n", "memory.current": "200\n"}, 0),
    ],
)
def test_memory_is_what_the_kernel_estimates_within_the_groups_limit(
    files: dict[str, str], available: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {400 << 10} kB\n")
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(system, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(system, "_CGROUP", tmp_path)
    assert system.available_memory_bytes() == available


def test_memory_of_a_machine_is_at_least_what_is_available() -> None:
    assert 1 << 27 < system.available_memory_bytes() <= system.total_memory_bytes()


def test_numa_nodes_are_counted_where_the_system_names_them(tmp_path: Path) -> None:
    assert system.num_numa_nodes(tmp_path) == 1
    for name in ("node0", "node1", "node10", "possible"):
        (tmp_path / "sys/devices/system/node" / name).mkdir(parents=True)
    assert system.num_numa_nodes(tmp_path) == 3


def test_the_memory_of_a_process_grows_by_what_it_takes() -> None:
    program = "import sys; sys.stdin.readline(); x = bytearray(b'1') * (64 << 20); print(flush=True); sys.stdin.read()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        before = system.process_memory_bytes(process.pid)
        print(file=process.stdin, flush=True)
        process.stdout.readline()
        after = system.process_memory_bytes(process.pid)
        process.stdin.close()
    assert before is not None and after is not None and 60 << 20 <= after - before <= 90 << 20
    assert system.process_memory_bytes(process.pid) is None  # it has ended


@pytest.mark.skipif(IS_MACOS, reason="macOS does not limit the address space")
def test_memory_beyond_the_limit_is_refused() -> None:
    program = (
        "from radixlm.runtime.system import limit_address_space as limit; limit(64 << 20)\n"
        "x = bytearray(16 << 20)\ntry: bytearray(256 << 20)\nexcept MemoryError: print('refused')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "refused\n"


def test_pages_are_mapped_and_keep_what_they_hold(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(bytes(range(256)) * 256)
    with (tmp_path / "weights").open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    system.use_huge_pages(address + 64, 40_000)
    system.map_pages(address + 64, 40_000)  # older kernels do not
    assert bytes(memory) == bytes(range(256)) * 256
    assert not system.map_pages(0, 4096)  # no memory is there


def test_an_idle_process_goes_on_and_gives_way() -> None:
    program = "import os; from radixlm.runtime import system; system.be_idle(); print(os.nice(0))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "19\n"


def test_only_macos_has_values_by_name() -> None:
    assert (system.sysctl("hw.memsize") is not None) == IS_MACOS
    assert system.sysctl("hw.no_such_name") is None


@pytest.mark.skipif(not IS_IMITATION, reason="make test-macos runs it")
def test_the_imitation_lacks_what_is_linux_alone() -> None:
    assert not hasattr(os, "posix_fadvise") and not hasattr(os, "sched_getaffinity")
    assert not Path("/proc/self").exists() and not Path("/sys").is_dir()
    with pytest.raises(FileNotFoundError):
        open("/proc/meminfo").close()
    with pytest.raises(OSError, match="socket"), tempfile.TemporaryFile() as file, open(__file__, "rb") as source:
        os.sendfile(file.fileno(), source.fileno(), 0, 10)


class Stopped(Exception):
    """Stands for any error while a file is written."""


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    left = path.with_name(f"file.{os.getpid()}.new")
    left.write_bytes(b"of a killed process")
    left.chmod(0o644)
    with system.replaced(path, mode=0o600) as file:
        file.write(b"first")
        file.flush()
        assert not path.exists()
    assert path.read_bytes() == b"first" and path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(Stopped), system.replaced(path) as file:
        file.write(b"second")
        raise Stopped
    assert path.read_bytes() == b"first" and [*tmp_path.iterdir()] == [path]
    (tmp_path / "folder" / "full").mkdir(parents=True)
    with pytest.raises(OSError), system.replaced(tmp_path / "folder") as file:
        file.write(b"x")
    assert sorted(tmp_path.iterdir()) == [path, tmp_path / "folder"]


@pytest.mark.parametrize("is_synced", [True, False])
def test_a_file_is_on_disk_before_it_gets_its_name_and_its_name_after(
    is_synced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, calls = tmp_path / "file", list[object]()

    def synced(fd: int) -> None:
        calls.append(path.exists() and os.path.sameopenfile(fd, os.open(tmp_path, os.O_RDONLY)))
        calls.append(os.fstat(fd).st_size if not path.exists() else "directory")

    monkeypatch.setattr(system, "sync_file", synced)
    with system.replaced(path, is_synced=is_synced) as file:
        file.write(b"content")
    assert calls == ([False, 7, True, "directory"] if is_synced else [])
