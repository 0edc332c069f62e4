"""The kernel cache: what was put comes back or is missing, whatever happens to the folder."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from radixlm.compile.codegen.kernel_cache import CacheStats, KernelCache

KEYS = [f"{number:032x}" for number in range(6)]


def test_an_object_comes_back_and_a_missing_one_is_none(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path / "kernels")
    assert cache.get(KEYS[0]) is None
    cache.put(KEYS[0], b"object")
    assert cache.get(KEYS[0]) == b"object"
    assert cache.get(KEYS[1]) is None


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "grow"])
def test_a_damaged_object_is_missing(tmp_path: Path, damage: str) -> None:
    cache = KernelCache(tmp_path)
    cache.put(KEYS[0], bytes(1000))
    [file] = tmp_path.iterdir()
    data = bytearray(file.read_bytes())
    if damage == "flip":
        data[500] ^= 1
    file.write_bytes({"flip": bytes(data), "truncate": data[:-1], "empty": b"", "grow": data + b"x"}[damage])
    assert cache.get(KEYS[0]) is None


operations = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sampled_from(KEYS), st.binary(max_size=64)),
        st.tuples(st.just("damage"), st.sampled_from(KEYS), st.integers(0, 40)),
        st.tuples(st.just("clear"), st.just(""), st.just(0)),
    ),
    max_size=20,
)


@settings(deadline=None)
@given(operations=operations)
def test_random_operations_agree_with_a_dict(
    tmp_path_factory: pytest.TempPathFactory, operations: list[tuple[str, str, bytes | int]]
) -> None:
    cache, expected = KernelCache(tmp_path_factory.mktemp("kernels")), dict[str, bytes]()
    for operation, key, value in operations:
        if operation == "put" and isinstance(value, bytes):
            cache.put(key, value)
            expected[key] = value
        elif operation == "damage" and isinstance(value, int) and key in expected:
            file = cache.directory / key
            data = bytearray(file.read_bytes())
            data[value % len(data)] ^= 0x10
            file.write_bytes(data)
            del expected[key]
        elif operation == "clear":
            assert cache.clear().num_objects >= len(expected)
            expected = {}
        assert {key: found for key in KEYS if (found := cache.get(key)) is not None} == expected


def test_pruning_removes_the_least_recently_used(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path, limit_bytes=2 * (32 + 100))
    for age, key in enumerate(KEYS[:4]):
        cache.put(key, bytes(100))
        os.utime(tmp_path / key, (then := time.time() - 10_000 * (age + 1), then))
    assert cache.get(KEYS[3]) is not None  # the oldest is used again
    assert cache.prune() == CacheStats(num_objects=2, num_bytes=2 * (32 + 100))
    assert [cache.get(key) is not None for key in KEYS[:4]] == [True, False, False, True]


def test_a_folder_is_pruned_once_an_hour(tmp_path: Path) -> None:
    """Each of thousands of builds listed the folder, which took the longer the more were done."""
    cache, nothing = KernelCache(tmp_path, limit_bytes=0), CacheStats(0, 0)
    pruned = []
    for age_s in (None, 10, 5000, -5000):  # the last is a clock that was set back
        cache.put(KEYS[0], b"object")
        if age_s is not None:
            os.utime(tmp_path / ".pruned", (then := time.time() - age_s, then))
        pruned.append(cache.prune_hourly() != nothing)
    assert pruned == [True, False, True, True]
    assert cache.clear() == cache.stats() == nothing


def test_files_of_killed_writers_are_removed_and_of_running_ones_are_not(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    (tmp_path / ".new-killed").write_bytes(b"half")
    (tmp_path / ".new-running").write_bytes(b"half")
    os.utime(tmp_path / ".new-killed", (0, 0))
    cache.prune()
    assert [file.name for file in tmp_path.iterdir()] == [".new-running"]
    assert cache.stats() == CacheStats(0, 0)


def test_a_folder_that_cannot_be_written_is_an_empty_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    cache = KernelCache(tmp_path / "file")
    cache.put(KEYS[0], b"object")
    assert cache.get(KEYS[0]) is None
    assert cache.stats() == cache.prune() == cache.clear() == CacheStats(0, 0)


def test_a_folder_that_became_read_only_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KernelCache(tmp_path, limit_bytes=0)
    cache.put(KEYS[0], b"object")
    (tmp_path / ".new-killed").write_bytes(b"half")
    os.utime(tmp_path / ".new-killed", (0, 0))

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(30, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", refuse)
    assert cache.prune() == CacheStats(0, 0)
    assert cache.get(KEYS[0]) == b"object"


def _hammer(directory: Path, seed: int) -> None:
    cache = KernelCache(directory, limit_bytes=3 * 1032)
    for round_ in range(150):
        key = KEYS[(round_ * 5 + seed) % len(KEYS)]
        cache.put(key, key.encode() * 31)
        cache.prune()
        assert cache.get(key) in (None, key.encode() * 31)


def test_processes_share_a_folder(tmp_path: Path) -> None:
    processes = [multiprocessing.get_context("spawn").Process(target=_hammer, args=(tmp_path, seed)) for seed in (0, 3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert not list(tmp_path.glob(".new-*"))


def test_the_folder_is_the_users_unless_the_environment_names_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RADIXLM_KERNEL_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert KernelCache.of_user().directory == tmp_path / "radixlm" / "kernels"
    monkeypatch.setenv("RADIXLM_KERNEL_CACHE", str(tmp_path / "elsewhere"))
    assert KernelCache.of_user().directory == tmp_path / "elsewhere"
