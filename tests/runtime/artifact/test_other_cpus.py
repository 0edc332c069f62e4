"""An artifact on a CPU that is not the one it was compiled for: a typed error or the right answer, never SIGILL.

Older CPUs are qemu's (`apt-get install qemu-user`); the same refusals are tested everywhere by hiding features.
"""

from __future__ import annotations

import functools
import mmap
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from radixlm.compile.codegen import targets
from radixlm.compile.codegen.targets import TARGETS, find_target
from radixlm.runtime.artifact import Artifact, cpu
from radixlm.runtime.errors import UnsupportedCPU
from radixlm.runtime.model.model_runner import ModelRunner

from ...conftest import CompileOnce

QEMU = shutil.which("qemu-x86_64")
BEST, AVX2, OLD, ANY = "x86-64-v4-vnni", "x86-64-v3", "x86-64-v2", "x86-64"
COMMAND = "from radixlm.cli.main import main; main()"

needs_qemu = pytest.mark.skipif(QEMU is None, reason="qemu-x86_64 is not installed (Debian: qemu-user)")


@pytest.fixture(scope="module")
def artifacts(tiny_source: Path, compile_once: CompileOnce) -> dict[str, Path]:
    """The tiny model for each target that this machine can verify."""
    names = [name for name in (BEST, AVX2, ANY) if TARGETS[name].runs_here]
    return {name: compile_once(tiny_source, quantize="q4", target=name) for name in names}


def test_an_artifact_for_a_better_cpu_names_what_is_missing_and_the_target_to_choose(
    artifacts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "cpu_features", lambda: frozenset(TARGETS[OLD].features))
    for name in artifacts.keys() - {ANY}:
        artifact = Artifact.open(artifacts[name])
        with pytest.raises(UnsupportedCPU, match=rf"compiled for {name}, .* lacks avx.*; .*--target x86-64"):
            ModelRunner(artifact, num_pages=1)
    ModelRunner(Artifact.open(artifacts[ANY]), num_pages=1).close()


@pytest.mark.parametrize("name", TARGETS)
def test_native_is_the_best_target_that_the_machine_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "cpu_features", lambda: frozenset(TARGETS[name].features))
    triple = TARGETS[name].triple
    monkeypatch.setattr(targets, "is_of_this_machine", lambda other: other == triple)
    assert find_target("native").name == name


@pytest.mark.parametrize(("machine", "system"), [("riscv64", "linux"), ("x86_64", "macos")])
def test_a_machine_without_a_target_is_told_where_radixlm_runs(
    machine: str, system: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Mac with a processor of Intel's is one."""
    monkeypatch.setattr(platform, "machine", lambda: machine)
    for module in (cpu, targets):
        monkeypatch.setattr(module, "system_name", lambda: system)
    with pytest.raises(UnsupportedCPU, match=f"there is no target for {machine} with {system}; radixlm runs on Linux"):
        find_target("native")


@pytest.mark.parametrize("name", [name for name in TARGETS if name.startswith("x86-64")])
def test_every_target_asks_for_features_that_can_be_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    wanted = TARGETS[name].features
    monkeypatch.setattr(mmap, "mmap", refuse)  # the kernel is asked then
    monkeypatch.setattr(Path, "read_text", lambda path: f"flags : {' '.join(wanted)}\n")
    assert cpu.cpu_features.__wrapped__() == set(wanted)


def test_an_artifact_of_another_architecture_names_both_and_the_target_to_choose(
    artifacts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    for path in artifacts.values():
        with pytest.raises(
            UnsupportedCPU, match=r"this CPU is aarch64, not x86_64; .*--target armv8 for any 64-bit Arm"
        ):
            Artifact.open(path).check_cpu()


def test_every_target_answers_the_same_on_this_machine(artifacts: dict[str, Path]) -> None:
    """Integer dot products are exact on all; floats differ in the last bits (fused or not), these tokens do not."""
    replies = {_generate(path).stdout for path in artifacts.values()}
    assert len(replies) == 1
    assert replies.pop().strip()


@needs_qemu
@pytest.mark.parametrize(
    ("model", "runs"), [("Haswell", (AVX2, ANY)), ("Nehalem", (ANY,)), ("Skylake-Server", (AVX2, ANY))]
)
def test_an_older_cpu_answers_or_says_what_it_lacks(
    artifacts: dict[str, Path], model: str, runs: tuple[str, ...]
) -> None:
    """qemu emulates no AVX-512, so that its Skylake-Server is one whose system does not save those registers."""
    for name, path in artifacts.items():
        done = _generate(path, model)
        if name in runs:
            assert done.returncode == 0, done.stderr
            assert done.stdout == _generate(path).stdout
        else:
            assert done.returncode == 2, done.stderr
            (line,) = done.stderr.splitlines()
            assert line.startswith(f"Error: {path} was compiled for {name}, and this CPU lacks av")
            assert "--target x86-64" in line


@needs_qemu
@pytest.mark.parametrize(("model", "target"), [("Haswell", AVX2), ("Nehalem", OLD), ("Conroe", ANY), ("max", AVX2)])
def test_features_are_those_of_the_emulated_cpu(model: str, target: str) -> None:
    code = "from radixlm.runtime.artifact.cpu import cpu_features; print(*cpu_features())"
    found = set(_python(["-c", code], model).stdout.split())
    assert found >= set(TARGETS[target].features)
    assert not any(name.startswith("avx512") for name in found)
    better = list(TARGETS)[list(TARGETS).index(target) - 1]
    assert not found >= set(TARGETS[better].features)


@functools.cache
def _generate(artifact: Path, model: str | None = None) -> subprocess.CompletedProcess[str]:
    """Continue a prompt by the real command, on this CPU, where it is asked once, or on qemu's `model`."""
    arguments = ["generate", str(artifact), "the cat sat on", "--max-tokens", "4", "--temperature", "0"]
    return _python(["-c", COMMAND, *arguments, "--threads", "1", "--kv-cache-gb", "0.01"], model)


def _python(arguments: list[str], model: str | None) -> subprocess.CompletedProcess[str]:
    emulator = [] if model is None else [str(QEMU), "-cpu", model]
    # a machine may say which BLAS kernels to use, which the emulated CPU need not have
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_CORETYPE"}
    done = subprocess.run(
        [*emulator, sys.executable, *arguments], capture_output=True, text=True, env=environment, timeout=300
    )
    lines = (line for line in done.stderr.splitlines(True) if "TCG doesn't support" not in line)
    done.stderr = "".join(lines)
    return done
