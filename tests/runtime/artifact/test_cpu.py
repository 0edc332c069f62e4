"""What the processor can do is asked of the processor, and threads are those that this process may use."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import platform
from pathlib import Path
from types import SimpleNamespace

import pytest
from radixlm.runtime.artifact import cpu

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="asks an x86-64 processor")

FLAGS = "flags : fpu sse2 pni ssse3 sse4_1 sse4_2 popcnt avx f16c fma movbe bmi1 avx2 bmi2 abm avx512f avx512_vnni"


def test_the_processor_says_what_the_kernel_says() -> None:
    flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    names = {"pni": "sse3", "abm": "lzcnt", "avx512_vnni": "avx512vnni"}
    listed = {names.get(flag, flag) for flag in flags.split()}
    assert cpu.cpu_features() <= listed


def refuse(*arguments: object, **options: object) -> None:
    raise PermissionError(13, "Permission denied")


def test_where_memory_may_not_be_executed_the_kernel_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    found = cpu.cpu_features()
    monkeypatch.setattr(mmap, "mmap", refuse)
    assert cpu.cpu_features.__wrapped__() >= found
    monkeypatch.setattr(Path, "read_text", lambda path: f"processor : 0\n{FLAGS}\n")
    found = cpu.cpu_features.__wrapped__()
    assert {"sse3", "lzcnt", "avx512vnni", "avx2"} <= found
    assert not found & {"fpu", "sse2", "pni", "abm"}


def test_another_architecture_has_no_features(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert cpu.cpu_features.__wrapped__() == frozenset()


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ({16: 0xFF}, {"neon"}),  # Cortex-A72
        ({16: 0x119FFF}, {"neon", "dotprod"}),  # Neoverse N1
        ({16: 0xEFFFFFFB, 26: 0x2FFF}, {"neon", "dotprod", "i8mm"}),  # Neoverse V1
        ({26: 1 << 20 | 1 << 1}, set()),
    ],
)
def test_of_arm_the_auxiliary_vector_is_asked(
    words: dict[int, int], found: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def getauxval(word: int) -> int:
        return words.get(word, 0)

    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(getauxval=getauxval))
    assert cpu.cpu_features.__wrapped__() == found


@pytest.mark.parametrize(
    ("said", "features"),
    [
        ({"hw.optional.arm.FEAT_DotProd": 1, "hw.optional.arm.FEAT_I8MM": 0}, {"neon", "dotprod"}),
        ({"hw.optional.arm.FEAT_DotProd": 1, "hw.optional.arm.FEAT_I8MM": 1}, {"neon", "dotprod", "i8mm"}),
        ({}, {"neon"}),
    ],
)
def test_macos_names_the_features_of_its_processor(
    said: dict[str, int], features: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    monkeypatch.setattr(cpu, "system_name", lambda: "macos")
    monkeypatch.setattr(cpu, "sysctl", lambda name: said[name].to_bytes(4, "little") if name in said else None)
    assert cpu.cpu_features.__wrapped__() == features
    assert cpu.is_of_this_machine("arm64-apple-macos14.4-elf")
    assert not cpu.is_of_this_machine("aarch64-linux-gnu") and not cpu.is_of_this_machine("x86_64-linux-gnu")


@pytest.mark.parametrize(
    ("xcr0", "usable"), [(0x00, set()), (0x02, set()), (0x06, {"avx", "fma"}), (0xE6, {"avx", "fma", "avx512f"})]
)
def test_registers_that_the_system_does_not_save_cannot_be_used(xcr0: int, usable: set[str]) -> None:
    assert {name for name in ("avx", "fma", "avx512f") if cpu.is_saved(name, xcr0)} == usable
    assert cpu.is_saved("sse4_2", xcr0)


def test_missing_features_are_sorted_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "cpu_features", lambda: frozenset({"sse3", "avx"}))
    assert cpu.missing_features(["sse3", "fma", "avx2", "avx"]) == ["avx2", "fma"]
    assert cpu.missing_features(()) == []


@pytest.mark.parametrize(("quota", "num_threads"), [(math.inf, 8), (16.0, 8), (2.0, 2), (2.5, 2), (0.5, 1)])
def test_threads_are_the_processors_of_the_mask_cut_by_the_quota(
    monkeypatch: pytest.MonkeyPatch, quota: float, num_threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(cpu, "cpu_quota", lambda: quota)
    assert cpu.default_num_threads() == num_threads


def test_caches_that_processors_share_are_counted_once(tmp_path: Path) -> None:
    caches = [("0", "1", "Data", "32K"), ("0", "3", "Unified", "32768K"), ("1", "1", "Data", "32K")]
    for processor in (0, 1):
        for index, (shared, level, kind, size) in enumerate(caches[:2] if processor == 0 else caches[1:]):
            folder = tmp_path / f"sys/devices/system/cpu/cpu{processor}/cache/index{index}"
            folder.mkdir(parents=True)
            values = {"size": size, "level": level, "type": kind, "shared_cpu_list": shared}
            for name, value in values.items():
                (folder / name).write_text(f"{value}\n")
    (tmp_path / "sys/devices/system/cpu/cpu1/cache/index9").mkdir()  # of which the system says nothing
    assert cpu.cache_bytes(tmp_path) == (32 + 32 + 32768) << 10
    assert cpu.cache_bytes(tmp_path / "elsewhere") == 0
