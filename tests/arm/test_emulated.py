"""64-bit Arm in an emulator: the bits of each kind of layer, compiling, and the commands. `make test-arm` runs these.

Artifacts are compiled on this machine, as `--target` does; the emulated Python opens and runs them. Kernels for Arm are
tested one by one in `tests/compile/kernels`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from radixlm.compile import compile_model
from radixlm.compile.codegen.targets import TARGETS
from radixlm.runtime.artifact import Artifact
from radixlm.runtime.model.logits_digest import logits_digest

from ..compile.families.test_law_of_the_target import SHORT, Case
from ..compile.kernels.emulated import ARCHITECTURE, PYTHON

ARM = [name for name, target in TARGETS.items() if target.triple.startswith(ARCHITECTURE)]
X86 = "x86-64-v3"
NUM_TOKENS = 40  # three pages, the last of them partly filled
COMMAND = "from radixlm.cli.main import main; main()"
NATIVE = "from radixlm.compile.codegen.targets import find_target; print(find_target('native').name)"
COMPILED = """
import sys
from pathlib import Path
from radixlm.compile.codegen.kernel_cache import KernelCache
from radixlm.compile.codegen.library import build_library
from radixlm.compile.codegen.targets import find_target
from radixlm.compile.kernels.sampling.top_k import top_k
cache = KernelCache(Path(sys.argv[1]) / "kernels")
build_library([top_k(64)], find_target(sys.argv[2]), cache).export(Path(sys.argv[1]) / "library.so")
"""


def python(*arguments: str | Path, cpu: str | None = None, code: str = COMMAND) -> subprocess.CompletedProcess[str]:
    """Run code in the emulated Python, by default one of our commands, on one of qemu's processors."""
    assert PYTHON is not None, "RADIXLM_ARM_PYTHON names no emulated Python; run make test-arm"
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"} | ({} if cpu is None else {"QEMU_CPU": cpu})
    command = [PYTHON, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)


def printed_here(*arguments: str | Path, code: str = COMMAND) -> str:
    """What the same prints on this machine."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout


def printed(*arguments: str | Path, code: str = COMMAND) -> str:
    """What code prints in the emulated Python, where it succeeds."""
    done = python(*arguments, code=code)
    assert done.returncode == 0, done.stderr
    return done.stdout


def cases() -> list[Any]:
    """Sinks and experts on all targets; states, latent attention, and chunks with temperatures on one."""
    often = {(SHORT[0], name) for name in ARM} | set(zip(SHORT[1:], ARM, strict=True))
    every = [(case, name) for case in SHORT for name in ARM]
    return [
        pytest.param(*each, id="-".join((*each[0], each[1])), marks=[] if each in often else [pytest.mark.long])
        for each in every
    ]


@pytest.mark.parametrize(("case", "target"), cases())
def test_arm_has_the_bits_of_x86(case: Case, target: str, family_artifact: Callable[..., Path]) -> None:
    expected = logits_digest(Artifact.open(family_artifact(*case, X86)), num_tokens=NUM_TOKENS, num_threads=1)
    found = json.loads(printed("verify-bits", family_artifact(*case, target), "--tokens", str(NUM_TOKENS), "--json"))
    assert (found["target"], found["numeric_class"]) == (target, expected.numeric_class)
    assert found["sha256"] == expected.sha256


@pytest.mark.parametrize(
    ("cpu", "native", "refused"), [("cortex-a72", "armv8", "lacks dotprod"), ("neoverse-n1", "armv8.2-dotprod", None)]
)
def test_a_processor_runs_what_it_has_instructions_for(
    cpu: str, native: str, refused: str | None, family_artifact: Callable[..., Path]
) -> None:
    found = python(
        cpu=cpu, code="from radixlm.compile.codegen.targets import find_target; print(find_target('native'))"
    )
    assert f"name='{native}'" in found.stdout, found.stderr
    artifact = family_artifact(*SHORT[0], "armv8.2-dotprod")
    done = python("verify-bits", artifact, "--tokens", "2", cpu=cpu)
    if refused is None:
        assert done.returncode == 0, done.stderr
    else:
        assert (done.returncode, refused in done.stderr, "--target armv8" in done.stderr) == (2, True, True), (
            done.stderr
        )


@pytest.mark.xfail(strict=True, reason="LLVM schedules and allocates registers otherwise on Arm; results are the same")
def test_arm_compiles_to_the_same_bytes(tmp_path: Path) -> None:
    """A kernel, from TIR to machine code, and the library of it."""
    for folder, run in (("here", printed_here), ("there", printed)):
        (tmp_path / folder).mkdir()
        run(tmp_path / folder, ARM[0], code=COMPILED)
    assert (tmp_path / "here/library.so").read_bytes() == (tmp_path / "there/library.so").read_bytes()


OPTIONS: dict[str, Any] = {"quantize": "q4", "kv_dtype": "k12v8", "name": "tiny"}


def test_arm_compiles_a_model_to_the_same_artifact(tiny_source: Path, tmp_path: Path) -> None:
    """The kernels are in the cache already: the emulator would take minutes for them. They are found by their keys."""
    here, there = tmp_path / "here.radixlm", tmp_path / "there.radixlm"
    compile_model(tiny_source, here, target=ARM[1], **OPTIONS)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    printed("compile", tiny_source, "-o", there, "--target", ARM[1], *flags)
    files = sorted(path.name for path in here.iterdir())
    assert files == sorted(path.name for path in there.iterdir())
    assert [name for name in files if (here / name).read_bytes() != (there / name).read_bytes()] == []


def test_arm_generates_the_text_of_x86(tiny_source: Path, tmp_path: Path) -> None:
    arm, x86 = tmp_path / "arm.radixlm", tmp_path / "x86.radixlm"
    compile_model(tiny_source, arm, target=ARM[1], **OPTIONS)
    compile_model(tiny_source, x86, **OPTIONS)
    prompt = ("the cat sat on", "--max-tokens", "6", "--temperature", "0", "--kv-cache-gb", "0.01")
    assert printed("generate", arm, *prompt) == printed_here("generate", x86, *prompt)
